/* Weights of layout TILES times float activations, without rounding them: the lanes of a sum are the
 * rows of a tile. Columns are added one by one over at most BLOCK_COLS, then the blocks in ascending
 * order. */
#include "float_products.h"
#include "float_tiles_decode.h"
#include "simd.h"

enum {
    BLOCK_TILES = 2, /* tiles and tokens whose sums are in registers */
    BLOCK_TOKENS = 6,
    BLOCK_COLS = 256, /* floats of BLOCK_TILES tiles fill half of the L1 cache */
    TILE_FLOATS = BLOCK_COLS * TC_TILE_ROWS
};

/* sums[t][i]: tile i times row t of x over `cols` columns. `tokens` is a constant. */
static inline __attribute__((always_inline)) void product(const float *tiles, const float *x, int64_t ldx,
                                                          int tokens, int64_t cols,
                                                          vf sums[][BLOCK_TILES]) {
    vf acc[BLOCK_TOKENS][BLOCK_TILES];
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < BLOCK_TILES; ++i) acc[t][i] = vf_set(0.0f);
    for (int64_t c = 0; c < cols; ++c) {
        vf w[BLOCK_TILES];
        for (int i = 0; i < BLOCK_TILES; ++i) w[i] = vf_load(tiles + i * TILE_FLOATS + c * TC_TILE_ROWS);
        for (int t = 0; t < tokens; ++t) {
            vf each = vf_set(x[t * ldx + c]);
            for (int i = 0; i < BLOCK_TILES; ++i) acc[t][i] = vf_fma(w[i], each, acc[t][i]);
        }
    }
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < BLOCK_TILES; ++i) sums[t][i] = acc[t][i];
}

static void product_of(const float *tiles, const float *x, int64_t ldx, int tokens, int64_t cols,
                       vf sums[][BLOCK_TILES]) {
    switch (tokens) {
    case 1: product(tiles, x, ldx, 1, cols, sums); break;
    case 2: product(tiles, x, ldx, 2, cols, sums); break;
    case 3: product(tiles, x, ldx, 3, cols, sums); break;
    case 4: product(tiles, x, ldx, 4, cols, sums); break;
    case 5: product(tiles, x, ldx, 5, cols, sums); break;
    default: product(tiles, x, ldx, BLOCK_TOKENS, cols, sums);
    }
}

/* Adds a tile's sums to the first `rows` of y, or sets them for the first block of columns. */
static void put_sums(vf sums, int is_first, int64_t rows, float *y) {
    if (rows >= TC_TILE_ROWS) {
        vf_store(y, is_first ? sums : vf_add(vf_load(y), sums));
        return;
    }
    float each[TC_LANES];
    vf_store(each, sums);
    for (int64_t r = 0; r < rows; ++r) y[r] = is_first ? each[r] : y[r] + each[r];
}

/* Tiles from row r on, columns [first_col, first_col + cols), times all rows of the input. */
static void multiply(const float *tiles, const tc_input *in, int64_t first_col, int64_t cols, int64_t rows,
                     float *y, int64_t ldy) {
    for (int64_t t = 0; t < in->rows; t += BLOCK_TOKENS) {
        vf sums[BLOCK_TOKENS][BLOCK_TILES];
        int tokens = in->rows - t < BLOCK_TOKENS ? (int)(in->rows - t) : BLOCK_TOKENS;
        product_of(tiles, in->x + t * in->ldx + first_col, in->ldx, tokens, cols, sums);
        for (int k = 0; k < tokens; ++k)
            for (int i = 0; i < BLOCK_TILES; ++i)
                put_sums(sums[k][i], first_col == 0, rows - i * TC_TILE_ROWS,
                         y + (t + k) * ldy + i * TC_TILE_ROWS);
    }
}

void tc_matmul_tiles_float(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                           int64_t ldy) {
    const int64_t tile_bytes = tc_tile_bytes(tc_tile_format_of(w->type), w->cols);
    float tiles[BLOCK_TILES * TILE_FLOATS];
    for (int64_t r = first; r < last; r += BLOCK_TILES * TC_TILE_ROWS) {
        const uint8_t *tile = w->data + r / TC_TILE_ROWS * tile_bytes;
        const int64_t second = last - r > TC_TILE_ROWS ? tile_bytes : 0; /* not beyond the last tile */
        for (int64_t c = 0; c < w->cols; c += BLOCK_COLS) {
            const int64_t cols = w->cols - c < BLOCK_COLS ? w->cols - c : BLOCK_COLS;
            for (int i = 0; i < BLOCK_TILES; ++i)
                tc_decode_tile(w->type, tile + i * second, c / TC_GROUP, cols / TC_GROUP,
                               tiles + i * TILE_FLOATS);
            multiply(tiles, in, c, cols, last - r, y + r - first, ldy);
        }
    }
}
