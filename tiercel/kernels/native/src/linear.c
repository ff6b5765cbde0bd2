/* How products are cut into pieces, and the product of one input as one run of the pool. */
#include <string.h>

#include "products.h"

enum {
    UNIT_ROWS = 16,               /* of weights; only the last piece of a matrix has fewer */
    TOKENS = 128,                 /* of a piece: their activations fit into the second cache */
    PIECES_PER_THREAD = 8,        /* at most: the last piece to end is a small part of the whole */
    MIN_PIECE_PRODUCTS = 1 << 17, /* about 5 us of multiply-adds at one token */
    ROUNDED_COLS = 2048           /* of a piece of rounding */
};

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t num_units(const tc_weight *weights, int num_weights) {
    int64_t units = 0;
    for (int i = 0; i < num_weights; ++i) units += divide_up(weights[i].rows, UNIT_ROWS);
    return units;
}

/* Pieces are ranges of rows times blocks of tokens; the blocks of one range follow each other, so
 * that its weights are read from memory once. */
int64_t tc_num_pieces(const tc_weight *weights, int num_weights, int64_t rows_of_input, int num_threads) {
    int64_t units = num_units(weights, num_weights), blocks = divide_up(rows_of_input, TOKENS);
    if (!units || !blocks) return 0;
    int64_t unit_products = UNIT_ROWS * weights[0].cols * smaller(rows_of_input, TOKENS);
    int64_t ranges = units * unit_products / MIN_PIECE_PRODUCTS;
    ranges = smaller(ranges, divide_up(PIECES_PER_THREAD * (int64_t)num_threads, blocks));
    return smaller(larger(ranges, 1), units) * blocks;
}

static void add_bias(const float *bias, int64_t tokens, int64_t rows, float *y, int64_t ldy) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < rows; ++i) y[t * ldy + i] += bias[i];
}

void tc_multiply_piece(const tc_weight *weights, int num_weights, const float *bias, const tc_input *in,
                       int64_t piece, int64_t num_pieces, float *y, int64_t ldy) {
    int64_t blocks = divide_up(in->rows, TOKENS), ranges = num_pieces / blocks;
    int64_t units = num_units(weights, num_weights), range = piece / blocks;
    int64_t token = piece % blocks * TOKENS;
    int64_t first = units * range / ranges, last = units * (range + 1) / ranges;
    tc_input part = *in;
    part.x += token * in->ldx;
    if (in->q) part.q += token * in->q_bytes;
    part.rows = smaller(in->rows - token, TOKENS);
    y += token * ldy;
    for (int i = 0; i < num_weights && last > 0; ++i) {
        const tc_weight *w = &weights[i];
        int64_t count = divide_up(w->rows, UNIT_ROWS);
        if (first < count) {
            int64_t row = larger(first, 0) * UNIT_ROWS, end = smaller(last * UNIT_ROWS, w->rows);
            tc_matmul(w, row, end, &part, y + row, ldy);
            if (bias) add_bias(bias + row, part.rows, end - row, y + row, ldy);
        }
        first -= count;
        last -= count;
        y += w->rows;
        if (bias) bias += w->rows;
    }
}

int64_t tc_num_rounding_pieces(int64_t rows, int64_t cols) { return rows * divide_up(cols, ROUNDED_COLS); }

void tc_round_piece(const tc_input *in, int64_t piece, uint8_t *q) {
    int64_t parts = divide_up(in->cols, ROUNDED_COLS);
    int64_t row = piece / parts, first = piece % parts * ROUNDED_COLS;
    tc_round_row(in->x + row * in->ldx + first, first, smaller(in->cols - first, ROUNDED_COLS), in->cols,
                 q + row * in->q_bytes);
}

/* x - d * q of some columns of a row that is rounded already. */
static void subtract_rounded(const float *x, const uint8_t *q, int64_t cols, int64_t first, int64_t count,
                             float *rest) {
    for (int64_t i = 0; i < count; ++i) {
        float d;
        memcpy(&d, q + cols + (first + i) / TC_GROUP * 4, 4);
        rest[i] = x[i] - d * (float)(int8_t)q[first + i];
    }
}

enum { SUM_COLS = 4096 }; /* of a piece of the sum of two parts */

typedef struct {
    const tc_weight *weights;
    int num_weights;
    tc_input in; /* rows of all parts: first parts of all tokens, then second ones */
    uint8_t *q;
    int64_t num_pieces, width, tokens;
    float *products, *y;
} linear;

static void run_round(const void *arg, int64_t piece, int worker) {
    const linear *task = arg;
    (void)worker;
    tc_round_piece(&task->in, piece, task->q);
    if (task->in.rows == task->tokens) return;
    int64_t cols = task->in.cols, parts = divide_up(cols, ROUNDED_COLS);
    int64_t row = piece / parts, first = piece % parts * ROUNDED_COLS;
    int64_t count = smaller(cols - first, ROUNDED_COLS);
    uint8_t *q = task->q + row * task->in.q_bytes;
    float rest[ROUNDED_COLS];
    subtract_rounded(task->in.x + row * task->in.ldx + first, q, cols, first, count, rest);
    tc_round_row(rest, first, count, cols, q + task->tokens * task->in.q_bytes);
}

static void run_multiply(const void *arg, int64_t piece, int worker) {
    const linear *task = arg;
    (void)worker;
    tc_multiply_piece(task->weights, task->num_weights, NULL, &task->in, piece, task->num_pieces,
                      task->products, task->width);
}

static void run_sum(const void *arg, int64_t piece, int worker) {
    const linear *task = arg;
    int64_t size = task->tokens * task->width, first = piece * SUM_COLS;
    int64_t last = smaller(first + SUM_COLS, size);
    (void)worker;
    for (int64_t i = first; i < last; ++i) task->y[i] = task->products[i] + task->products[size + i];
}

static int is_float(int32_t type) { return type == TC_F32 || type == TC_F16 || type == TC_BF16; }

TC_EXPORT int64_t tc_linear_scratch(int64_t rows, int64_t cols, int64_t width, int parts) {
    int64_t bytes = parts ? rows * parts * tc_rounded_bytes(cols) : 0;
    return parts == 2 ? bytes + 2 * rows * width * (int64_t)sizeof(float) : bytes;
}

TC_EXPORT void tc_linear(tc_pool *pool, const tc_weight *weights, int num_weights, const float *x,
                         int64_t rows, int parts, uint8_t *scratch, float *y) {
    if (!num_weights || !rows) return;
    int64_t cols = weights[0].cols, width = 0, row_bytes = tc_rounded_bytes(cols);
    for (int i = 0; i < num_weights; ++i) {
        width += weights[i].rows;
        if (parts == 2 && is_float(weights[i].type)) parts = 1; /* these take x itself */
    }
    int64_t all_rows = parts == 2 ? 2 * rows : rows;
    int64_t num_pieces = tc_num_pieces(weights, num_weights, all_rows, tc_pool_size(pool));
    tc_input in = {x, cols, parts ? scratch : NULL, row_bytes, all_rows, cols};
    float *products = parts == 2 ? (float *)(scratch + all_rows * row_bytes) : y;
    linear arg = {weights, num_weights, in, scratch, num_pieces, width, rows, products, y};
    tc_task tasks[3];
    int count = 0;
    if (parts) tasks[count++] = (tc_task){run_round, &arg, tc_num_rounding_pieces(rows, cols)};
    tasks[count++] = (tc_task){run_multiply, &arg, num_pieces};
    if (parts == 2) tasks[count++] = (tc_task){run_sum, &arg, divide_up(rows * width, SUM_COLS)};
    tc_pool_run(pool, tasks, count);
}
