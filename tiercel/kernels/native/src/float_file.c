/* Weights of layout FILE times float activations. The lanes of a sum are columns modulo 8, over at
 * most BLOCK_COLS columns; then the lanes are added, then the blocks in ascending order. */
#include "decode.h"
#include "float_products.h"

enum {
    BLOCK_ROWS = 4,     /* weight rows and tokens whose sums are in registers */
    BLOCK_TOKENS = 3,
    BLOCK_COLS = 1024,
    CHUNK_TOKENS = 96,  /* activations of so many tokens and BLOCK_COLS columns stay in the L2 cache */
    BUFFER_STRIDE = BLOCK_COLS + 16 /* rows do not share the sets of the L1 cache */
};

/* Sums of the lanes of four values, each in the order of vf_sum. */
static inline void sum_four(const vf a[4], float out[4]) {
#if defined(__AVX2__)
    __m128 half[4];
    for (int i = 0; i < 4; ++i)
        half[i] = _mm_add_ps(_mm256_castps256_ps128(a[i]), _mm256_extractf128_ps(a[i], 1));
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(half[0], half[1]), _mm_unpackhi_ps(half[0], half[1]));
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(half[2], half[3]), _mm_unpackhi_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
#else
    for (int i = 0; i < 4; ++i) out[i] = vf_sum(a[i]);
#endif
}

/* Products of BLOCK_ROWS rows with `tokens` rows of x over `cols` columns; both are constants. */
static inline __attribute__((always_inline)) void product(int32_t type, const uint8_t *const *rows,
                                                          const float *const *x, int tokens, int64_t cols,
                                                          float sums[][BLOCK_ROWS]) {
    const int bytes = type == TC_F32 ? 4 : 2;
    const int64_t whole = cols - cols % TC_LANES;
    vf acc[BLOCK_TOKENS][BLOCK_ROWS], some[BLOCK_TOKENS];
    for (int t = 0; t < tokens; ++t)
        for (int r = 0; r < BLOCK_ROWS; ++r) acc[t][r] = vf_set(0.0f);
    for (int64_t c = 0; c < whole; c += TC_LANES) {
        for (int t = 0; t < tokens; ++t) some[t] = vf_load(x[t] + c);
        for (int r = 0; r < BLOCK_ROWS; ++r) {
            vf w = tc_load_floats(type, rows[r] + c * bytes);
            for (int t = 0; t < tokens; ++t) acc[t][r] = vf_fma(w, some[t], acc[t][r]);
        }
    }
    if (whole < cols) {
        for (int t = 0; t < tokens; ++t)
            some[t] = tc_load_some_floats(TC_F32, (const uint8_t *)(x[t] + whole), cols - whole);
        for (int r = 0; r < BLOCK_ROWS; ++r) {
            vf w = tc_load_some_floats(type, rows[r] + whole * bytes, cols - whole);
            for (int t = 0; t < tokens; ++t) acc[t][r] = vf_fma(w, some[t], acc[t][r]);
        }
    }
    for (int t = 0; t < tokens; ++t) sum_four(acc[t], sums[t]);
}

#define PRODUCT_OF(type)                                                  \
    switch (tokens) {                                                     \
    case 1: product(type, rows, x, 1, cols, sums); break;                 \
    case 2: product(type, rows, x, 2, cols, sums); break;                 \
    default: product(type, rows, x, BLOCK_TOKENS, cols, sums);            \
    }

static void product_f32(const uint8_t *const *rows, const float *const *x, int tokens, int64_t cols,
                        float sums[][BLOCK_ROWS]) {
    PRODUCT_OF(TC_F32)
}

static void product_f16(const uint8_t *const *rows, const float *const *x, int tokens, int64_t cols,
                        float sums[][BLOCK_ROWS]) {
    PRODUCT_OF(TC_F16)
}

static void product_bf16(const uint8_t *const *rows, const float *const *x, int tokens, int64_t cols,
                         float sums[][BLOCK_ROWS]) {
    PRODUCT_OF(TC_BF16)
}

typedef struct {
    const uint8_t *rows[BLOCK_ROWS]; /* at column 0 of the block; the last is repeated beyond num_rows */
    int32_t type;
    int num_rows;
    int64_t first_col, cols;
} row_block;

/* Adds a block's products with up to BLOCK_TOKENS rows of x to y, or sets y for the first block. */
static void multiply(const row_block *block, const float *x, int64_t ldx, int tokens, float *y,
                     int64_t ldy) {
    const float *at[BLOCK_TOKENS];
    float sums[BLOCK_TOKENS][BLOCK_ROWS];
    for (int t = 0; t < tokens; ++t) at[t] = x + t * ldx + block->first_col;
    switch (block->type) {
    case TC_F16: product_f16(block->rows, at, tokens, block->cols, sums); break;
    case TC_BF16: product_bf16(block->rows, at, tokens, block->cols, sums); break;
    default: product_f32(block->rows, at, tokens, block->cols, sums);
    }
    for (int t = 0; t < tokens; ++t)
        for (int r = 0; r < block->num_rows; ++r)
            y[t * ldy + r] = block->first_col ? y[t * ldy + r] + sums[t][r] : sums[t][r];
}

static int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

/* Plain floats and few tokens: each row is read once, from the file's bytes. */
static void multiply_rows(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy) {
    const int64_t bytes = w->type == TC_F32 ? 4 : 2;
    for (int64_t r = first; r < last; r += BLOCK_ROWS) {
        row_block block = {.type = w->type, .num_rows = (int)at_most(last - r, BLOCK_ROWS)};
        for (int64_t c = 0; c < w->cols; c += BLOCK_COLS) {
            block.first_col = c;
            block.cols = at_most(w->cols - c, BLOCK_COLS);
            for (int i = 0; i < BLOCK_ROWS; ++i)
                block.rows[i] = w->data + at_most(r + i, last - 1) * w->row_bytes + c * bytes;
            multiply(&block, in->x, in->ldx, (int)in->rows, y + r - first, ldy);
        }
    }
}

/* Any type: a block of weights becomes floats once for CHUNK_TOKENS tokens. */
static void multiply_chunk(const tc_weight *w, int64_t first, int64_t last, const float *x, int64_t ldx,
                           int64_t tokens, float *y, int64_t ldy) {
    const tc_format *format = tc_find_format(w->type);
    float buffer[BLOCK_ROWS * BUFFER_STRIDE];
    for (int64_t c = 0; c < w->cols; c += BLOCK_COLS) {
        row_block block = {.type = TC_F32, .first_col = c, .cols = at_most(w->cols - c, BLOCK_COLS)};
        for (int64_t r = first; r < last; r += BLOCK_ROWS) {
            block.num_rows = (int)at_most(last - r, BLOCK_ROWS);
            for (int i = 0; i < block.num_rows; ++i)
                tc_decode_columns(format, w->data + (r + i) * w->row_bytes, c, block.cols,
                                  buffer + i * BUFFER_STRIDE);
            for (int i = 0; i < BLOCK_ROWS; ++i)
                block.rows[i] = (const uint8_t *)(buffer + at_most(i, block.num_rows - 1) * BUFFER_STRIDE);
            for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS)
                multiply(&block, x + t * ldx, ldx, (int)at_most(tokens - t, BLOCK_TOKENS),
                         y + t * ldy + r - first, ldy);
        }
    }
}

void tc_matmul_file_float(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy) {
    const int is_float = w->type == TC_F32 || w->type == TC_F16 || w->type == TC_BF16;
    if (is_float && in->rows <= BLOCK_TOKENS) {
        if (in->rows) multiply_rows(w, first, last, in, y, ldy);
        return;
    }
    for (int64_t t = 0; t < in->rows; t += CHUNK_TOKENS)
        multiply_chunk(w, first, last, in->x + t * in->ldx, in->ldx, at_most(in->rows - t, CHUNK_TOKENS),
                       y + t * ldy, ldy);
}
