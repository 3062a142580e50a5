/* What a step is made of. Both structures are mirrored field by field in lower.py and step.py. */
#pragma once
#include <stdint.h>

enum { EMBED, NORM, LINEAR, ROTATE, STORE, ATTEND, ACTIVATE, GATE, ADD, PACK, ATTEND_ROWS, ROTATE_ROWS, LINEAR_ROWS,
       NORM_BACK, GATE_BACK, ATTEND_BACK };
enum { F32, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
enum { RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH };

typedef struct {
    int32_t code, kind, barrier;
    int32_t dtype, matrix; /* of vectors and tables; of a LINEAR's matrix, of what GATE reads and
                            * writes, of NORM's result and NORM_BACK's grad */
    int64_t n;     /* items: rows of a matrix, heads, or elements */
    int64_t width; /* elements of one item: columns of a matrix, a head's size */
    int64_t layer; /* whose cells of the KV cache */
    int64_t group; /* query heads per key/value head; or elements that are rotated */
    int64_t row_bytes; /* of a matrix */
    int64_t heads;                  /* ATTEND_ROWS, ATTEND_BACK, ROTATE_ROWS: side by side in a row */
    int64_t rows, keys;             /* PACK, ATTEND_ROWS, ATTEND_BACK: T queries, the last of S keys; LINEAR_ROWS: inputs;
                                     * NORM_BACK: rows of an item, and of all items */
    int64_t a_row, a_head, kv_row, kv_head; /* elements from one row or head of queries, of keys or values, to the next */
    int32_t flags; /* ACCUMULATE: dst += instead of dst =; LAYERNORM; INTERLEAVED */
    float eps, offset, scale, softcap; /* scale: of scores, embeddings, logits and what is added; 0: no cap */
    const void *weight, *bias;
    const float *a, *b; /* inputs */
    float *dst;
    const float *grad; /* backward: the gradient of the result */
    float *dst2;
    float *sums;          /* attention: logarithms of the softmax's sums [heads, T] */
    const int32_t *since; /* attention: the first key that each query sees, ascending; none: the first of all */
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
    int32_t with_openmp; /* work on PyTorch's threads: see runner.c */
} Step;
