/* Backward passes of what stands between a layer's matrix products. */
#pragma once
#include "step.h"

/* An item is a block of `rows` of all `keys` rows of a. dst: the gradient of a. dst2: for each item what its rows add
 * to the weight's gradient, then, if there is a bias, to that; the caller adds the items up, so that a sum does not
 * depend on who took which. */
INLINE void norm_back_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t width = op->width, whole = width / 16 * 16, i;
    const float *weight = op->weight;
    for (int64_t item = from; item < to; item++) {
        float *sums = op->dst2 + item * width * (op->bias ? 2 : 1);
        for (i = 0; i < width * (op->bias ? 2 : 1); i++) sums[i] = 0;
        int64_t end = (item + 1) * op->rows < op->keys ? (item + 1) * op->rows : op->keys;
        for (int64_t row = item * op->rows; row < end; row++) {
            const float *x = op->a + row * width;
            float *dx = op->dst + row * width, mean = 0, square = 0;
            int64_t g = row * width;
            if (op->flags & LAYERNORM) {
                v16 sum = {0};
                for (i = 0; i < whole; i += 16) sum += *(const v16 *)(x + i);
                for (mean = sum16(sum); i < width; i++) mean += x[i];
                mean /= width;
            }
            v16 squares = {0}, alongs = {0}, shifts = {0};
            for (i = 0; i < whole; i += 16) {
                v16 d = *(const v16 *)(x + i) - mean, gw = load16(op->grad, g + i, dtype);
                if (weight) gw *= *(const v16 *)(weight + i) + op->offset;
                squares += d * d, alongs += gw * d, shifts += gw;
            }
            float along = sum16(alongs), shift = sum16(shifts);
            for (square = sum16(squares); i < width; i++) {
                float d = x[i] - mean, gw = load(op->grad, g + i, dtype) * (weight ? weight[i] + op->offset : 1);
                square += d * d, along += gw * d, shift += gw;
            }
            /* z = (x - mean) · by; dx = by · (gw - mean of gw (LayerNorm) - z · mean of gw · z) */
            float by = 1 / sqrtf(square / width + op->eps), pull = along / width * by * by;
            shift = op->flags & LAYERNORM ? shift / width : 0;
            for (i = 0; i < whole; i += 16) {
                v16 d = *(const v16 *)(x + i) - mean, gi = load16(op->grad, g + i, dtype), gw = gi;
                if (weight) gw *= *(const v16 *)(weight + i) + op->offset;
                *(v16 *)(dx + i) = (gw - shift - d * pull) * by;
                *(v16 *)(sums + i) += gi * d * by;
                if (op->bias) *(v16 *)(sums + width + i) += gi;
            }
            for (; i < width; i++) {
                float d = x[i] - mean, gi = load(op->grad, g + i, dtype), gw = gi * (weight ? weight[i] + op->offset : 1);
                dx[i] = (gw - shift - d * pull) * by;
                sums[i] += gi * d * by;
                if (op->bias) sums[width + i] += gi;
            }
        }
    }
}

static void norm_back(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == F32) norm_back_of(op, from, to, F32);
    else norm_back_of(op, from, to, BF16);
}

/* Of act(a) · b, a being the gate: dst its gradient, dst2 that of b. SiLU and the tanh form of GELU are
 * x · sigmoid(z), with z = x or a polynomial of x. */
INLINE void gate_back_of(const Op *op, int64_t from, int64_t to, int dtype) {
    for (int64_t i = from; i < to; i += 16) {
        int64_t many = to - i < 16 ? to - i : 16;
        v16 x = {0}, up = {0}, g = {0};
        if (many == 16) x = load16(op->a, i, dtype), up = load16(op->b, i, dtype), g = load16(op->grad, i, dtype);
        else
            for (int64_t j = 0; j < many; j++)
                x[j] = load(op->a, i + j, dtype), up[j] = load(op->b, i + j, dtype), g[j] = load(op->grad, i + j, dtype);
        v16 z = x, slope = (v16){0} + 1;
        if (op->kind == GELU_TANH) {
            z = 1.59576912160573072f * (x + 0.044715f * x * x * x);
            slope = 1.59576912160573072f * (1 + 0.134145f * x * x);
        }
        v16 sigmoid = sigmoid16(z);
        v16 dgate = g * up * (sigmoid + x * slope * sigmoid * (1 - sigmoid)), dup = g * x * sigmoid;
        if (many == 16) put16(op->dst, i, dgate, dtype), put16(op->dst2, i, dup, dtype);
        else
            for (int64_t j = 0; j < many; j++)
                put1(op->dst, i + j, dgate[j], dtype), put1(op->dst2, i + j, dup[j], dtype);
    }
}

static void gate_back(const Op *op, int64_t from, int64_t to) {
    if (op->matrix == F32) gate_back_of(op, from, to, F32);
    else gate_back_of(op, from, to, BF16);
}
