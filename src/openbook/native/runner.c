/* One token through a decoder: an interpreter of the op list that lower.py makes.
 *
 * All threads walk the same list inside one parallel region. An op's work is cut into items (rows of a
 * matrix, heads, elements), each thread takes a contiguous share, and a barrier follows where the next
 * op reads what this one wrote. Activations are fp32; weights and the KV cache are read as they lie in
 * memory, fp32 or bf16, so one step reads each weight once: its speed is the memory's.
 *
 * Portable C with GCC/Clang vector extensions; the compiler lowers them to what the machine has.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

enum { EMBED, NORM, LINEAR, ROTATE, STORE, ATTEND, ACTIVATE, GATE, ADD };
enum { F32, BF16 };
enum { RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH };

/* Mirrored field by field in lower.py. */
typedef struct {
    int32_t code, kind, dtype, barrier;
    int64_t n;     /* items: rows of a matrix, heads, or elements */
    int64_t width; /* elements of one item: columns of a matrix, a head's size */
    int64_t layer; /* whose cells of the KV cache */
    int64_t group; /* query heads per key/value head; or elements that are rotated */
    int32_t flags; /* ACCUMULATE: dst += instead of dst =; LAYERNORM; INTERLEAVED */
    float eps, offset, scale, softcap;
    const void *weight, *bias;
    const float *a, *b; /* inputs */
    float *dst;
} Op;

enum { ACCUMULATE = 1, LAYERNORM = 2, INTERLEAVED = 4 };

typedef struct {
    int64_t token, position; /* position: row of a learned table */
    int64_t length;          /* tokens in the cache, this one included */
    void **k, **v;           /* for each layer: [G, cells, K] */
    const int64_t *cells;
    float *scratch; /* scores: n_heads rows of max cells */
    int64_t scratch_row;
    int32_t cache_dtype, threads;
} Step;

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));

static inline float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest, ties to even, as PyTorch does; NaN stays NaN. */
static inline uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline v16 load16(const void *p, int64_t i, int dtype) {
    if (dtype == F32) return *(const v16 *)((const float *)p + i);
    u16x32 wide = __builtin_convertvector(*(const h16 *)((const uint16_t *)p + i), u16x32) << 16;
    return (v16)wide;
}

static inline float load(const void *p, int64_t i, int dtype) {
    return dtype == F32 ? ((const float *)p)[i] : from_bf16(((const uint16_t *)p)[i]);
}

static inline float sum16(v16 x) {
    float s = 0;
    for (int i = 0; i < 16; i++) s += x[i];
    return s;
}

static inline __attribute__((always_inline)) float dot(const void *w, const float *x, int64_t width, int dtype) {
    v16 sum = {0};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) sum += load16(w, i, dtype) * *(const v16 *)(x + i);
    float s = sum16(sum);
    for (; i < width; i++) s += load(w, i, dtype) * x[i];
    return s;
}

/* Four rows at once: the input is loaded once for four, and four streams keep the memory busy. Each row adds
 * in the order of `dot`, so that how the rows are shared among threads does not change a bit. */
static inline __attribute__((always_inline)) void dot4(
    const char *w, int64_t stride, const float *x, int64_t width, int dtype, float *out) {
    v16 s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        v16 xi = *(const v16 *)(x + i);
        s0 += load16(w, i, dtype) * xi;
        s1 += load16(w + stride, i, dtype) * xi;
        s2 += load16(w + 2 * stride, i, dtype) * xi;
        s3 += load16(w + 3 * stride, i, dtype) * xi;
    }
    out[0] = sum16(s0), out[1] = sum16(s1), out[2] = sum16(s2), out[3] = sum16(s3);
    for (; i < width; i++)
        for (int r = 0; r < 4; r++) out[r] += load(w + r * stride, i, dtype) * x[i];
}

static inline __attribute__((always_inline)) void linear_rows(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t stride = op->width * (dtype == F32 ? 4 : 2);
    const char *w = op->weight;
    for (int64_t r = from; r < to;) {
        float y[4];
        int rows = to - r >= 4 ? 4 : 1;
        if (rows == 4) dot4(w + r * stride, stride, op->a, op->width, dtype, y);
        else y[0] = dot(w + r * stride, op->a, op->width, dtype);
        for (int i = 0; i < rows; i++, r++) {
            float value = y[i] + (op->bias ? load(op->bias, r, dtype) : 0);
            op->dst[r] = op->flags & ACCUMULATE ? op->dst[r] + value : value;
        }
    }
}

static void linear(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) linear_rows(op, from, to, F32);
    else linear_rows(op, from, to, BF16);
}

static void norm(const Op *op, int64_t from, int64_t to) {
    int64_t width = op->width;
    for (int64_t item = from; item < to; item++) {
        const float *x = op->a + item * width;
        float *y = op->dst + item * width;
        double sum = 0, square = 0; /* double: the order of addition does not show */
        for (int64_t i = 0; i < width; i++) sum += x[i];
        double mean = op->flags & LAYERNORM ? sum / width : 0;
        for (int64_t i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        float by = (float)(1 / sqrt(square / width + op->eps));
        for (int64_t i = 0; i < width; i++) {
            float scale = op->weight ? load(op->weight, i, op->dtype) + op->offset : 1;
            y[i] = (float)(x[i] - mean) * by * scale + (op->bias ? load(op->bias, i, op->dtype) : 0);
        }
    }
}

/* b: the cosines of all pairs, then the sines. */
static void rotate(const Op *op, int64_t from, int64_t to) {
    int64_t half = op->group / 2;
    int interleaved = op->flags & INTERLEAVED;
    for (int64_t head = from; head < to; head++) {
        float *x = op->dst + head * op->width;
        for (int64_t i = 0; i < half; i++) {
            float *p = interleaved ? x + 2 * i : x + i, *q = interleaved ? p + 1 : p + half;
            float a = *p, b = *q, c = op->b[i], s = op->b[half + i];
            *p = a * c - b * s;
            *q = b * c + a * s;
        }
    }
}

/* a: keys, b: values of this token, into cell (length - 1) mod cells. */
static void store(const Op *op, const Step *step, int64_t from, int64_t to) {
    int64_t cells = step->cells[op->layer], cell = (step->length - 1) % cells, width = op->width;
    for (int64_t head = from; head < to; head++)
        for (int which = 0; which < 2; which++) {
            const float *x = (which ? op->b : op->a) + head * width;
            void *cache = which ? step->v[op->layer] : step->k[op->layer];
            int64_t at = (head * cells + cell) * width;
            if (step->cache_dtype == F32) memcpy((float *)cache + at, x, width * 4);
            else for (int64_t i = 0; i < width; i++) ((uint16_t *)cache)[at + i] = to_bf16(x[i]);
        }
}

static inline __attribute__((always_inline)) void attend_heads(
    const Op *op, const Step *step, int64_t from, int64_t to, int dtype) {
    int64_t cells = step->cells[op->layer], width = op->width, size = dtype == F32 ? 4 : 2;
    int64_t seen = step->length < cells ? step->length : cells;
    for (int64_t head = from; head < to; head++) {
        const char *k = (char *)step->k[op->layer] + head / op->group * cells * width * size;
        const char *v = (char *)step->v[op->layer] + head / op->group * cells * width * size;
        const float *q = op->a + head * width;
        float *y = op->dst + head * width, *p = step->scratch + head * step->scratch_row;
        float top = -INFINITY, sum = 0;
        for (int64_t s = 0; s < seen; s++) {
            p[s] = dot(k + s * width * size, q, width, dtype) * op->scale;
            if (op->softcap > 0) p[s] = op->softcap * tanhf(p[s] / op->softcap);
            if (p[s] > top) top = p[s];
        }
        for (int64_t s = 0; s < seen; s++) sum += p[s] = expf(p[s] - top);
        memset(y, 0, width * 4);
        for (int64_t s = 0; s < seen; s++) {
            float weight = p[s] / sum;
            int64_t i = 0;
            for (; i + 16 <= width; i += 16) *(v16 *)(y + i) += weight * load16(v, s * width + i, dtype);
            for (; i < width; i++) y[i] += weight * load(v, s * width + i, dtype);
        }
    }
}

static void attend(const Op *op, const Step *step, int64_t from, int64_t to) {
    if (step->cache_dtype == F32) attend_heads(op, step, from, to, F32);
    else attend_heads(op, step, from, to, BF16);
}

static inline float activation(float x, int kind) {
    switch (kind) {
    case RELU: return x > 0 ? x : 0;
    case RELU2: return x > 0 ? x * x : 0;
    case GELU: return 0.5f * x * (1 + erff(x * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case GELU_QUICK: return x / (1 + expf(-1.702f * x));
    case SILU: return x / (1 + expf(-x));
    case SIGMOID: return 1 / (1 + expf(-x));
    default: return tanhf(x);
    }
}

static void run_op(const Op *op, const Step *step, int64_t from, int64_t to) {
    switch (op->code) {
    case EMBED: /* weight: the embedding; bias: learned positions, or none; a: added as it is, or none */
        for (int64_t i = from; i < to; i++) {
            float x = load(op->weight, step->token * op->n + i, op->dtype);
            if (op->bias) x += load(op->bias, step->position * op->n + i, op->dtype);
            op->dst[i] = op->a ? x + op->a[i] : x;
        }
        break;
    case NORM: norm(op, from, to); break;
    case LINEAR: linear(op, from, to); break;
    case ROTATE: rotate(op, from, to); break;
    case STORE: store(op, step, from, to); break;
    case ATTEND: attend(op, step, from, to); break;
    case ACTIVATE:
        for (int64_t i = from; i < to; i++) op->dst[i] = activation(op->a[i], op->kind);
        break;
    case GATE:
        for (int64_t i = from; i < to; i++) op->dst[i] = activation(op->a[i], op->kind) * op->b[i];
        break;
    case ADD:
        for (int64_t i = from; i < to; i++) op->dst[i] += op->a[i];
        break;
    }
}

int64_t openbook_op_size(void) { return sizeof(Op); }
int64_t openbook_step_size(void) { return sizeof(Step); }

void openbook_run(const Op *ops, int64_t n_ops, const Step *step) {
#pragma omp parallel num_threads(step->threads)
    {
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t i = 0; i < n_ops; i++) {
            const Op *op = ops + i;
            /* shares in multiples of 4 items, so that rows go four at a time; few items stay whole */
            int64_t quads = (op->n + 3) / 4, unit = op->n >= 64 ? 4 : 1;
            int64_t units = unit == 4 ? quads : op->n;
            int64_t from = me * units / all * unit, to = (me + 1) * units / all * unit;
            run_op(op, step, from, to > op->n ? op->n : to);
            if (op->barrier) {
#pragma omp barrier
            }
        }
    }
}
