/* The operations of many tokens at once: what stands between a prompt's matrix products.
 *
 * PACK lays keys and values out in tiles of 32 keys: keys so that 32 of them are neighbours at each element,
 * values as they are; in bf16 both in pairs, of elements and of keys, as the processor's dot product of
 * pairs wants them. What lies beyond the last key is zero. ATTEND_ROWS takes 8 queries of a head: all their
 * scores, an exact softmax, and the sum of values, in registers.
 */

#pragma once
#include <math.h>
#include "vector.h"

enum { TILE = 32, QUERIES = 8 };

#ifdef __AVX512BF16__
#include <immintrin.h>
INLINE v16 dot_pairs(v16 sum, u16x32 pairs, uint32_t pair) {
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)((u16x32){0} + pair));
}
#else
INLINE v16 dot_pairs(v16 sum, u16x32 pairs, uint32_t pair) {
    float lo = from_bf16((uint16_t)pair), hi = from_bf16((uint16_t)(pair >> 16));
    return sum + (v16)(pairs << 16) * lo + (v16)(pairs & 0xffff0000u) * hi;
}
#endif

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
        int64_t block = blocks - 1 - item / op->heads, head = item % op->heads; /* the longest first */
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
                        int64_t at = ((first + i0 + i) * op->heads + head) * K + d0 + j * 16;
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