/* Attention of many tokens at once, and its backward pass.
 *
 * A query sees the keys from `since` (or the first) to its own. Everything is products of small blocks: the
 * scores of some queries and keys, the weighted sum of some values. A block's numbers lie as `product` reads
 * them, in words of 4 bytes: a number in fp32; in bf16 two that are neighbours in the sum, as the processor's
 * dot product of pairs wants them. What lies beyond the last token is zero.
 */

#pragma once
#include <math.h>
#include "vector.h"

enum { TILE = 32, QUERIES = 8, BLOCK = 64 };

/* A product is DOWN rows of ACROSS times 16 numbers: as many as there are registers for. */
#ifdef __AVX512F__
enum { DOWN = 8, ACROSS = 2 };
#else
enum { DOWN = 4, ACROSS = 1 };
#endif

INLINE lanes dot_pairs(lanes sum, lanes pairs, uint32_t pair) {
#ifdef __AVX512BF16__
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)((words){0} + pair));
#else
    float low = from_bf16((uint16_t)pair), high = from_bf16((uint16_t)(pair >> 16));
    return sum + (lanes)((words)pairs << 16) * low + (lanes)((words)pairs & 0xffff0000u) * high;
#endif
}

/* sum[i][j] += a[i, n] · b[n, 16 j ..] over n words. Rows and steps of a, and rows of b, are so many words apart. */
INLINE void product(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row, int64_t n,
                    int vectors, int dtype, v16 sum[DOWN][ACROSS]) {
    lanes y[DOWN][ACROSS * PARTS];
    for (int i = 0; i < DOWN; i++)
        for (int j = 0; j < vectors * PARTS; j++) y[i][j] = ((const lanes *)sum[i])[j];
    for (int64_t s = 0; s < n; s++, a += a_step, b += b_row) {
#pragma GCC unroll 2
        for (int j = 0; j < vectors * PARTS; j++) {
            lanes word = *(const lanes *)(b + LANES * j);
#pragma GCC unroll 8
            for (int i = 0; i < DOWN; i++) {
                if (dtype == F32) y[i][j] += a[i * a_row] * word;
                else y[i][j] = dot_pairs(y[i][j], word, ((const uint32_t *)a)[i * a_row]);
            }
        }
    }
    for (int i = 0; i < DOWN; i++)
        for (int j = 0; j < vectors * PARTS; j++) ((lanes *)sum[i])[j] = y[i][j];
}

/* s, s + 1 .. */
INLINE marks numbers(int64_t s) {
#ifdef __AVX512F__
    marks from_0 = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    marks from_0 = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
    return from_0 + (int32_t)s;
}

INLINE int vectors_from(int64_t d0, int64_t width) { return width - d0 < 16 * ACROSS ? (int)(width - d0) / 16 : ACROSS; }

/* `count` rows of K numbers, so many elements apart, as n rows of words (beyond the last: zero); as rows of pairs, two
 * rows in a word; and as columns, the n rows neighbours at each word. Pairs (in bf16 only) and columns are optional. */
INLINE void take_rows(const void *x, int64_t row, int64_t count, int64_t n, int64_t K, int dtype, float *rows,
                      float *pairs, float *columns) {
    int64_t size = dtype == F32 ? 4 : 2, W = K * size / 4;
    for (int64_t s = 0; s < n; s++) {
        if (s < count) memcpy(rows + s * W, (const char *)x + s * row * size, W * 4);
        else memset(rows + s * W, 0, W * 4);
    }
    if (columns)
        for (int64_t s0 = 0; s0 < n; s0 += 16)
            for (int64_t d = 0; d < W; d++) {
                v16 column;
                for (int s = 0; s < 16; s++) column[s] = rows[(s0 + s) * W + d];
                *(v16 *)(columns + d * n + s0) = column;
            }
    if (pairs && dtype == BF16)
        for (int64_t s = 0; s < n; s += 2)
            for (int64_t d = 0; d < K; d += 16) {
                const uint16_t *low = (const uint16_t *)(rows + s * W) + d, *high = low + K;
                *(v16 *)(pairs + s / 2 * K + d) = pairs16(*(const h16 *)low, *(const h16 *)high);
            }
}

/* --- forward ------------------------------------------------------------------------------------
 *
 * PACK lays keys and values out in tiles of 32 keys: keys so that 32 of them are neighbours at each word,
 * values in rows. ATTEND_ROWS takes 8 queries of a head: all their scores, an exact softmax, and the sum of
 * values. `sums`, if wanted, are the logarithms of the softmax's sums [heads, T], which backward needs.
 */

INLINE void pack_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, size = dtype == F32 ? 4 : 2, tiles = (op->keys + TILE - 1) / TILE, plane = TILE * K * size / 4;
    float rows[plane];
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / tiles, first = item % tiles * TILE, count = op->keys - first < TILE ? op->keys - first : TILE;
        int64_t at = (head * op->kv_head + first * op->kv_row) * size;
        float *keys = op->dst + item * 2 * plane, *values = keys + plane;
        take_rows((const char *)op->weight + at, op->kv_row, count, TILE, K, dtype, rows, 0, keys);
        take_rows((const char *)op->bias + at, op->kv_row, count, TILE, K, dtype, dtype == F32 ? values : rows, values, 0);
    }
}

static void pack(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) pack_of(op, from, to, F32);
    else pack_of(op, from, to, BF16);
}

/* Scores to e^(score - highest) from `since` on and before `end`, zero outside, in place; in bf16 each row's first
 * half then holds them rounded. Returns the sum, and the highest in `top`. */
INLINE float exponentials(float *p, int64_t since, int64_t end, int64_t padded, int dtype, float *top) {
    lanes none = (lanes){0} - INFINITY, tops = none, sum = {0};
    for (int64_t s = 0; s < padded; s += LANES) {
        marks at = numbers(s), seen = (at >= (int32_t)since) & (at < (int32_t)end);
        lanes *x = (lanes *)(p + s);
        *x = choose(seen, *x, none);
        tops = choose(*x > tops, *x, tops);
    }
    *top = -INFINITY;
    for (int i = 0; i < LANES; i++) *top = tops[i] > *top ? tops[i] : *top;
    for (int64_t s = 0; s < padded; s += 16) {
        v16 e = *(v16 *)(p + s);
        for (int i = 0; i < PARTS; i++) {
            lanes *x = (lanes *)&e + i;
            *x = choose(*x == none, (lanes){0}, exponential(*x - *top));
            sum += *x;
        }
        put16(p, s, e, dtype);
    }
    float total = 0;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
}

INLINE void attend_rows_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, T = op->rows, S = op->keys, size = dtype == F32 ? 4 : 2, W = K * size / 4;
    int64_t tiles = (S + TILE - 1) / TILE, row = tiles * TILE, blocks = (T + QUERIES - 1) / QUERIES;
    float p[QUERIES * row], q[QUERIES * W], top[QUERIES], sum_of[QUERIES];
    for (int64_t item = from; item < to; item++) {
        int64_t block = blocks - 1 - item / op->heads, head = item % op->heads; /* the longest first */
        int64_t first = block * QUERIES, last = first + QUERIES < T ? first + QUERIES : T;
        int64_t begin = op->since ? op->since[first] / TILE : 0, end = (S - T + last + TILE - 1) / TILE; /* tiles */
        const float *packed = (const float *)op->weight + head / op->group * tiles * 2 * TILE * W;
        for (int64_t i = 0; i < QUERIES; i++) {
            int64_t t = first + i < T ? first + i : T - 1;
            memcpy(q + i * W, (const char *)op->a + (head * op->a_head + t * op->a_row) * size, K * size);
        }
        for (int64_t tile = begin; tile < end; tile++)
            for (int i0 = 0; i0 < QUERIES; i0 += DOWN)
                for (int c = 0; c < TILE; c += 16 * ACROSS) {
                    v16 sum[DOWN][ACROSS] = {0};
                    product(q + i0 * W, W, 1, packed + tile * 2 * TILE * W + c, TILE, W, ACROSS, dtype, sum);
                    for (int i = 0; i < DOWN; i++)
                        for (int j = 0; j < ACROSS; j++)
                            *(v16 *)(p + (i0 + i) * row + (tile - begin) * TILE + c + 16 * j) = sum[i][j] * op->scale;
                }
        for (int64_t i = 0; i < QUERIES; i++) {
            int64_t t = first + i < T ? first + i : T - 1, skipped = begin * TILE, since = op->since ? op->since[t] : 0;
            sum_of[i] = exponentials(p + i * row, since - skipped, S - T + t + 1 - skipped, end * TILE - skipped, dtype, top + i);
            if (op->sums) op->sums[head * T + t] = top[i] + logf(sum_of[i]);
        }
        int64_t step = TILE * size / 4; /* words of weights for one tile */
        for (int i0 = 0; i0 < QUERIES; i0 += DOWN)
            for (int64_t d0 = 0; d0 < K; d0 += 16 * ACROSS) {
                v16 sum[DOWN][ACROSS] = {0};
                int vectors = vectors_from(d0, K);
                for (int64_t tile = begin; tile < end; tile++) {
                    const float *a = p + i0 * row + (tile - begin) * step, *v = packed + (tile * 2 + 1) * TILE * W + d0;
                    if (vectors == ACROSS) product(a, row, 1, v, K, step, ACROSS, dtype, sum);
                    else product(a, row, 1, v, K, step, 1, dtype, sum);
                }
                for (int64_t i = i0; i < i0 + DOWN && first + i < T; i++)
                    for (int j = 0; j < vectors; j++)
                        put16(op->dst, ((first + i) * op->heads + head) * K + d0 + 16 * j, sum[i - i0][j] / sum_of[i], dtype);
            }
    }
}

static void attend_rows(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) attend_rows_of(op, from, to, F32);
    else attend_rows_of(op, from, to, BF16);
}

/* --- backward -----------------------------------------------------------------------------------
 *
 * P = e^(scale · q kᵀ - sums) is computed again, 64 queries and 64 keys at a time. With the gradient g of the result
 * y = P v, the scores' is D = scale · P ∘ (g vᵀ - y·g), and those of values, keys and queries are Pᵀ g, Dᵀ q and D k
 * (Dao 2023, arXiv 2307.08691, algorithm 2).
 */

/* y[i] += a[i, n] · b[n], K wide, for DOWN rows of y. */
INLINE void add_product(float *y, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t n, int64_t K,
                        int dtype) {
    for (int64_t d0 = 0; d0 < K; d0 += 16 * ACROSS) {
        v16 sum[DOWN][ACROSS] = {0};
        int vectors = vectors_from(d0, K);
        if (vectors == ACROSS) product(a, a_row, a_step, b + d0, K, n, ACROSS, dtype, sum);
        else product(a, a_row, a_step, b + d0, K, n, 1, dtype, sum);
        for (int i = 0; i < DOWN; i++)
            for (int j = 0; j < vectors; j++) *(v16 *)(y + i * K + d0 + 16 * j) += sum[i][j];
    }
}

/* P and D of 64 queries from i0 on and 64 keys from j0 on: by columns, and in bf16 D by rows (d_rows) as well. */
INLINE void weigh_block(const Op *op, int64_t i0, int64_t j0, const float *q, const float *g, const float *kt,
                        const float *vt, const float *sums, const float *along, float *p, float *d, float *d_rows,
                        int dtype) {
    int64_t W = op->width * (dtype == F32 ? 4 : 2) / 4;
    for (int64_t r = 0; r < BLOCK; r += DOWN)
        for (int64_t c = 0; c < BLOCK; c += 16 * ACROSS) {
            v16 x[DOWN][ACROSS] = {0}, y[DOWN][ACROSS] = {0};
            if (i0 > j0 || c < r + DOWN) { /* else nobody sees these */
                product(q + r * W, W, 1, kt + c, BLOCK, W, ACROSS, dtype, x);
                product(g + r * W, W, 1, vt + c, BLOCK, W, ACROSS, dtype, y);
            }
            for (int i = 0; i < DOWN; i++) {
                int64_t t = i0 + r + i, real = t < op->rows, since = real && op->since ? op->since[t] : 0;
                for (int j = 0; j < ACROSS * PARTS; j++) {
                    lanes *score = (lanes *)x[i] + j, *by_p = (lanes *)y[i] + j, none = {0};
                    marks at = numbers(j0 + c + LANES * j), seen = (at <= (int32_t)t) & (at >= (int32_t)since);
                    *score = real ? choose(seen, exponential(*score * op->scale - sums[t]), none) : none;
                    *by_p = real ? *score * (*by_p - along[t]) * op->scale : none;
                }
            }
            for (int j = 0; j < ACROSS; j++)
                for (int i = 0; i < DOWN; i += dtype == F32 ? 1 : 2) {
                    int64_t column = c + 16 * j, row = r + i;
                    if (dtype == F32) {
                        *(v16 *)(p + row * BLOCK + column) = x[i][j], *(v16 *)(d + row * BLOCK + column) = y[i][j];
                        continue;
                    }
                    h16 even = to_bf16x16(y[i][j]), odd = to_bf16x16(y[i + 1][j]);
                    *(v16 *)(p + row / 2 * BLOCK + column) = pairs16(to_bf16x16(x[i][j]), to_bf16x16(x[i + 1][j]));
                    *(v16 *)(d + row / 2 * BLOCK + column) = pairs16(even, odd);
                    *(h16 *)((uint16_t *)d_rows + row * BLOCK + column) = even;
                    *(h16 *)((uint16_t *)d_rows + (row + 1) * BLOCK + column) = odd;
                }
        }
}

/* An item is a query head. a, weight, bias: q, k, v; b: y; grad: g, both [T, heads, K]; dst: the gradient of q, fp32;
 * dst2: those of k and v as this head has them, one after the other; all [T, heads, K]. */
INLINE void attend_back_of(const Op *op, int64_t from, int64_t to, int dtype) {
    int64_t K = op->width, T = op->rows, size = dtype == F32 ? 4 : 2, W = K * size / 4, across = op->heads * K;
    int64_t R = dtype == F32 ? 1 : 2; /* rows in a word */
    float q[BLOCK * W], g[BLOCK * W], k[BLOCK * W], v[BLOCK * W], kt[BLOCK * W], vt[BLOCK * W];
    float pairs[dtype == F32 ? 1 : 3 * BLOCK * W]; /* of q, g and k */
    float *q2 = dtype == F32 ? q : pairs, *g2 = dtype == F32 ? g : pairs + BLOCK * W, *k2 = dtype == F32 ? k : g2 + BLOCK * W;
    float p[BLOCK * BLOCK], d[BLOCK * BLOCK], rows[BLOCK * BLOCK], *d_rows = dtype == F32 ? d : rows;
    float dq[DOWN * K], dk[BLOCK * K], dv[BLOCK * K], along[T];
    for (int64_t head = from; head < to; head++) {
        const char *qs = (const char *)op->a + head * op->a_head * size, *gs = (const char *)op->grad + head * K * size;
        const char *ks = (const char *)op->weight + head / op->group * op->kv_head * size;
        const char *vs = (const char *)op->bias + head / op->group * op->kv_head * size;
        for (int64_t t = 0; t < T; t++) {
            v16 sum = {0};
            for (int64_t e = 0; e < K; e += 16)
                sum += load16(op->b, t * across + head * K + e, dtype) * load16(gs, t * across + e, dtype);
            along[t] = sum16(sum);
            memset(op->dst + t * across + head * K, 0, K * 4);
        }
        for (int64_t j0 = 0; j0 < T; j0 += BLOCK) {
            int64_t keys = T - j0 < BLOCK ? T - j0 : BLOCK;
            take_rows(ks + j0 * op->kv_row * size, op->kv_row, keys, BLOCK, K, dtype, k, k2, kt);
            take_rows(vs + j0 * op->kv_row * size, op->kv_row, keys, BLOCK, K, dtype, v, 0, vt);
            memset(dk, 0, sizeof dk), memset(dv, 0, sizeof dv);
            for (int64_t i0 = j0; i0 < T && !(op->since && op->since[i0] >= j0 + keys); i0 += BLOCK) {
                int64_t queries = T - i0 < BLOCK ? T - i0 : BLOCK, diagonal = i0 == j0;
                take_rows(qs + i0 * op->a_row * size, op->a_row, queries, BLOCK, K, dtype, q, q2, 0);
                take_rows(gs + i0 * across * size, across, queries, BLOCK, K, dtype, g, g2, 0);
                weigh_block(op, i0, j0, q, g, kt, vt, op->sums + head * T, along, p, d, d_rows, dtype);
                for (int64_t s = 0; s < BLOCK; s += DOWN) {
                    int64_t first = diagonal ? s / R : 0, n = BLOCK / R - first; /* earlier queries do not see these keys */
                    add_product(dv + s * K, p + first * BLOCK + s, 1, BLOCK, g2 + first * K, n, K, dtype);
                    add_product(dk + s * K, d + first * BLOCK + s, 1, BLOCK, q2 + first * K, n, K, dtype);
                }
                for (int64_t r = 0; r < queries; r += DOWN) {
                    memset(dq, 0, sizeof dq);
                    add_product(dq, d_rows + r * (BLOCK / R), BLOCK / R, 1, k2, (diagonal ? r + DOWN : BLOCK) / R, K, dtype);
                    for (int64_t i = 0; i < DOWN && r + i < queries; i++)
                        for (int64_t e = 0; e < K; e += 16)
                            *(v16 *)(op->dst + (i0 + r + i) * across + head * K + e) += *(v16 *)(dq + i * K + e);
                }
            }
            for (int64_t s = 0; s < keys; s++)
                for (int64_t e = 0; e < K; e += 16) {
                    int64_t at = (j0 + s) * across + head * K + e;
                    put16(op->dst2, at, *(v16 *)(dk + s * K + e), dtype);
                    put16(op->dst2, T * across + at, *(v16 *)(dv + s * K + e), dtype);
                }
        }
    }
}

static void attend_back(const Op *op, int64_t from, int64_t to) {
    if (op->dtype == F32) attend_back_of(op, from, to, F32);
    else attend_back_of(op, from, to, BF16);
}
