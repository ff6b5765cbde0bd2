/* Activations rounded to 8 bits; native.h has the layout of a row. */
#include <string.h>

#include "native.h"
#include "simd.h"

TC_EXPORT int64_t tc_rounded_bytes(int64_t cols) {
    int64_t groups = cols / TC_GROUP;
    int64_t bytes = cols + groups * (int64_t)(2 * sizeof(float) + 2 * sizeof(int16_t));
    return (bytes + 63) / 64 * 64;
}

/* Both functions of a group:
 *
 * largest_magnitude  max|x|. As bits, magnitudes have the order of their values, with NaN above all, so
 *                    a NaN or an infinity makes the scale, and each result, NaN or infinite.
 * round_group        q = round(x / d), limited to -127 .. 127, as d is coarse where it is subnormal;
 *                    and the sums of both halves of q. */
#if defined(__AVX2__)

static inline float largest_magnitude(const float *x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < TC_GROUP; i += TC_LANES) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(x + i));
        most = _mm256_max_epu32(most, _mm256_and_si256(bits, magnitude));
    }
    __m128i top = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
    top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(top));
}

static inline __m256i rounded_lanes(const float *x, vf d) {
    vf scaled = vf_max(vf_div(vf_load(x), d), vf_set(-127.0f));
    return _mm256_cvtps_epi32(vf_min(scaled, vf_set(127.0f)));
}

static inline void round_group(const float *x, float d, int8_t *q, int16_t *halves) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    vf divisor = vf_set(d);
    __m256i low = _mm256_packs_epi32(rounded_lanes(x, divisor), rounded_lanes(x + 8, divisor));
    __m256i high = _mm256_packs_epi32(rounded_lanes(x + 16, divisor), rounded_lanes(x + 24, divisor));
    __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256((__m256i *)q, all);
    /* As bytes from 0 to 255, whose sums of 8 are one instruction. */
    __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(all, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m256i pairs = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    halves[0] = (int16_t)(_mm_cvtsi128_si32(_mm256_castsi256_si128(pairs)) - 16 * 128);
    halves[1] = (int16_t)(_mm_cvtsi128_si32(_mm256_extracti128_si256(pairs, 1)) - 16 * 128);
}

#else

static inline float largest_magnitude(const float *x) {
    uint32_t bits[TC_GROUP], most[TC_LANES] = {0}, top = 0;
    float value;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < TC_GROUP; i += TC_LANES)
        for (int lane = 0; lane < TC_LANES; ++lane) {
            uint32_t magnitude = bits[i + lane] & 0x7fffffff;
            most[lane] = magnitude > most[lane] ? magnitude : most[lane];
        }
    for (int lane = 0; lane < TC_LANES; ++lane) top = most[lane] > top ? most[lane] : top;
    memcpy(&value, &top, 4);
    return value;
}

static inline void round_group(const float *x, float d, int8_t *q, int16_t *halves) {
    float rounded[TC_GROUP];
    for (int i = 0; i < TC_GROUP; i += TC_LANES) {
        vf scaled = vf_max(vf_div(vf_load(x + i), vf_set(d)), vf_set(-127.0f));
        vf_store(rounded + i, vf_round(vf_min(scaled, vf_set(127.0f))));
    }
    for (int half = 0; half < 2; ++half) {
        int sum = 0;
        for (int i = half * TC_GROUP / 2; i < (half + 1) * TC_GROUP / 2; ++i) {
            q[i] = (int8_t)(int32_t)rounded[i];
            sum += q[i];
        }
        halves[half] = (int16_t)sum;
    }
}

#endif

void tc_round_row(const float *x, int64_t first, int64_t count, int64_t cols, uint8_t *row) {
    int64_t groups = cols / TC_GROUP;
    uint8_t *scales = row + cols, *scaled_sums = scales + 4 * groups, *sums = scaled_sums + 4 * groups;
    for (int64_t done = 0; done < count; done += TC_GROUP) {
        int64_t group = (first + done) / TC_GROUP;
        int8_t *q = (int8_t *)row + first + done;
        float d = largest_magnitude(x + done) / 127.0f, scaled_sum;
        int16_t halves[2] = {0, 0};
        if (d != 0.0f)
            round_group(x + done, d, q, halves);
        else
            memset(q, 0, TC_GROUP);
        scaled_sum = d * (float)(halves[0] + halves[1]);
        memcpy(scales + 4 * group, &d, 4);
        memcpy(scaled_sums + 4 * group, &scaled_sum, 4);
        memcpy(sums + 4 * group, halves, 4);
    }
}
