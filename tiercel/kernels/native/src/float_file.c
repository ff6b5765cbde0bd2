/* Weights of layout FILE times float activations. The lanes of a sum are columns modulo 8, over at
 * most BLOCK_COLS columns; then the lanes are added, then the blocks in ascending order. */
#include "decode.h"
#include "float_products.h"

enum {
    BLOCK_ROWS = 4, /* weight rows and tokens whose sums are in registers */
    BLOCK_TOKENS = 3,
    BLOCK_COLS = 1024,
    FEW_TOKENS = 16,
    CHUNK_TOKENS = 96, /* activations of so many tokens and BLOCK_COLS columns stay in the L2 cache */
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

static int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

/* A piece of a product: rows [first, last) of the weights and some rows of x. */
typedef struct {
    const tc_weight *w;
    const tc_format *format;
    int64_t first, last;
    const float *x;
    int64_t ldx, tokens;
    float *y; /* of row `first` */
    int64_t ldy;
} piece;

/* Adds the product of BLOCK_ROWS rows from row r on and BLOCK_TOKENS tokens from token t on, over
 * columns [c, c + cols), to y; sets it where c is 0. */
static void add_product(const piece *p, int32_t type, const uint8_t *const *rows, int64_t r, int64_t t,
                        int64_t c, int64_t cols) {
    const int tokens = (int)at_most(p->tokens - t, BLOCK_TOKENS);
    const int num_rows = (int)at_most(p->last - r, BLOCK_ROWS);
    const float *x[BLOCK_TOKENS];
    float sums[BLOCK_TOKENS][BLOCK_ROWS];
    for (int i = 0; i < tokens; ++i) x[i] = p->x + (t + i) * p->ldx + c;
    switch (type) {
    case TC_F16: product_f16(rows, x, tokens, cols, sums); break;
    case TC_BF16: product_bf16(rows, x, tokens, cols, sums); break;
    default: product_f32(rows, x, tokens, cols, sums);
    }
    for (int i = 0; i < tokens; ++i) {
        float *y = p->y + (t + i) * p->ldy + r - p->first;
        for (int k = 0; k < num_rows; ++k) y[k] = c ? y[k] + sums[i][k] : sums[i][k];
    }
}

/* BLOCK_ROWS rows from row r on, BLOCK_COLS columns from column c on, times all tokens. Plain floats
 * are read from the file's bytes, other types decoded once. Rows beyond the last repeat it. */
static void multiply_block(const piece *p, int64_t r, int64_t c) {
    const int64_t cols = at_most(p->w->cols - c, BLOCK_COLS);
    const int is_plain = !p->format->codes;
    const uint8_t *rows[BLOCK_ROWS];
    float buffer[BLOCK_ROWS * BUFFER_STRIDE];
    for (int i = 0; i < BLOCK_ROWS; ++i) {
        const int64_t row = at_most(r + i, p->last - 1);
        const uint8_t *bytes = p->w->data + row * p->w->row_bytes;
        float *decoded = buffer + (row - r) * BUFFER_STRIDE;
        if (!is_plain && row == r + i) tc_decode_columns(p->format, bytes, c, cols, decoded);
        rows[i] = is_plain ? bytes + c * p->format->block_bytes : (const uint8_t *)decoded;
    }
    for (int64_t t = 0; t < p->tokens; t += BLOCK_TOKENS)
        add_product(p, is_plain ? p->format->type : TC_F32, rows, r, t, c, cols);
}

/* Few tokens: rows are read from begin to end. Many: their columns of x stay in the cache. */
static void multiply(const piece *p) {
    if (p->tokens <= FEW_TOKENS) {
        for (int64_t r = p->first; r < p->last; r += BLOCK_ROWS)
            for (int64_t c = 0; c < p->w->cols; c += BLOCK_COLS) multiply_block(p, r, c);
    } else {
        for (int64_t c = 0; c < p->w->cols; c += BLOCK_COLS)
            for (int64_t r = p->first; r < p->last; r += BLOCK_ROWS) multiply_block(p, r, c);
    }
}

void tc_matmul_file_float(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy) {
    const tc_format *format = tc_find_format(w->type);
    for (int64_t t = 0; t < in->rows; t += CHUNK_TOKENS) {
        const piece p = {
            .w = w, .format = format, .first = first, .last = last,
            .x = in->x + t * in->ldx, .ldx = in->ldx, .tokens = at_most(in->rows - t, CHUNK_TOKENS),
            .y = y + t * ldy, .ldy = ldy,
        };
        multiply(&p);
    }
}
