/* Eight floats as one value, for each variant of the library, with the same results in all: products
 * and sums that are one operation are fused in all of them, and nothing else is (the library is
 * compiled with -ffp-contract=off). */
#ifndef TIERCEL_SIMD_H
#define TIERCEL_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { TC_LANES = 8 };

static inline float tc_from_f16_bits(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float value;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x400) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {
        value = (float)rest * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest, ties to even; beyond the range to infinity. */
static inline uint16_t tc_to_f16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) { /* subnormal: the float's own rounding at 2^-24 */
        float magnitude, rounded;
        memcpy(&magnitude, &bits, 4);
        rounded = magnitude + 0.5f;
        memcpy(&bits, &rounded, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

static inline float tc_from_bf16_bits(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t tc_to_bf16_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

typedef __m256 vf;
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_set(float a) { return _mm256_set1_ps(a); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
/* a * b + c, rounded once */
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* a, in a register from here on: GCC would load it anew for each use. */
static inline vf vf_hold(vf a) {
    __asm__("" : "+x"(a));
    return a;
}
static inline vf vf_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void vf_store_f16(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf vf_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_from_i32(const int32_t *p) {
    return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* round(a) to even, as the float it is */
static inline vf vf_round(vf a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* 2^n for whole n in -126 .. 127 */
static inline vf vf_exp2_int(vf n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_castsi256_ps(bits);
}
/* Lane i is vf_sum(a[i]), in the same order. */
static inline vf vf_sum_each(const vf *a) {
    __m256 s[4], lo, hi; /* half of the exchanges are blends, which are cheaper than shuffles */
    for (int i = 0; i < 4; ++i)
        s[i] = _mm256_add_ps(_mm256_blend_ps(a[i], a[i + 4], 0xf0), _mm256_permute2f128_ps(a[i], a[i + 4], 0x21));
    lo = _mm256_add_ps(_mm256_blend_ps(s[0], s[1], 0xcc), _mm256_shuffle_ps(s[0], s[1], 0x4e));
    hi = _mm256_add_ps(_mm256_blend_ps(s[2], s[3], 0xcc), _mm256_shuffle_ps(s[2], s[3], 0x4e));
    return _mm256_add_ps(_mm256_shuffle_ps(lo, hi, 0x88), _mm256_shuffle_ps(lo, hi, 0xdd));
}
static inline float vf_sum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vf_largest(vf a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
#define TC_HAS_SUM 1

#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>

typedef struct {
    float32x4_t lo, hi;
} vf;
static inline vf vf_make(float32x4_t lo, float32x4_t hi) {
    vf a = {lo, hi};
    return a;
}
static inline vf vf_load(const float *p) { return vf_make(vld1q_f32(p), vld1q_f32(p + 4)); }
static inline void vf_store(float *p, vf a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}
static inline vf vf_set(float a) { return vf_make(vdupq_n_f32(a), vdupq_n_f32(a)); }
static inline vf vf_add(vf a, vf b) { return vf_make(vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)); }
static inline vf vf_sub(vf a, vf b) { return vf_make(vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)); }
static inline vf vf_mul(vf a, vf b) { return vf_make(vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)); }
static inline vf vf_div(vf a, vf b) { return vf_make(vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)); }
/* The second where one is NaN, as on x86. */
static inline vf vf_max(vf a, vf b) {
    return vf_make(vbslq_f32(vcgtq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcgtq_f32(a.hi, b.hi), a.hi, b.hi));
}
static inline vf vf_min(vf a, vf b) {
    return vf_make(vbslq_f32(vcltq_f32(a.lo, b.lo), a.lo, b.lo), vbslq_f32(vcltq_f32(a.hi, b.hi), a.hi, b.hi));
}
static inline vf vf_fma(vf a, vf b, vf c) {
    return vf_make(vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi));
}
static inline vf vf_load_f16(const uint16_t *p) {
    float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return vf_make(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h));
}
static inline void vf_store_f16(uint16_t *p, vf a) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi)));
}
static inline vf vf_load_bf16(const uint16_t *p) {
    uint16x8_t h = vld1q_u16(p);
    return vf_make(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                   vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16)));
}
static inline vf vf_from_i32(const int32_t *p) {
    return vf_make(vcvtq_f32_s32(vld1q_s32(p)), vcvtq_f32_s32(vld1q_s32(p + 4)));
}
static inline vf vf_round(vf a) { return vf_make(vrndnq_f32(a.lo), vrndnq_f32(a.hi)); }
static inline vf vf_exp2_int(vf n) {
    int32x4_t bias = vdupq_n_s32(127);
    return vf_make(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.lo), bias), 23)),
                   vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.hi), bias), 23)));
}
static inline float32x4_t vf_sum_halves(vf a, vf b) {
    float64x2_t x = vreinterpretq_f64_f32(vaddq_f32(a.lo, a.hi));
    float64x2_t y = vreinterpretq_f64_f32(vaddq_f32(b.lo, b.hi));
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
}
static inline vf vf_sum_each(const vf *a) {
    return vf_make(vpaddq_f32(vf_sum_halves(a[0], a[1]), vf_sum_halves(a[2], a[3])),
                   vpaddq_f32(vf_sum_halves(a[4], a[5]), vf_sum_halves(a[6], a[7])));
}

#else /* plain C */

typedef struct {
    float v[TC_LANES];
} vf;
#define TC_EACH(expression)               \
    do {                                  \
        vf out_;                          \
        for (int i = 0; i < TC_LANES; ++i) \
            out_.v[i] = (expression);     \
        return out_;                      \
    } while (0)
static inline vf vf_load(const float *p) { TC_EACH(p[i]); }
static inline void vf_store(float *p, vf a) { memcpy(p, a.v, sizeof a.v); }
static inline vf vf_set(float a) { TC_EACH(a); }
static inline vf vf_add(vf a, vf b) { TC_EACH(a.v[i] + b.v[i]); }
static inline vf vf_sub(vf a, vf b) { TC_EACH(a.v[i] - b.v[i]); }
static inline vf vf_mul(vf a, vf b) { TC_EACH(a.v[i] * b.v[i]); }
static inline vf vf_div(vf a, vf b) { TC_EACH(a.v[i] / b.v[i]); }
static inline vf vf_max(vf a, vf b) { TC_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline vf vf_min(vf a, vf b) { TC_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
/* Not fused: without the instruction a fused product is a call. Bits differ from other variants. */
static inline vf vf_fma(vf a, vf b, vf c) { TC_EACH(a.v[i] * b.v[i] + c.v[i]); }
static inline vf vf_load_f16(const uint16_t *p) { TC_EACH(tc_from_f16_bits(p[i])); }
static inline void vf_store_f16(uint16_t *p, vf a) {
    for (int i = 0; i < TC_LANES; ++i) p[i] = tc_to_f16_bits(a.v[i]);
}
static inline vf vf_load_bf16(const uint16_t *p) { TC_EACH(tc_from_bf16_bits(p[i])); }
static inline vf vf_from_i32(const int32_t *p) { TC_EACH((float)p[i]); }
static inline vf vf_round(vf a) { TC_EACH(nearbyintf(a.v[i])); }
static inline vf vf_exp2_int(vf n) { TC_EACH(ldexpf(1.0f, (int)n.v[i])); }
static inline float tc_sum_lanes(const float *v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
static inline vf vf_sum_each(const vf *a) { TC_EACH(tc_sum_lanes(a[i].v)); }
#endif

/* The first `count` < 8 floats, then zeros; and their opposite. */
static inline vf vf_load_first(const float *p, int64_t count) {
    float v[TC_LANES] = {0};
    memcpy(v, p, (size_t)count * sizeof *v);
    return vf_load(v);
}
static inline void vf_store_first(float *p, vf a, int64_t count) {
    float v[TC_LANES];
    vf_store(v, a);
    memcpy(p, v, (size_t)count * sizeof *v);
}

#if !defined(TC_HAS_SUM)
static inline vf vf_hold(vf a) { return a; }

/* The sum of the lanes, in one order everywhere. */
static inline float vf_sum(vf a) {
    float v[TC_LANES];
    vf_store(v, a);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

static inline float vf_largest(vf a) {
    float v[TC_LANES], most;
    vf_store(v, a);
    most = v[0];
    for (int i = 1; i < TC_LANES; ++i) most = v[i] > most ? v[i] : most;
    return most;
}
#endif

/* e^a, to about 2 ulp; a is clamped to -87.3 .. 88.3, NaN stays. Cody and Waite's reduction, and a
 * minimax polynomial of degree 6 (Cephes expf). */
static inline vf vf_exp(vf a) {
    vf x = vf_min(vf_set(88.3f), vf_max(vf_set(-87.3f), a));
    vf n = vf_round(vf_mul(x, vf_set(1.44269504f)));
    x = vf_fma(n, vf_set(-0.693359375f), x);
    x = vf_fma(n, vf_set(2.12194440e-4f), x);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, x, vf_set(1.3981999507e-3f));
    p = vf_fma(p, x, vf_set(8.3334519073e-3f));
    p = vf_fma(p, x, vf_set(4.1665795894e-2f));
    p = vf_fma(p, x, vf_set(1.6666665459e-1f));
    p = vf_fma(p, x, vf_set(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(x, x), vf_add(x, vf_set(1.0f)));
    return vf_mul(p, vf_exp2_int(n));
}

#endif
