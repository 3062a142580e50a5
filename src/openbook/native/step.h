/* The operations of a single token. */
#pragma once
#include <math.h>
#include "blocks.h"

static void put(const Op *op, int64_t r, float y) {
    if (op->bias) y += load(op->bias, r, op->dtype);
    y *= op->scale;
    if (op->softcap > 0) y = op->softcap * tanhf(y / op->softcap);
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

INLINE void norm_of(const Op *op, int64_t from, int64_t to, int dtype, int result) {
    int64_t width = op->width, whole = width / 16 * 16, i;
    for (int64_t item = from; item < to; item++) {
        const float *x = op->a + item * width;
        float mean = 0, square = 0;
        int64_t y = item * width;
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
            put16(op->dst, y + i, z, result);
        }
        for (; i < width; i++) {
            float z = (x[i] - mean) * by;
            if (op->weight) z *= load(op->weight, i, dtype) + op->offset;
            put1(op->dst, y + i, z + (op->bias ? load(op->bias, i, dtype) : 0), result);
        }
    }
}

static void norm(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == BF16) norm_of(op, from, to, op->dtype, BF16);
    else if (op->dtype == F32) norm_of(op, from, to, F32, F32);
    else norm_of(op, from, to, BF16, F32);
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
    if (op->kind == SILU || op->kind == GELU_TANH)
        for (; i + 16 <= to; i += 16) { /* (1 + tanh u) / 2 is the sigmoid of 2u */
            v16 x = load16(op->a, i, dtype), z = x;
            if (op->kind == GELU_TANH) z = 1.59576912160573072f * (x + 0.044715f * x * x * x);
            v16 sigmoid = sigmoid16(z);
            put16(op->dst, i, x * sigmoid * load16(op->b, i, dtype), dtype);
        }
    for (; i < to; i++)
        put1(op->dst, i, activation(load(op->a, i, dtype), op->kind) * load(op->b, i, dtype), dtype);
}

static void gate(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == F32) gate_of(op, from, to, F32);
    else gate_of(op, from, to, BF16);
}
