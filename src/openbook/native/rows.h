/* Operations of several rows: a matrix times a few inputs, such as the tokens of one expert, which is read once for
 * all of them; and rotations. */
#pragma once
#include "vector.h"

/* Four rows of the matrix by one to four inputs, each sum in the order of `dot`. If `ahead`, the next four rows
 * are fetched meanwhile: memory would otherwise wait between one row's end and the next one's start. */
INLINE void tile(const char *w, int64_t stride, const float *x, int64_t width, int dtype, int inputs, int ahead,
                 float out[4][4]) {
    v16 sum[4][4] = {0};
    int64_t i = 0, size = dtype == F32 ? 4 : 2;
    for (; i + 16 <= width; i += 16) {
        v16 w0 = load16(w, i, dtype), w1 = load16(w + stride, i, dtype);
        v16 w2 = load16(w + 2 * stride, i, dtype), w3 = load16(w + 3 * stride, i, dtype);
        if (ahead)
            for (int r = 4; r < 8; r++) __builtin_prefetch(w + r * stride + i * size);
#pragma GCC unroll 4
        for (int j = 0; j < inputs; j++) {
            v16 xj = *(const v16 *)(x + j * width + i);
            sum[j][0] += w0 * xj, sum[j][1] += w1 * xj, sum[j][2] += w2 * xj, sum[j][3] += w3 * xj;
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < inputs; j++)
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) out[j][r] = sum16(sum[j][r]);
    for (; i < width; i++)
        for (int j = 0; j < inputs; j++)
            for (int r = 0; r < 4; r++) out[j][r] += load(w + r * stride, i, dtype) * x[j * width + i];
}

/* a: `rows` inputs of `width`; dst: as many results of `n`. */
INLINE void linear_rows_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t width = op->width, stride = op->row_bytes;
    for (int64_t r = from; r < to; r += 4) {
        const char *w = (const char *)op->weight + r * stride;
        int64_t high = to - r < 4 ? to - r : 4;
        for (int64_t j = 0; j < op->rows; j += 4) {
            int64_t inputs = op->rows - j < 4 ? op->rows - j : 4;
            const float *x = op->a + j * width;
            float y[4][4];
            if (high < 4)
                for (int k = 0; k < inputs; k++)
                    for (int i = 0; i < high; i++) y[k][i] = dot(w + i * stride, x + k * width, width, dtype);
            else if (inputs == 1) tile(w, stride, x, width, dtype, 1, j == 0, y);
            else if (inputs == 2) tile(w, stride, x, width, dtype, 2, j == 0, y);
            else if (inputs == 3) tile(w, stride, x, width, dtype, 3, j == 0, y);
            else tile(w, stride, x, width, dtype, 4, j == 0, y);
            for (int k = 0; k < inputs; k++)
                for (int i = 0; i < high; i++) {
                    float bias = op->bias ? load(op->bias, r + i, dtype) : 0;
                    op->dst[(j + k) * op->n + r + i] = y[k][i] + bias;
                }
        }
    }
}

static void linear_rows(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == F32) linear_rows_of(op, from, to, F32);
    else linear_rows_of(op, from, to, BF16);
}

/* Rows of heads as a matrix product leaves them, turned by each row's angles (b: cosines, then sines) into dst.
 * Pairs are halves; elements beyond the rotated ones are copied. */
INLINE void rotate_rows_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, half = op->group / 2, heads = op->heads;
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
