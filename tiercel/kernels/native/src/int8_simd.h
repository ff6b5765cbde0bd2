/* Vectors of a tile for 8-bit products: 32 bytes, four columns of each of 8 rows, times four columns
 * of a token, summed per row.
 *
 * Without an instruction that sums four products into 32 bits, AVX2 multiplies unsigned codes by
 * signed activations into 16-bit pairs. Pairs of several steps are added in 16 bits as far as they
 * cannot overflow (at most 127 in the activations): 8 steps of codes up to 15 (30480), 4 up to 31
 * (31496), 2 up to 63 (32004) and 1 step of magnitudes up to 128 (32512). STEPS_* say how many steps
 * a `sums` may take; `sums_total` and `sums_scaled` make the 8 row sums of 32 bits. */
#ifndef TIERCEL_INT8_SIMD_H
#define TIERCEL_INT8_SIMD_H

#include "simd.h"
#include "tiles.h"

#define TC_INLINE static inline __attribute__((always_inline))

#if defined(__AVX2__)
#define TC_INT8_AVX2
#elif defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define TC_INT8_NEON
#endif

/* Tokens multiplied side by side: as many as keep their sums in registers. */
#if defined(TC_INT8_AVX2) || defined(TC_INT8_NEON)
#define TC_INT8_TOKENS 4
#else
#define TC_INT8_TOKENS 1
#endif

/* Before a loop of at most 8 rounds, known when compiling, whose variables are to be registers. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* slow where it refuses, not wrong */
#define TC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TC_UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(TC_INT8_AVX2)

typedef __m256i b32;   /* 32 bytes */
typedef __m256i i32x8; /* 8 row sums */
typedef __m256i sums;  /* partial row sums */

TC_INLINE b32 b32_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
TC_INLINE void b32_store(uint8_t *p, b32 a) { _mm256_storeu_si256((__m256i *)p, a); }
TC_INLINE b32 b32_or(b32 a, b32 b) { return _mm256_or_si256(a, b); }
/* Four columns of a token, for every row. */
TC_INLINE b32 b32_columns(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
/* The low nibbles, or the high ones. */
TC_INLINE b32 b32_nibbles(b32 a, int high) {
    return _mm256_and_si256(high ? _mm256_srli_epi16(a, 4) : a, _mm256_set1_epi8(15));
}
/* Bits from `from` on, as many as `mask` at bit 4 holds, to bit 4. */
TC_INLINE b32 b32_bits_to_4(b32 a, int from, int mask) {
    b32 moved = from < 4 ? _mm256_slli_epi16(a, 4 - from) : _mm256_srli_epi16(a, from - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
TC_INLINE b32 b32_iq4(b32 codes) {
    const __m128i table = _mm_setr_epi8(TC_IQ4_VALUES);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
TC_INLINE i32x8 i32x8_add(i32x8 a, i32x8 b) { return _mm256_add_epi32(a, b); }
TC_INLINE i32x8 i32x8_sub(i32x8 a, i32x8 b) { return _mm256_sub_epi32(a, b); }
TC_INLINE vf i32x8_floats(i32x8 a) { return _mm256_cvtepi32_ps(a); }
/* The sum of a group's two half sums, times a factor, in each row. */
TC_INLINE i32x8 i32x8_offset(const uint8_t *halves, int factor) {
    return _mm256_madd_epi16(b32_columns(halves), _mm256_set1_epi16((short)factor));
}
/* Unsigned bytes, or signed ones, as floats. */
TC_INLINE vf vf_from_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
TC_INLINE vf vf_from_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* Q6_K's scales of both halves, to multiply half sums of a token. */
typedef __m256i scale_pairs;
TC_INLINE scale_pairs scale_pairs_load(const uint8_t *scales) {
    __m128i both = _mm_loadu_si128((const __m128i *)scales);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(both, _mm_srli_si128(both, 8)));
}
/* 32 times the sum of both half sums times their scales: what Q6_K's offset adds. */
TC_INLINE i32x8 scale_pairs_offset(scale_pairs scales, const uint8_t *halves) {
    return _mm256_slli_epi32(_mm256_madd_epi16(b32_columns(halves), scales), 5);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

enum { STEPS_4 = 8, STEPS_5 = 8, STEPS_6 = 4, STEPS_8 = 8 };
/* Signed codes have their sign flipped to be unsigned, which adds 128 times the columns. */
enum { SIGNED_OFFSET = 128 };

TC_INLINE b32 b32_signed_codes(b32 a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
TC_INLINE sums sums_first(b32 w, b32 x) { return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, x); }
TC_INLINE sums sums_next(sums a, b32 w, b32 x) { return _mm256_dpbusd_epi32(a, w, x); }
TC_INLINE sums sums_first_signed(b32 w, b32 x) { return sums_first(w, x); }
TC_INLINE i32x8 sums_total(sums a) { return a; }
typedef __m256i row_scales;
TC_INLINE row_scales row_scales_load(const uint8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
TC_INLINE i32x8 sums_scaled(sums a, row_scales scales) { return _mm256_mullo_epi32(a, scales); }

#else

enum { STEPS_4 = 8, STEPS_5 = 4, STEPS_6 = 2, STEPS_8 = 1 };
enum { SIGNED_OFFSET = 0 };

TC_INLINE b32 b32_signed_codes(b32 a) { return a; }
TC_INLINE sums sums_first(b32 w, b32 x) { return _mm256_maddubs_epi16(w, x); }
/* Compilers would make a tree of the additions of all steps, with more values than registers. */
TC_INLINE sums sums_next(sums a, b32 w, b32 x) {
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w, x));
    __asm__("" : "+x"(a));
    return a;
}
/* -128 is 128 as an unsigned magnitude; activations are never -128. */
TC_INLINE sums sums_first_signed(b32 w, b32 x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
TC_INLINE i32x8 sums_total(sums a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
typedef __m256i row_scales; /* each row's twice, as 16 bits */
TC_INLINE row_scales row_scales_load(const uint8_t *p) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes));
}
TC_INLINE i32x8 sums_scaled(sums a, row_scales scales) { return _mm256_madd_epi16(a, scales); }

#endif

#elif defined(TC_INT8_NEON)

typedef struct {
    int8x16_t lo, hi; /* rows 0..3, rows 4..7 */
} b32;
typedef struct {
    int32x4_t lo, hi;
} i32x8;
typedef i32x8 sums;
enum { STEPS_4 = 8, STEPS_5 = 8, STEPS_6 = 4, STEPS_8 = 8 };
enum { SIGNED_OFFSET = 0 };

TC_INLINE b32 b32_make(int8x16_t lo, int8x16_t hi) {
    b32 a = {lo, hi};
    return a;
}
TC_INLINE i32x8 i32x8_make(int32x4_t lo, int32x4_t hi) {
    i32x8 a = {lo, hi};
    return a;
}
TC_INLINE b32 b32_load(const uint8_t *p) {
    return b32_make(vreinterpretq_s8_u8(vld1q_u8(p)), vreinterpretq_s8_u8(vld1q_u8(p + 16)));
}
TC_INLINE void b32_store(uint8_t *p, b32 a) {
    vst1q_u8(p, vreinterpretq_u8_s8(a.lo));
    vst1q_u8(p + 16, vreinterpretq_u8_s8(a.hi));
}
TC_INLINE b32 b32_or(b32 a, b32 b) { return b32_make(vorrq_s8(a.lo, b.lo), vorrq_s8(a.hi, b.hi)); }
TC_INLINE b32 b32_columns(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return b32_make(all, all);
}
TC_INLINE b32 b32_shift(b32 a, int left) { /* bytes, right if negative */
    int8x16_t by = vdupq_n_s8((int8_t)left);
    return b32_make(vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(a.lo), by)),
                    vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(a.hi), by)));
}
TC_INLINE b32 b32_mask(b32 a, int mask) {
    int8x16_t bits = vdupq_n_s8((int8_t)mask);
    return b32_make(vandq_s8(a.lo, bits), vandq_s8(a.hi, bits));
}
TC_INLINE b32 b32_nibbles(b32 a, int high) { return high ? b32_shift(a, -4) : b32_mask(a, 15); }
TC_INLINE b32 b32_bits_to_4(b32 a, int from, int mask) { return b32_mask(b32_shift(a, 4 - from), mask); }
TC_INLINE b32 b32_iq4(b32 codes) {
    static const int8_t values[16] = {TC_IQ4_VALUES};
    int8x16_t table = vld1q_s8(values);
    return b32_make(vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.lo)),
                    vqtbl1q_s8(table, vreinterpretq_u8_s8(codes.hi)));
}
TC_INLINE b32 b32_signed_codes(b32 a) { return a; }
TC_INLINE i32x8 i32x8_add(i32x8 a, i32x8 b) {
    return i32x8_make(vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi));
}
TC_INLINE i32x8 i32x8_sub(i32x8 a, i32x8 b) {
    return i32x8_make(vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi));
}
TC_INLINE vf i32x8_floats(i32x8 a) { return vf_make(vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)); }
TC_INLINE i32x8 i32x8_offset(const uint8_t *halves, int factor) {
    int16_t parts[2];
    memcpy(parts, halves, 4);
    int32x4_t all = vdupq_n_s32((parts[0] + parts[1]) * factor);
    return i32x8_make(all, all);
}
TC_INLINE vf vf_from_u8(const uint8_t *p) {
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return vf_make(vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide)));
}
TC_INLINE i32x8 i32x8_from_i8(const uint8_t *p) {
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return i32x8_make(vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide));
}
TC_INLINE vf vf_from_i8(const uint8_t *p) { return i32x8_floats(i32x8_from_i8(p)); }

TC_INLINE sums sums_next(sums a, b32 w, b32 x) {
    return i32x8_make(vdotq_s32(a.lo, w.lo, x.lo), vdotq_s32(a.hi, w.hi, x.hi));
}
TC_INLINE sums sums_first(b32 w, b32 x) {
    return sums_next(i32x8_make(vdupq_n_s32(0), vdupq_n_s32(0)), w, x);
}
TC_INLINE sums sums_first_signed(b32 w, b32 x) { return sums_first(w, x); }
TC_INLINE i32x8 sums_total(sums a) { return a; }
typedef i32x8 row_scales;
TC_INLINE row_scales row_scales_load(const uint8_t *p) { return i32x8_from_i8(p); }
TC_INLINE i32x8 sums_scaled(sums a, row_scales scales) {
    return i32x8_make(vmulq_s32(a.lo, scales.lo), vmulq_s32(a.hi, scales.hi));
}
typedef struct {
    i32x8 half[2];
} scale_pairs;
TC_INLINE scale_pairs scale_pairs_load(const uint8_t *scales) {
    scale_pairs pairs = {{i32x8_from_i8(scales), i32x8_from_i8(scales + 8)}};
    return pairs;
}
TC_INLINE i32x8 scale_pairs_offset(scale_pairs scales, const uint8_t *halves) {
    int16_t parts[2];
    memcpy(parts, halves, 4);
    int32_t low = 32 * parts[0], high = 32 * parts[1];
    return i32x8_make(vmlaq_n_s32(vmulq_n_s32(scales.half[0].lo, low), scales.half[1].lo, high),
                      vmlaq_n_s32(vmulq_n_s32(scales.half[0].hi, low), scales.half[1].hi, high));
}

#else /* vectors of GCC and Clang, which any target has; sums as without VNNI above */

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef struct {
    u8x16 half[2];
} b32;
typedef struct {
    i32x4 half[2];
} i32x8;
typedef struct {
    i16x8 half[2];
} sums; /* two to a row */
typedef i32x8 row_scales;
enum { STEPS_4 = 8, STEPS_5 = 4, STEPS_6 = 2, STEPS_8 = 1 };
enum { SIGNED_OFFSET = 0 };
#define TC_HALVES(type, expression)   \
    do {                              \
        type out_;                    \
        for (int i = 0; i < 2; ++i)   \
            out_.half[i] = (expression); \
        return out_;                  \
    } while (0)

TC_INLINE b32 b32_load(const uint8_t *p) {
    b32 a;
    memcpy(&a, p, sizeof a);
    return a;
}
TC_INLINE void b32_store(uint8_t *p, b32 a) { memcpy(p, &a, sizeof a); }
TC_INLINE b32 b32_or(b32 a, b32 b) { TC_HALVES(b32, a.half[i] | b.half[i]); }
TC_INLINE b32 b32_columns(const uint8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    i32x4 all = {four, four, four, four};
    TC_HALVES(b32, (u8x16)all);
}
TC_INLINE b32 b32_nibbles(b32 a, int high) {
    TC_HALVES(b32, (u8x16)((u16x8)a.half[i] >> (high ? 4 : 0)) & 15);
}
TC_INLINE b32 b32_bits_to_4(b32 a, int from, int mask) {
    int left = from < 4 ? 4 - from : 0, right = from < 4 ? 0 : from - 4;
    TC_HALVES(b32, (u8x16)((u16x8)a.half[i] << left >> right) & (uint8_t)mask);
}
TC_INLINE b32 b32_iq4(b32 codes) {
    static const int8_t values[16] = {TC_IQ4_VALUES};
    uint8_t bytes[32];
    b32_store(bytes, codes);
    for (int i = 0; i < 32; ++i) bytes[i] = (uint8_t)values[bytes[i]];
    return b32_load(bytes);
}
TC_INLINE b32 b32_signed_codes(b32 a) { return a; }
TC_INLINE i32x8 i32x8_add(i32x8 a, i32x8 b) { TC_HALVES(i32x8, a.half[i] + b.half[i]); }
TC_INLINE i32x8 i32x8_sub(i32x8 a, i32x8 b) { TC_HALVES(i32x8, a.half[i] - b.half[i]); }
TC_INLINE vf i32x8_floats(i32x8 a) {
    int32_t rows[8];
    memcpy(rows, &a, sizeof rows);
    return vf_from_i32(rows);
}
TC_INLINE i32x8 i32x8_from_i8(const uint8_t *p) {
    i32x8 a = {{{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]},
                {(int8_t)p[4], (int8_t)p[5], (int8_t)p[6], (int8_t)p[7]}}};
    return a;
}
TC_INLINE i32x8 i32x8_offset(const uint8_t *halves, int factor) {
    int16_t parts[2];
    memcpy(parts, halves, 4);
    i32x4 none = {0};
    TC_HALVES(i32x8, none + (parts[0] + parts[1]) * factor);
}
TC_INLINE vf vf_from_u8(const uint8_t *p) {
    int32_t rows[8];
    for (int i = 0; i < 8; ++i) rows[i] = p[i];
    return vf_from_i32(rows);
}
TC_INLINE vf vf_from_i8(const uint8_t *p) { return i32x8_floats(i32x8_from_i8(p)); }

/* Signed bytes at even or odd places, as 16 bits. */
TC_INLINE i16x8 even_bytes(u8x16 a) { return (i16x8)((u16x8)a << 8) >> 8; }
TC_INLINE i16x8 odd_bytes(u8x16 a) { return (i16x8)a >> 8; }
TC_INLINE i16x8 pair_sums(u8x16 w, u8x16 x) {
    return even_bytes(w) * even_bytes(x) + odd_bytes(w) * odd_bytes(x);
}
TC_INLINE sums sums_first(b32 w, b32 x) { TC_HALVES(sums, pair_sums(w.half[i], x.half[i])); }
TC_INLINE sums sums_next(sums a, b32 w, b32 x) {
    sums b = sums_first(w, x);
    TC_HALVES(sums, a.half[i] + b.half[i]);
}
TC_INLINE sums sums_first_signed(b32 w, b32 x) { return sums_first(w, x); }
TC_INLINE i32x8 sums_total(sums a) {
    TC_HALVES(i32x8, ((i32x4)a.half[i] >> 16) + ((i32x4)((u32x4)a.half[i] << 16) >> 16));
}
TC_INLINE row_scales row_scales_load(const uint8_t *p) { return i32x8_from_i8(p); }
TC_INLINE i32x8 sums_scaled(sums a, row_scales scales) {
    i32x8 total = sums_total(a);
    TC_HALVES(i32x8, total.half[i] * scales.half[i]);
}
typedef struct {
    i32x8 half[2];
} scale_pairs;
TC_INLINE scale_pairs scale_pairs_load(const uint8_t *scales) {
    scale_pairs pairs = {{i32x8_from_i8(scales), i32x8_from_i8(scales + 8)}};
    return pairs;
}
TC_INLINE i32x8 scale_pairs_offset(scale_pairs scales, const uint8_t *halves) {
    int16_t parts[2];
    memcpy(parts, halves, 4);
    int32_t low = 32 * parts[0], high = 32 * parts[1];
    TC_HALVES(i32x8, scales.half[0].half[i] * low + scales.half[1].half[i] * high);
}

#endif

#endif
