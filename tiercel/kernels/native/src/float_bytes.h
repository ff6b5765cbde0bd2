/* 32 bytes as one value, and bytes as floats, for each variant of the library. */
#ifndef TIERCEL_FLOAT_BYTES_H
#define TIERCEL_FLOAT_BYTES_H

#include "simd.h"

/* vb_shl and vb_shr shift bytes by less than 8; bits of a neighbour may come in, which the caller
 * masks. vb_words: 4 words in turn. vb_load_nibbles: low nibbles of 16 bytes, then their high ones.
 * vb_look_up: table[index] for indices below 16. vb_spread: bit i of 4 bytes as bit 4 of byte i.
 * vb_column: signed bytes 4 * i + j of 8 lanes i, as floats. */

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

typedef __m256i vb;
static inline vb vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vb vb_set(int a) { return _mm256_set1_epi8((char)a); }
static inline vb vb_and(vb a, vb b) { return _mm256_and_si256(a, b); }
static inline vb vb_or(vb a, vb b) { return _mm256_or_si256(a, b); }
static inline vb vb_sub(vb a, vb b) { return _mm256_sub_epi8(a, b); }
static inline vb vb_shl(vb a, int n) { return _mm256_slli_epi32(a, n); }
static inline vb vb_shr(vb a, int n) { return _mm256_srli_epi32(a, n); }
static inline void vb_store(int8_t *p, vb a) { _mm256_storeu_si256((__m256i *)p, a); }
static inline vb vb_words(const uint64_t w[4]) {
    return _mm256_setr_epi64x((int64_t)w[0], (int64_t)w[1], (int64_t)w[2], (int64_t)w[3]);
}
static inline vb vb_load_nibbles(const uint8_t *p) {
    __m128i packed = _mm_loadu_si128((const __m128i *)p);
    return vb_and(_mm256_set_m128i(_mm_srli_epi32(packed, 4), packed), vb_set(15));
}
static inline vb vb_look_up(const int8_t *table, vb index) {
    __m128i values = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), index);
}
static inline vb vb_spread(const uint8_t *word) {
    int32_t bits;
    memcpy(&bits, word, 4);
    const vb places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const vb bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    vb spread = vb_and(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), places), bit);
    return vb_and(_mm256_cmpeq_epi8(spread, bit), vb_set(16));
}
static inline vf vb_column(vb a, int j) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * j), 24));
}
static inline vf vf_from_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline float tc_f16_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

#elif defined(__ARM_NEON) && defined(__aarch64__)

typedef struct {
    uint8x16_t lo, hi;
} vb;
static inline vb vb_make(uint8x16_t lo, uint8x16_t hi) {
    vb a = {lo, hi};
    return a;
}
static inline vb vb_load(const uint8_t *p) { return vb_make(vld1q_u8(p), vld1q_u8(p + 16)); }
static inline vb vb_set(int a) { return vb_make(vdupq_n_u8((uint8_t)a), vdupq_n_u8((uint8_t)a)); }
static inline vb vb_and(vb a, vb b) { return vb_make(vandq_u8(a.lo, b.lo), vandq_u8(a.hi, b.hi)); }
static inline vb vb_or(vb a, vb b) { return vb_make(vorrq_u8(a.lo, b.lo), vorrq_u8(a.hi, b.hi)); }
static inline vb vb_sub(vb a, vb b) { return vb_make(vsubq_u8(a.lo, b.lo), vsubq_u8(a.hi, b.hi)); }
static inline vb vb_shl(vb a, int n) {
    int8x16_t by = vdupq_n_s8((int8_t)n);
    return vb_make(vshlq_u8(a.lo, by), vshlq_u8(a.hi, by));
}
static inline vb vb_shr(vb a, int n) { return vb_shl(a, -n); }
static inline void vb_store(int8_t *p, vb a) {
    vst1q_s8(p, vreinterpretq_s8_u8(a.lo));
    vst1q_s8(p + 16, vreinterpretq_s8_u8(a.hi));
}
static inline vb vb_words(const uint64_t w[4]) {
    return vb_make(vcombine_u8(vcreate_u8(w[0]), vcreate_u8(w[1])),
                   vcombine_u8(vcreate_u8(w[2]), vcreate_u8(w[3])));
}
static inline vb vb_load_nibbles(const uint8_t *p) {
    uint8x16_t packed = vld1q_u8(p);
    return vb_make(vandq_u8(packed, vdupq_n_u8(15)), vshrq_n_u8(packed, 4));
}
static inline vb vb_look_up(const int8_t *table, vb index) {
    uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
    return vb_make(vqtbl1q_u8(values, index.lo), vqtbl1q_u8(values, index.hi));
}
static inline uint8x16_t tc_spread_two(const uint8_t *p) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1])), bit), vdupq_n_u8(16));
}
static inline vb vb_spread(const uint8_t *word) {
    return vb_make(tc_spread_two(word), tc_spread_two(word + 2));
}
static inline float32x4_t tc_column_of_four(uint8x16_t a, int j) {
    int32x4_t top = vshlq_s32(vreinterpretq_s32_u8(a), vdupq_n_s32(24 - 8 * j));
    return vcvtq_f32_s32(vshrq_n_s32(top, 24));
}
static inline vf vb_column(vb a, int j) {
    return vf_make(tc_column_of_four(a.lo, j), tc_column_of_four(a.hi, j));
}
static inline vf vf_from_i8(const int8_t *p) {
    int16x8_t wide = vmovl_s8(vld1_s8(p));
    return vf_make(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
                   vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide))));
}
static inline float tc_f16_at(const uint8_t *p) {
    __fp16 value;
    memcpy(&value, p, 2);
    return (float)value;
}

#else /* plain C */

typedef struct {
    uint8_t v[32];
} vb;
#define TC_EACH_BYTE(expression)     \
    do {                             \
        vb out_;                     \
        for (int i = 0; i < 32; ++i) \
            out_.v[i] = (uint8_t)(expression); \
        return out_;                 \
    } while (0)
static inline vb vb_load(const uint8_t *p) { TC_EACH_BYTE(p[i]); }
static inline vb vb_set(int a) { TC_EACH_BYTE(a); }
static inline vb vb_and(vb a, vb b) { TC_EACH_BYTE(a.v[i] & b.v[i]); }
static inline vb vb_or(vb a, vb b) { TC_EACH_BYTE(a.v[i] | b.v[i]); }
static inline vb vb_sub(vb a, vb b) { TC_EACH_BYTE(a.v[i] - b.v[i]); }
static inline vb vb_shl(vb a, int n) { TC_EACH_BYTE(a.v[i] << n); }
static inline vb vb_shr(vb a, int n) { TC_EACH_BYTE(a.v[i] >> n); }
static inline void vb_store(int8_t *p, vb a) { memcpy(p, a.v, 32); }
static inline vb vb_words(const uint64_t w[4]) { TC_EACH_BYTE(w[i / 8] >> 8 * (i % 8)); }
static inline vb vb_load_nibbles(const uint8_t *p) { TC_EACH_BYTE(i < 16 ? p[i] & 15 : p[i - 16] >> 4); }
static inline vb vb_look_up(const int8_t *table, vb index) { TC_EACH_BYTE(table[index.v[i]]); }
static inline vb vb_spread(const uint8_t *word) { TC_EACH_BYTE((word[i / 8] >> i % 8 & 1) << 4); }
static inline vf vb_column(vb a, int j) { TC_EACH((float)(int8_t)a.v[4 * i + j]); }
static inline vf vf_from_i8(const int8_t *p) { TC_EACH((float)p[i]); }
static inline float tc_f16_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return tc_from_f16_bits(bits);
}
#endif

#endif
