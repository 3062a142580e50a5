/* One token through a decoder: an interpreter of the op list that lower.py makes.
 *
 * All threads walk the same list. An op's work is cut into items (rows of a matrix, heads, elements), of
 * which each thread takes a few at a time, and a barrier follows where the next op reads what this wrote. Activations are fp32; weights are read as they lie in memory, fp32, bf16
 * or GGML's blocks, whose numbers are decoded to fp32 in registers; so a step reads each weight once, in
 * its own size, and computes what the decoded matrix would give.
 *
 * Portable C with GCC/Clang vector extensions; the compiler lowers them to what the machine has.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { EMBED, NORM, LINEAR, ROTATE, STORE, ATTEND, ACTIVATE, GATE, ADD, PACK, ATTEND_ROWS, ROTATE_ROWS };
enum { F32, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
enum { RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH };

/* Mirrored field by field in lower.py. */
typedef struct {
    int32_t code, kind, barrier;
    int32_t dtype, matrix; /* of vectors and tables; of a LINEAR's matrix, or of what GATE reads and writes */
    int64_t n;     /* items: rows of a matrix, heads, or elements */
    int64_t width; /* elements of one item: columns of a matrix, a head's size */
    int64_t layer; /* whose cells of the KV cache */
    int64_t group; /* query heads per key/value head; or elements that are rotated */
    int64_t row_bytes; /* of a LINEAR's matrix */
    int64_t rows, keys;             /* PACK, ATTEND_ROWS: T queries, the last of S keys */
    int64_t a_row, a_head, kv_head; /* elements from one query row, query head, key/value head to the next */
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
typedef int32_t i32x16 __attribute__((vector_size(64)));
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

/* Nearest, ties to even. Not for NaN with a payload that rounds to infinity: activations have none. */
static inline h16 to_bf16x16(v16 x) {
    u16x32 bits = (u16x32)x;
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, h16);
}

static inline void put16(void *p, int64_t i, v16 x, int dtype) {
    if (dtype == F32) *(v16 *)((float *)p + i) = x;
    else *(h16 *)((uint16_t *)p + i) = to_bf16x16(x);
}

static inline void put1(void *p, int64_t i, float x, int dtype) {
    if (dtype == F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = to_bf16(x);
}

static inline v16 choose(i32x16 where, v16 yes, v16 no) {
    return (v16)(((i32x16)yes & where) | ((i32x16)no & ~where));
}

static inline float sum16(v16 x) {
    float s = 0;
    for (int i = 0; i < 16; i++) s += x[i];
    return s;
}

#define INLINE static inline __attribute__((always_inline)) /* so that dtype is a constant inside */

INLINE float dot(const void *w, const float *x, int64_t width, int dtype) {
    v16 sum = {0};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) sum += load16(w, i, dtype) * *(const v16 *)(x + i);
    float s = sum16(sum);
    for (; i < width; i++) s += load(w, i, dtype) * x[i];
    return s;
}

/* Four rows at once: the input is loaded once for four, and four streams keep the memory busy. Each row adds
 * in the order of `dot`, so that how the rows are shared among threads does not change a bit. */
INLINE void dot4(const char *w, int64_t stride, const float *x, int64_t width, int dtype, float *out) {
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

/* --- GGML's blocks; their layouts are those of ggml-quants.c, and of weights/quant.py --- */

typedef uint8_t b16 __attribute__((vector_size(16), aligned(1)));
typedef int8_t c16 __attribute__((vector_size(16), aligned(1)));

static inline float half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
#ifdef __FLT16_MAX__
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x0400) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f; /* subnormal */
    uint32_t bits = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000);
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

static inline v16 float_of(b16 q) { return __builtin_convertvector(__builtin_convertvector(q, i32x16), v16); }

/* The fifth bits of 16 numbers: bit i of `bits` becomes 16 in lane i. */
static inline i32x16 fifth(uint32_t bits) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i32x16 all = (i32x16){0} + (int32_t)bits;
    return (all >> lane & 1) << 4;
}

/* Scale and minimum of the j-th 32 numbers of a Q4_K or Q5_K block: 6 bits each, in 12 bytes. */
static inline void scale_min(const uint8_t *s, int j, float *scale, float *min) {
    int low = j & 3;
    if (j < 4) *scale = s[low] & 63, *min = s[low + 4] & 63;
    else *scale = (s[low + 8] & 15) | (s[low] >> 6) << 4, *min = s[low + 8] >> 4 | (s[low + 4] >> 6) << 4;
}

/* The g-th 32 numbers of a row. */
INLINE void decode32(const uint8_t *row, int64_t g, int type, v16 *lo, v16 *hi) {
    switch (type) {
    case Q8_0: { /* d, 32 signed bytes */
        const uint8_t *p = row + g * 34;
        float d = half(p);
        *lo = d * __builtin_convertvector(__builtin_convertvector(*(const c16 *)(p + 2), i32x16), v16);
        *hi = d * __builtin_convertvector(__builtin_convertvector(*(const c16 *)(p + 18), i32x16), v16);
        break;
    }
    case Q4_0: { /* d, 16 bytes of two nibbles; 8 is zero */
        const uint8_t *p = row + g * 18;
        b16 q = *(const b16 *)(p + 2);
        float d = half(p);
        *lo = d * (float_of(q & 15) - 8), *hi = d * (float_of(q >> 4) - 8);
        break;
    }
    case Q4_1: { /* d, m, nibbles */
        const uint8_t *p = row + g * 20;
        b16 q = *(const b16 *)(p + 4);
        float d = half(p), m = half(p + 2);
        *lo = d * float_of(q & 15) + m, *hi = d * float_of(q >> 4) + m;
        break;
    }
    case Q5_0:
    case Q5_1: { /* d (, m), 32 fifth bits, nibbles; Q5_0: 16 is zero */
        const uint8_t *p = row + g * (type == Q5_0 ? 22 : 24), *bits = p + (type == Q5_0 ? 2 : 4);
        uint32_t fifths;
        memcpy(&fifths, bits, 4);
        b16 q = *(const b16 *)(bits + 4);
        i32x16 l = __builtin_convertvector(q & 15, i32x16) | fifth(fifths);
        i32x16 h = __builtin_convertvector(q >> 4, i32x16) | fifth(fifths >> 16);
        float d = half(p), m = type == Q5_0 ? -16 * d : half(p + 2);
        *lo = d * __builtin_convertvector(l, v16) + m, *hi = d * __builtin_convertvector(h, v16) + m;
        break;
    }
    case Q4_K:
    case Q5_K: { /* d, dmin, 12 bytes of scales, (32 bytes of fifth bits,) 128 of nibbles */
        const uint8_t *p = row + g / 8 * (type == Q4_K ? 144 : 176), *q = p + (type == Q4_K ? 16 : 48);
        int j = g % 8, up = (j & 1) * 4;
        float scale, min;
        scale_min(p + 4, j, &scale, &min);
        scale *= half(p), min *= half(p + 2);
        b16 l = *(const b16 *)(q + j / 2 * 32) >> up & 15, h = *(const b16 *)(q + j / 2 * 32 + 16) >> up & 15;
        if (type == Q5_K) {
            l |= (*(const b16 *)(p + 16) >> j & 1) << 4;
            h |= (*(const b16 *)(p + 32) >> j & 1) << 4;
        }
        *lo = scale * float_of(l) - min, *hi = scale * float_of(h) - min;
        break;
    }
    case Q6_K: { /* 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d; 32 is zero */
        const uint8_t *p = row + g / 8 * 210;
        int j = g % 8, n = j / 4; /* the n-th half of 128 numbers: four times 32 */
        const uint8_t *ql = p + n * 64 + (j & 1) * 32, *qh = p + 128 + n * 32;
        int up = (j & 2) * 2, pair = (j & 3) * 2;
        b16 l = (*(const b16 *)ql >> up & 15) | (*(const b16 *)qh >> pair & 3) << 4;
        b16 h = (*(const b16 *)(ql + 16) >> up & 15) | (*(const b16 *)(qh + 16) >> pair & 3) << 4;
        const int8_t *scales = (const int8_t *)p + 192 + j * 2;
        float d = half(p + 208);
        *lo = d * scales[0] * (float_of(l) - 32), *hi = d * scales[1] * (float_of(h) - 32);
        break;
    }
    }
}

INLINE float dot_blocks(const uint8_t *row, const float *x, int64_t width, int type) {
    v16 s0 = {0}, s1 = {0};
    for (int64_t g = 0; g < width / 32; g++) {
        v16 lo, hi;
        decode32(row, g, type, &lo, &hi);
        s0 += lo * *(const v16 *)(x + g * 32);
        s1 += hi * *(const v16 *)(x + g * 32 + 16);
    }
    return sum16(s0 + s1);
}

/* --- the operations --- */

static void put(const Op *op, int64_t r, float y) {
    if (op->bias) y += load(op->bias, r, op->dtype);
    op->dst[r] = op->flags & ACCUMULATE ? op->dst[r] + y : y;
}

INLINE void linear_plain(const Op *op, int64_t from, int64_t to, int dtype) {
    const char *w = op->weight;
    int64_t stride = op->row_bytes, r = from;
    for (; r + 4 <= to; r += 4) {
        float y[4];
        dot4(w + r * stride, stride, op->a, op->width, dtype, y);
        for (int i = 0; i < 4; i++) put(op, r + i, y[i]);
    }
    for (; r < to; r++) put(op, r, dot(w + r * stride, op->a, op->width, dtype));
}

INLINE void linear_blocks(const Op *op, int64_t from, int64_t to, int type) {
    const uint8_t *w = op->weight;
    for (int64_t r = from; r < to; r++) put(op, r, dot_blocks(w + r * op->row_bytes, op->a, op->width, type));
}

static void linear(const Op *op, int64_t from, int64_t to) {
    switch (op->matrix) {
    case F32: linear_plain(op, from, to, F32); break;
    case BF16: linear_plain(op, from, to, BF16); break;
    case Q8_0: linear_blocks(op, from, to, Q8_0); break;
    case Q4_0: linear_blocks(op, from, to, Q4_0); break;
    case Q4_1: linear_blocks(op, from, to, Q4_1); break;
    case Q5_0: linear_blocks(op, from, to, Q5_0); break;
    case Q5_1: linear_blocks(op, from, to, Q5_1); break;
    case Q4_K: linear_blocks(op, from, to, Q4_K); break;
    case Q5_K: linear_blocks(op, from, to, Q5_K); break;
    case Q6_K: linear_blocks(op, from, to, Q6_K); break;
    }
}

INLINE void norm_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t width = op->width, whole = width / 16 * 16, i;
    for (int64_t item = from; item < to; item++) {
        const float *x = op->a + item * width;
        float *y = op->dst + item * width, mean = 0, square = 0;
        if (op->flags & LAYERNORM) {
            v16 sum = {0};
            for (i = 0; i < whole; i += 16) sum += *(const v16 *)(x + i);
            for (mean = sum16(sum); i < width; i++) mean += x[i];
            mean /= width;
        }
        v16 squares = {0};
        for (i = 0; i < whole; i += 16) {
            v16 d = *(const v16 *)(x + i) - mean;
            squares += d * d;
        }
        for (square = sum16(squares); i < width; i++) square += (x[i] - mean) * (x[i] - mean);
        float by = 1 / sqrtf(square / width + op->eps);
        for (i = 0; i < whole; i += 16) {
            v16 z = (*(const v16 *)(x + i) - mean) * by;
            if (op->weight) z *= load16(op->weight, i, dtype) + op->offset;
            if (op->bias) z += load16(op->bias, i, dtype);
            *(v16 *)(y + i) = z;
        }
        for (; i < width; i++) {
            float z = (x[i] - mean) * by;
            if (op->weight) z *= load(op->weight, i, dtype) + op->offset;
            y[i] = z + (op->bias ? load(op->bias, i, dtype) : 0);
        }
    }
}

static void norm(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) norm_of(op, from, to, F32);
    else norm_of(op, from, to, BF16);
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

INLINE void attend_heads(const Op *op, const Step *step, int64_t from, int64_t to, int dtype) {
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

/* e^x for x <= 0, to 2 units in the last place (the polynomial is Cephes' expf). */
INLINE v16 exp16(v16 x) {
    x = choose(x < -87.0f, (v16){0} - 87.0f, x);
    v16 shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the rounded integer in the low bits */
    v16 n = shifted - 12582912.0f;
    v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16 y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
             + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (v16)((i32x16)y + ((i32x16)shifted << 23));
}

/* --- many queries at once: a prompt ---
 *
 * PACK lays keys and values out in tiles of 32 keys: keys so that 32 of them are neighbours at each element,
 * values as they are; in bf16 both in pairs, of elements and of keys, as the processor's dot product of
 * pairs wants them. What lies beyond the last key is zero. ATTEND_ROWS takes 8 queries of a head: all their
 * scores, an exact softmax, and the sum of values, in registers.
 */

enum { TILE = 32, QUERIES = 8 };

#ifdef __AVX512BF16__
#include <immintrin.h>
enum { HAS_BF16 = 1 };
INLINE v16 dot_pairs(v16 sum, u16x32 pairs, uint32_t pair) {
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)((u16x32){0} + pair));
}
#else
enum { HAS_BF16 = 0 };
INLINE v16 dot_pairs(v16 sum, u16x32 pairs, uint32_t pair) {
    float lo = from_bf16((uint16_t)pair), hi = from_bf16((uint16_t)(pair >> 16));
    return sum + (v16)(pairs << 16) * lo + (v16)(pairs & 0xffff0000u) * hi;
}
#endif

int32_t openbook_has_bf16(void) { return HAS_BF16; }

static void pack(const Op *op, int64_t from, int64_t to) {
    int64_t K = op->width, tiles = (op->keys + TILE - 1) / TILE, plane = TILE * K;
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / tiles, first = item % tiles * TILE;
        int64_t base = head * op->kv_head + first * K, count = op->keys - first < TILE ? op->keys - first : TILE;
        if (op->dtype == F32) {
            const float *k = (const float *)op->weight + base, *v = (const float *)op->bias + base;
            float *kt = op->dst + item * 2 * plane, *vt = kt + plane;
            for (int64_t s = 0; s < TILE; s++)
                for (int64_t d = 0; d < K; d++) {
                    kt[d * TILE + s] = s < count ? k[s * K + d] : 0;
                    vt[s * K + d] = s < count ? v[s * K + d] : 0;
                }
        } else {
            const uint16_t *k = (const uint16_t *)op->weight + base, *v = (const uint16_t *)op->bias + base;
            uint16_t *kt = (uint16_t *)op->dst + item * 2 * plane, *vt = kt + plane;
            for (int64_t s = 0; s < TILE; s++)
                for (int64_t d = 0; d < K; d++) {
                    kt[(d / 2 * TILE + s) * 2 + d % 2] = s < count ? k[s * K + d] : 0;
                    vt[(s / 2 * K + d) * 2 + s % 2] = s < count ? v[s * K + d] : 0;
                }
        }
    }
}

INLINE void scores_of_tile(const Op *op, const void *q, const void *kt, float *out, int64_t row, int dtype) {
    v16 sum[QUERIES][2] = {0};
    int64_t K = op->width;
    for (int64_t d = 0; d < (dtype == F32 ? K : K / 2); d++) {
        v16 k0 = *(const v16 *)((const float *)kt + d * TILE), k1 = *(const v16 *)((const float *)kt + d * TILE + 16);
#pragma GCC unroll 8
        for (int i = 0; i < QUERIES; i++) {
            if (dtype == F32) {
                float qi = ((const float *)q)[i * K + d];
                sum[i][0] += qi * k0, sum[i][1] += qi * k1;
            } else {
                uint32_t qi = ((const uint32_t *)q)[i * K / 2 + d];
                sum[i][0] = dot_pairs(sum[i][0], (u16x32)k0, qi);
                sum[i][1] = dot_pairs(sum[i][1], (u16x32)k1, qi);
            }
        }
    }
    for (int i = 0; i < QUERIES; i++)
        *(v16 *)(out + i * row) = sum[i][0] * op->scale, *(v16 *)(out + i * row + 16) = sum[i][1] * op->scale;
}

/* Scores to e^(score - highest), zero beyond `seen`, in place; in bf16 each row's first half then holds them
 * rounded. Returns the sum of what will be multiplied. */
INLINE float exponentials(float *p, int64_t seen, int64_t padded, int dtype) {
    v16 tops = (v16){0} - INFINITY, sum = {0};
    int64_t s0 = 0;
    for (; s0 + 16 <= seen; s0 += 16) {
        v16 x = *(v16 *)(p + s0);
        tops = choose(x > tops, x, tops);
    }
    float top = -INFINITY;
    for (int i = 0; i < 16; i++) top = tops[i] > top ? tops[i] : top;
    for (; s0 < seen; s0++) top = p[s0] > top ? p[s0] : top;
    uint16_t *rounded = (uint16_t *)p;
    for (int64_t s = 0; s < padded; s += 16) {
        v16 e = exp16(*(v16 *)(p + s) - top);
        for (int64_t i = seen - s < 0 ? 0 : seen - s; i < 16; i++) e[i] = 0;
        sum += e;
        if (dtype == F32) *(v16 *)(p + s) = e;
        else *(h16 *)(rounded + s) = to_bf16x16(e);
    }
    return sum16(sum);
}

/* The weighted values of four queries, 64 elements at a time or what is left, in steps of 16. */
INLINE void mix_rows(const Op *op, const void *tiles, const float *p, int64_t row, int64_t padded, int64_t d0,
                     int vectors, int dtype, v16 sum[4][4]) {
    int64_t K = op->width, plane = TILE * K;
    for (int64_t s = 0; s < padded; s += dtype == F32 ? 1 : 2) {
        const float *tile = dtype == F32 ? (const float *)tiles + (s / TILE * 2 + 1) * plane + s % TILE * K
                                         : (const float *)tiles + (s / TILE * 2 + 1) * plane / 2 + s % TILE / 2 * K;
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            v16 v = *(const v16 *)(tile + d0 + j * 16);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                if (dtype == F32) sum[i][j] += p[i * row + s] * v;
                else sum[i][j] = dot_pairs(sum[i][j], (u16x32)v, ((const uint32_t *)(p + i * row))[s / 2]);
            }
        }
    }
}

INLINE void attend_rows_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, T = op->rows, S = op->keys, size = dtype == F32 ? 4 : 2;
    int64_t tiles = (S + TILE - 1) / TILE, row = tiles * TILE, blocks = (T + QUERIES - 1) / QUERIES;
    float p[QUERIES * row], q[QUERIES * K];
    for (int64_t item = from; item < to; item++) {
        int64_t block = blocks - 1 - item / op->layer, head = item % op->layer; /* the longest first */
        int64_t first = block * QUERIES, last = first + QUERIES < T ? first + QUERIES : T;
        int64_t padded = (S - T + last + TILE - 1) / TILE * TILE;
        const char *packed = (const char *)op->weight + head / op->group * tiles * 2 * TILE * K * size;
        for (int64_t i = 0; i < QUERIES; i++) {
            int64_t t = first + i < T ? first + i : T - 1;
            memcpy((char *)q + i * K * size, (const char *)op->a + (head * op->a_head + t * op->a_row) * size, K * size);
        }
        for (int64_t s = 0; s < padded; s += TILE)
            scores_of_tile(op, q, packed + s * 2 * K * size, p + s, row, dtype);
        float by[QUERIES];
        for (int64_t i = 0; i < QUERIES; i++) {
            int64_t t = first + i < T ? first + i : T - 1;
            by[i] = 1 / exponentials(p + i * row, S - T + t + 1, padded, dtype);
        }
        for (int64_t i0 = 0; i0 < QUERIES; i0 += 4)
            for (int64_t d0 = 0; d0 < K; d0 += 64) {
                v16 sum[4][4] = {0};
                int vectors = K - d0 >= 64 ? 4 : (int)(K - d0) / 16;
                if (vectors == 4) mix_rows(op, packed, p + i0 * row, row, padded, d0, 4, dtype, sum);
                else mix_rows(op, packed, p + i0 * row, row, padded, d0, vectors, dtype, sum);
                for (int64_t i = 0; i < 4 && first + i0 + i < T; i++)
                    for (int j = 0; j < vectors; j++) {
                        v16 y = sum[i][j] * by[i0 + i];
                        int64_t at = ((first + i0 + i) * op->layer + head) * K + d0 + j * 16;
                        put16(op->dst, at, y, dtype);
                    }
            }
    }
}

static void attend_rows(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) attend_rows_of(op, from, to, F32);
    else attend_rows_of(op, from, to, BF16);
}

/* Rows of heads as a matrix product leaves them, turned by each row's angles (b: cosines, then sines) into dst.
 * Pairs are halves; elements beyond the rotated ones are copied. */
INLINE void rotate_rows_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, half = op->group / 2, heads = op->layer;
    for (int64_t row = from; row < to; row++) {
        const float *cos = op->b + row * half, *sin = op->b + op->n * half + row * half;
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (row * heads + head) * K, i = 0;
            for (; i + 16 <= half; i += 16) {
                v16 c = *(const v16 *)(cos + i), s = *(const v16 *)(sin + i);
                v16 a = load16(op->a, at + i, dtype), b = load16(op->a, at + half + i, dtype);
                put16(op->dst, at + i, a * c - b * s, dtype);
                put16(op->dst, at + half + i, b * c + a * s, dtype);
            }
            for (; i < half; i++) {
                float a = load(op->a, at + i, dtype), b = load(op->a, at + half + i, dtype);
                put1(op->dst, at + i, a * cos[i] - b * sin[i], dtype);
                put1(op->dst, at + half + i, b * cos[i] + a * sin[i], dtype);
            }
            for (i = 2 * half; i < K; i++) put1(op->dst, at + i, load(op->a, at + i, dtype), dtype);
        }
    }
}

static void rotate_rows(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) rotate_rows_of(op, from, to, F32);
    else rotate_rows_of(op, from, to, BF16);
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

INLINE void gate_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t i = from;
    if (op->kind == SILU)
        for (; i + 16 <= to; i += 16) {
            v16 x = load16(op->a, i, dtype), e = exp16(choose(x < 0, x, -x)); /* e^-|x| */
            v16 sigmoid = choose(x < 0, e, (v16){0} + 1) / (1 + e);
            put16(op->dst, i, x * sigmoid * load16(op->b, i, dtype), dtype);
        }
    for (; i < to; i++)
        put1(op->dst, i, activation(load(op->a, i, dtype), op->kind) * load(op->b, i, dtype), dtype);
}

static void gate(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == F32) gate_of(op, from, to, F32);
    else gate_of(op, from, to, BF16);
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
    case PACK: pack(op, from, to); break;
    case ATTEND_ROWS: attend_rows(op, from, to); break;
    case ACTIVATE:
        for (int64_t i = from; i < to; i++) op->dst[i] = activation(op->a[i], op->kind);
        break;
    case GATE: gate(op, from, to); break;
    case ROTATE_ROWS: rotate_rows(op, from, to); break;
    case ADD:
        for (int64_t i = from; i < to; i++) op->dst[i] += op->a[i];
        break;
    }
}

int64_t openbook_op_size(void) { return sizeof(Op); }
int64_t openbook_step_size(void) { return sizeof(Step); }

/* --- threads ---
 *
 * A step has some 300 barriers a few microseconds apart, and another program may have one of the cores. So
 * nobody waits for a thread that has not begun: whoever is there takes the next portion of the work, and a
 * barrier waits for portions in hand only. With one core left, a step takes as long as with one thread;
 * with fixed shares (as in OpenMP's loops) it took a hundred times as long, each barrier a time slice.
 *
 * A run is shared by those who work on it and freed by the last to leave. The caller leaves as soon as all
 * portions are done; a worker that comes late finds none left, and touches nothing but the run itself.
 */

enum { MAX_THREADS = 64, SPINS = 2000 };

typedef struct {
    Op op;
    int64_t portion, portions; /* items in one, and how many there are */
    atomic_long taken, done;
} Task;

typedef struct {
    Step step;
    int64_t n;
    atomic_int users;
    Task tasks[];
} Run;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int started; /* workers that exist: numbers 1..started */
    int threads; /* wanted for the present run, the caller included */
    atomic_int number;
    Run *run;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0};

/* Spins a little, then lets others have the core. */
static inline void relax(int spins) {
    if (spins > SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
}

static void walk(Run *run) {
    int64_t first = 0; /* of the ops since the last barrier */
    for (int64_t i = 0; i < run->n; i++) {
        Task *task = run->tasks + i;
        for (;;) {
            int64_t mine = atomic_load(&task->taken) < task->portions ? atomic_fetch_add(&task->taken, 1)
                                                                      : task->portions;
            if (mine >= task->portions) break;
            int64_t from = mine * task->portion, to = from + task->portion;
            run_op(&task->op, &run->step, from, to > task->op.n ? task->op.n : to);
            atomic_fetch_add(&task->done, 1);
        }
        if (!task->op.barrier) continue;
        for (; first <= i; first++) {
            Task *waited = run->tasks + first;
            for (int spins = 0; atomic_load(&waited->done) < waited->portions; spins++) relax(spins);
        }
    }
}

static void leave(Run *run) {
    if (atomic_fetch_sub(&run->users, 1) == 1) free(run);
}

static void *work(void *argument) {
    int me = (int)(intptr_t)argument, seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load(&pool.number) == seen && spins < 2 * SPINS; spins++) relax(spins);
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.number);
        Run *run = me < pool.threads ? pool.run : 0;
        if (run) atomic_fetch_add(&run->users, 1);
        pthread_mutex_unlock(&pool.lock);
        if (run) walk(run), leave(run);
    }
    return 0;
}

/* A child process has only the thread that forked. */
static void forget_workers(void) {
    pool.started = 0;
    pool.run = 0;
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(0, 0, forget_workers); }

static Run *prepare(const Op *ops, int64_t n, const Step *step, int threads) {
    Run *run = calloc(1, sizeof(Run) + n * sizeof(Task));
    if (!run) return 0;
    run->step = *step;
    run->n = n;
    run->users = 1;
    for (int64_t i = 0; i < n; i++) {
        Task *task = run->tasks + i;
        task->op = ops[i];
        /* a few portions a thread; rows go four at a time, and a portion of elements is worth the taking */
        int64_t least = ops[i].code == LINEAR ? 4 : ops[i].width ? 1 : 256, wanted = threads * 4;
        task->portion = (ops[i].n + wanted - 1) / wanted;
        task->portion = (task->portion + least - 1) / least * least;
        task->portions = (ops[i].n + task->portion - 1) / task->portion;
    }
    return run;
}

/* Returns 0, or 1 if there is no memory. The last op must have a barrier. */
int32_t openbook_run(const Op *ops, int64_t n, const Step *step) {
    int threads = step->threads < 1 ? 1 : step->threads > MAX_THREADS ? MAX_THREADS : step->threads;
    Run *run = prepare(ops, n, step, threads);
    if (!run) return 1;
    if (threads > 1) {
        pthread_mutex_lock(&pool.lock);
        for (pthread_t thread; pool.started < threads - 1; pool.started++) {
            if (pthread_create(&thread, 0, work, (void *)(intptr_t)(pool.started + 1))) break;
            pthread_detach(thread);
        }
        pool.run = run, pool.threads = threads;
        atomic_fetch_add(&pool.number, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    walk(run);
    if (threads > 1) { /* nobody may join a run that its caller has left */
        pthread_mutex_lock(&pool.lock);
        if (pool.run == run) pool.run = 0;
        pthread_mutex_unlock(&pool.lock);
    }
    leave(run);
    return 0;
}
