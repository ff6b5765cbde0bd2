/* Quantised weights of layout FILE times activations rounded to 8 bits: integer products of half
 * groups, each added with its factor in ascending order. */
#include "decode.h"
#include "float_bytes.h"
#include "float_products.h"

enum {
    ROWS = 8,        /* lanes */
    BLOCK_GROUPS = 8 /* decoded together for all rows of the input */
};

/* One group of 8 rows. */
typedef struct {
    int8_t q[ROWS][TC_GROUP];
    float d[2][ROWS], m[2][ROWS];
} group_codes;

/* dots[h][r] = sum over the columns of half h of q[r] * x. |q| <= 128 and |x| <= 127. */
#if defined(__AVX2__)

static inline __m256i dot_row(const int8_t *q, __m256i x) {
    __m256i w = _mm256_loadu_si256((const __m256i *)q);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static inline __m256i dot_four_rows(const int8_t (*q)[TC_GROUP], __m256i x) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(dot_row(q[0], x), dot_row(q[1], x)),
                             _mm256_hadd_epi32(dot_row(q[2], x), dot_row(q[3], x)));
}

static inline void dot_rows(const int8_t (*q)[TC_GROUP], const int8_t *x, vf dots[2]) {
    __m256i all = _mm256_loadu_si256((const __m256i *)x);
    __m256i low = dot_four_rows(q, all), high = dot_four_rows(q + 4, all);
    dots[0] = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x20));
    dots[1] = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x31));
}

#elif defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

static inline float32x4_t dot_four_rows(const int8_t (*q)[TC_GROUP], int half, int8x16_t x) {
    int32x4_t each[4];
    for (int r = 0; r < 4; ++r) each[r] = vdotq_s32(vdupq_n_s32(0), vld1q_s8(q[r] + 16 * half), x);
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3])));
}

static inline void dot_rows(const int8_t (*q)[TC_GROUP], const int8_t *x, vf dots[2]) {
    for (int h = 0; h < 2; ++h) {
        int8x16_t half = vld1q_s8(x + 16 * h);
        dots[h] = vf_make(dot_four_rows(q, h, half), dot_four_rows(q + 4, h, half));
    }
}

#else

static inline void dot_rows(const int8_t (*q)[TC_GROUP], const int8_t *x, vf dots[2]) {
    for (int h = 0; h < 2; ++h) {
        int32_t sums[ROWS] = {0};
        for (int r = 0; r < ROWS; ++r)
            for (int c = 16 * h; c < 16 * h + 16; ++c) sums[r] += q[r][c] * x[c];
        dots[h] = vf_from_i32(sums);
    }
}
#endif

/* Groups [first, first + count) of rows [row, row + ROWS), the last repeated beyond `last`. */
static void decode_rows(const tc_weight *w, const tc_format *format, int64_t row, int64_t last,
                        int64_t first, int64_t count, group_codes *out) {
    for (int r = 0; r < ROWS; ++r) {
        const uint8_t *data = w->data + (row + r < last ? row + r : last - 1) * w->row_bytes;
        for (int64_t g = 0; g < count; ++g) {
            tc_codes codes;
            tc_decode_codes(format, data, first + g, &codes);
            memcpy(out[g].q[r], codes.q, sizeof codes.q);
            for (int h = 0; h < 2; ++h) {
                out[g].d[h][r] = codes.d[h];
                out[g].m[h][r] = codes.m[h];
            }
        }
    }
}

/* sums + the groups' products with one rounded row of the input. */
static inline vf add_groups(const group_codes *groups, int64_t first, int64_t count, int has_minima,
                            const uint8_t *rounded, int64_t cols, vf sums) {
    const uint8_t *factors = rounded + cols;
    const uint8_t *half_sums = factors + cols / TC_GROUP * 2 * sizeof(float);
    for (int64_t g = 0; g < count; ++g) {
        float dx;
        int16_t sum[2];
        vf dots[2];
        memcpy(&dx, factors + (first + g) * sizeof dx, sizeof dx);
        memcpy(sum, half_sums + (first + g) * sizeof sum, sizeof sum);
        dot_rows(groups[g].q, (const int8_t *)rounded + (first + g) * TC_GROUP, dots);
        for (int h = 0; h < 2; ++h) {
            sums = vf_fma(dots[h], vf_mul(vf_load(groups[g].d[h]), vf_set(dx)), sums);
            if (has_minima) sums = vf_fma(vf_load(groups[g].m[h]), vf_set(dx * (float)sum[h]), sums);
        }
    }
    return sums;
}

static void multiply(const group_codes *groups, int64_t first, int64_t count, int has_minima,
                     const tc_input *in, int64_t rows, float *y, int64_t ldy) {
    for (int64_t t = 0; t < in->rows; ++t) {
        float sums[ROWS] = {0.0f};
        if (first) memcpy(sums, y + t * ldy, (size_t)rows * sizeof *y);
        vf_store(sums, add_groups(groups, first, count, has_minima, in->q + t * in->q_bytes, in->cols,
                                  vf_load(sums)));
        memcpy(y + t * ldy, sums, (size_t)rows * sizeof *y);
    }
}

void tc_matmul_file_int8(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                         int64_t ldy) {
    const tc_format *format = tc_find_format(w->type);
    const int64_t num_groups = w->cols / TC_GROUP;
    group_codes groups[BLOCK_GROUPS];
    for (int64_t r = first; r < last; r += ROWS) {
        const int64_t rows = last - r < ROWS ? last - r : ROWS;
        for (int64_t g = 0; g < num_groups; g += BLOCK_GROUPS) {
            const int64_t count = num_groups - g < BLOCK_GROUPS ? num_groups - g : BLOCK_GROUPS;
            decode_rows(w, format, r, last, g, count, groups);
            multiply(groups, g, count, format->has_minima, in, rows, y + r - first, ldy);
        }
    }
}
