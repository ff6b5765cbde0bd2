/* Norms and gated activations of rows.
 *
 * A sum over a row is made of blocks of 512 columns in float32, whose sums are added in float64: the
 * mean square of 16384 columns keeps about 1e-7 of relative accuracy. */
#include "native.h"
#include "simd.h"

enum { BLOCK = 512 };

/* x[at], ..., with zeros after the last column. */
static inline vf load_cols(const float *x, int64_t at, int64_t cols) {
    return at + TC_LANES <= cols ? vf_load(x + at) : vf_load_first(x + at, cols - at);
}

static inline void store_cols(float *x, int64_t at, int64_t cols, vf value) {
    if (at + TC_LANES <= cols) {
        vf_store(x + at, value);
    } else {
        vf_store_first(x + at, value, cols - at);
    }
}

static float sum_squares_of_block(const float *x, int64_t cols) {
    vf sums[4] = {vf_set(0), vf_set(0), vf_set(0), vf_set(0)};
    int64_t at = 0;
    for (; at + 4 * TC_LANES <= cols; at += 4 * TC_LANES) {
        for (int i = 0; i < 4; ++i) {
            vf value = vf_load(x + at + i * TC_LANES);
            sums[i] = vf_fma(value, value, sums[i]);
        }
    }
    for (; at < cols; at += TC_LANES) {
        vf value = load_cols(x, at, cols);
        sums[0] = vf_fma(value, value, sums[0]);
    }
    return vf_sum(vf_add(vf_add(sums[0], sums[1]), vf_add(sums[2], sums[3])));
}

float tc_inverse_rms(const float *x, int64_t cols, float eps) {
    double sum = 0;
    for (int64_t at = 0; at < cols; at += BLOCK)
        sum += sum_squares_of_block(x + at, cols - at < BLOCK ? cols - at : BLOCK);
    return (float)(1 / sqrt(sum / (double)cols + eps));
}

void tc_norm_row(float *x, const float *update, const float *update_weight, const float *weight,
                 float eps, int64_t cols, float *out) {
    vf scale = vf_set(update_weight ? tc_inverse_rms(update, cols, eps) : 1);
    for (int64_t at = 0; update && at < cols; at += TC_LANES) {
        vf change = load_cols(update, at, cols);
        if (update_weight) change = vf_mul(vf_mul(change, scale), load_cols(update_weight, at, cols));
        store_cols(x, at, cols, vf_add(load_cols(x, at, cols), change));
    }
    scale = vf_set(tc_inverse_rms(x, cols, eps));
    for (int64_t at = 0; at < cols; at += TC_LANES) {
        vf value = vf_mul(load_cols(x, at, cols), scale);
        store_cols(out, at, cols, vf_mul(value, load_cols(weight, at, cols)));
    }
}

/* gate / (1 + e^-z). The exponential is clamped, so a gate far below zero has to be, too. */
static inline vf gated(vf gate, vf z) {
    vf divisor = vf_add(vf_set(1), vf_exp(vf_sub(vf_set(0), z)));
    return vf_div(vf_max(vf_set(-88), gate), divisor);
}

static inline vf silu(vf gate) { return gated(gate, gate); }

/* (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), with u = sqrt(2 / pi) (gate + 0.044715 gate^3) */
static inline vf gelu_tanh(vf gate) {
    vf factor = vf_fma(vf_mul(gate, gate), vf_set(0.044715f), vf_set(1));
    return gated(gate, vf_mul(vf_mul(gate, vf_set(1.5957691216f)), factor));
}

void tc_act_mul_row(const float *gate, const float *up, int activation, int64_t cols, float *out) {
    for (int64_t at = 0; at < cols; at += TC_LANES) {
        vf value = load_cols(gate, at, cols);
        value = activation == TC_SILU ? silu(value) : gelu_tanh(value);
        store_cols(out, at, cols, vf_mul(value, load_cols(up, at, cols)));
    }
}

/* ---- rows as tasks ---- */

typedef struct {
    float *x;
    const float *update, *update_weight, *weight;
    float eps;
    int64_t cols;
    float *out;
} norm_args;

static void norm_piece(const void *arg, int64_t row, int worker) {
    const norm_args *a = arg;
    int64_t at = row * a->cols;
    (void)worker;
    tc_norm_row(a->x + at, a->update ? a->update + at : NULL, a->update_weight, a->weight, a->eps, a->cols,
                a->out + at);
}

void tc_norm_rows(tc_pool *pool, float *x, const float *update, const float *update_weight,
                  const float *weight, float eps, int64_t rows, int64_t cols, float *out) {
    norm_args args = {x, update, update_weight, weight, eps, cols, out};
    tc_task task = {norm_piece, &args, rows};
    tc_pool_run(pool, &task, 1);
}

typedef struct {
    const float *x;
    int activation;
    int64_t cols;
    float *out;
} act_args;

static void act_piece(const void *arg, int64_t row, int worker) {
    const act_args *a = arg;
    const float *gate = a->x + row * 2 * a->cols;
    (void)worker;
    tc_act_mul_row(gate, gate + a->cols, a->activation, a->cols, a->out + row * a->cols);
}

void tc_act_mul_rows(tc_pool *pool, const float *x, int activation, int64_t rows, int64_t cols, float *out) {
    act_args args = {x, activation, cols, out};
    tc_task task = {act_piece, &args, rows};
    tc_pool_run(pool, &task, 1);
}
