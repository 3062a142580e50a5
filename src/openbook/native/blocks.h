/* GGML's blocks, decoded in registers; their layouts are those of ggml-quants.c, and of weights/quant.py. */
#pragma once
#include "vector.h"

typedef uint8_t b16 __attribute__((vector_size(16), aligned(1)));

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

/* Signed bytes. GCC 12 widens bytes that it loads one by one; these it turns over first, and then takes at once. */
static inline v16 signed_of(b16 q) { return float_of(q ^ 128) - 128; }

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
        *lo = d * signed_of(*(const b16 *)(p + 2)), *hi = d * signed_of(*(const b16 *)(p + 18));
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
