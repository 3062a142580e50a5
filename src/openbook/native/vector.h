/* Sixteen numbers at a time, as fp32, whatever they are in memory: fp32 or bf16. GCC and Clang lower these
 * vectors to what the machine has. */
#pragma once
#include <stdint.h>
#include <string.h>
#include "op.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));

/* As many numbers as the processor takes at once. Compilers break wider vectors up well in sums and products, but
 * compare them number by number, and keep them in memory where many are wanted in registers. */
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { PARTS = 16 / LANES };
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t marks __attribute__((vector_size(4 * LANES))); /* what a comparison gives: all bits, or none */

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

/* Nearest, ties to even. Where the processor does it, less than 2^-126 becomes 0; where not, it is not for NaN
 * with a payload that rounds to infinity: activations have none. */
static inline h16 to_bf16x16(v16 x) {
#ifdef __AVX512BF16__
    return (h16)_mm512_cvtneps_pbh((__m512)x);
#else
    u16x32 bits = (u16x32)x;
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, h16);
#endif
}

/* Words of two, the first one low. */
static inline v16 pairs16(h16 low, h16 high) {
    return (v16)(__builtin_convertvector(low, u16x32) | __builtin_convertvector(high, u16x32) << 16);
}

static inline void put16(void *p, int64_t i, v16 x, int dtype) {
    if (dtype == F32) *(v16 *)((float *)p + i) = x;
    else *(h16 *)((uint16_t *)p + i) = to_bf16x16(x);
}

static inline void put1(void *p, int64_t i, float x, int dtype) {
    if (dtype == F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = to_bf16(x);
}

static inline lanes choose(marks where, lanes yes, lanes no) {
    return (lanes)(((marks)yes & where) | ((marks)no & ~where));
}

/* By halves, where the compiler can say so: faster than one number after the other. */
static inline float sum16(v16 x) {
#if defined(__clang__) || __GNUC__ >= 12
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (x[0] + x[2]) + (x[1] + x[3]);
#else
    float s = 0;
    for (int i = 0; i < 16; i++) s += x[i];
    return s;
#endif
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

/* e^x for x <= 0, to 2 units in the last place (the polynomial is Cephes' expf). */
INLINE lanes exponential(lanes x) {
    x = choose(x < -87.0f, (lanes){0} - 87.0f, x);
    lanes shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the rounded integer in the low bits */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
               + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y = (lanes)((marks)y + ((marks)shifted << 23));
    return choose(x == x, y, x); /* NaN stays NaN */
}

/* 1 / (1 + e^-x) */
INLINE v16 sigmoid16(v16 x) {
    for (int i = 0; i < PARTS; i++) {
        lanes *z = (lanes *)&x + i, e = exponential(choose(*z < 0, *z, -*z)); /* e^-|z| */
        *z = choose(*z < 0, e, (lanes){0} + 1) / (1 + e);
    }
    return x;
}
