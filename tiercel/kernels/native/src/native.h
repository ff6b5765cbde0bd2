/* What the files of the library share: weights, activations, tasks of the thread pool.
 *
 * All floats between operators are float32, rows contiguous. Sums of a result go over the columns
 * in one order that does not depend on how many rows share a call, on the number of threads or on
 * the variant, so a token's result has the same bits alone and beside others.
 *
 * Weights of a matrix (rows = out_features, cols = in_features) are in one of two layouts:
 *
 * FILE   rows as a GGUF file stores them.
 *
 * TILES  8 rows are a tile, the last filled up with zeros; tile after tile, and in a tile record
 *        after record along the columns. A record is one group of 32 columns, or for K types a
 *        header and 8 groups. With (row r of the tile, column c of the group):
 *          codes4   4 vectors of 32 bytes: byte 4 * r + j of vector v has column 4 * v + j in bits
 *                   0..3 and column 16 + 4 * v + j in bits 4..7
 *          codes8   8 vectors of 32 bytes: byte 4 * r + j of vector v is column 4 * v + j, signed
 *          bit5     32 bytes: bit s of byte 4 * r + j is bit 4 of column 4 * s + j
 *          bits56   2 vectors of 32 bytes: bits 2 * i and 2 * i + 1 of byte 4 * r + j of vector h
 *                   are bits 4 and 5 of column 16 * h + 4 * i + j
 *        Records:
 *          Q4_0    d f16[8], codes4                                   w = d * (q - 8)
 *          Q4_1    d f16[8], m f16[8], codes4                         w = d * q + m
 *          Q5_0    d f16[8], bit5, codes4                             w = d * (q - 16)
 *          Q5_1    d f16[8], m f16[8], bit5, codes4                   w = d * q + m
 *          Q8_0    d f16[8], codes8                                   w = d * q
 *          IQ4_NL  d f16[8], codes4                                   w = d * table[q]
 *          Q4_K    d f16[8], dmin f16[8], then 8 groups of            w = d * sc * q - dmin * mn
 *                  sc u8[8], mn u8[8], codes4
 *          Q5_K    d f16[8], dmin f16[8], then 8 groups of            likewise
 *                  sc u8[8], mn u8[8], bit5, codes4
 *          Q6_K    d f16[8], then 8 groups of                         w = d * sc[h] * (q - 32)
 *                  sc i8[2][8] of columns 0..15, 16..31; bits56, codes4
 *          IQ4_XS  d f16[8], then 8 groups of sc i8[8], codes4        w = d * sc * table[q]
 *
 * Activations rounded to 8 bits: groups of 32 columns, d = max|x| / 127, q = round(x / d) to even
 * (0 where d is 0). A row of `cols` (a multiple of 32) is, back to back,
 *          int8 q[cols]; float d[cols / 32]; float ds[cols / 32], d * sum of the group's q;
 *          int16 sum[cols / 16] of the q of each half group
 * filled up to a multiple of 64 bytes (`tc_rounded_bytes`).
 */
#ifndef TIERCEL_NATIVE_H
#define TIERCEL_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TC_EXPORT __declspec(dllexport)
#else
#define TC_EXPORT __attribute__((visibility("default")))
#endif

/* ---- cpu.c ---- */

enum { TC_ABI_VERSION = 1 }; /* abi.ABI_VERSION: changes with any structure or signature of abi.py */
/* AVX2 stands for AVX2, FMA, F16C and BMI2; AVX512 for F, VL, BW, DQ and VNNI; NEON for products of
 * 8-bit integers and float16 arithmetic. */
enum { TC_CPU_AVX2 = 1, TC_CPU_AVX512 = 2, TC_CPU_NEON = 4, TC_CPU_I8MM = 8 };

TC_EXPORT int tc_abi_version(void);
/* What both the processor and the operating system support, of TC_CPU_*. */
TC_EXPORT int tc_cpu_features(void);

/* ---- pool.c ---- */

/* One piece of a task. `worker` is 0 .. number of threads - 1, of the thread that runs it. */
typedef void (*tc_task_fn)(const void *arg, int64_t piece, int worker);

typedef struct {
    tc_task_fn fn;
    const void *arg;
    int64_t num_pieces;
} tc_task;

typedef struct tc_pool tc_pool;

/* Threads beside the caller's are made at the first run. Returns NULL without memory. */
TC_EXPORT tc_pool *tc_pool_create(int num_threads);
TC_EXPORT void tc_pool_destroy(tc_pool *pool);
TC_EXPORT int tc_pool_size(const tc_pool *pool);
/* Runs the tasks in order: a task's pieces run in any order on any threads, after all pieces of the
 * task before it. Returns when the last is done. A task may have no pieces; at most 2^30 - 1. Threads
 * that call together take turns; a piece must not call. Works in a child process after fork. */
void tc_pool_run(tc_pool *pool, const tc_task *tasks, int num_tasks);

/* ---- weights ---- */

enum { TC_F32 = 0, TC_F16 = 1, TC_BF16 = 30 }; /* GGML ids, of weights and of caches */
enum { TC_FILE = 0, TC_TILES = 1 };
enum { TC_TILE_ROWS = 8, TC_GROUP = 32 };

typedef struct {
    const uint8_t *data;
    int64_t rows, cols;
    int64_t row_bytes; /* FILE: from a row to the next */
    int32_t type;      /* GGML id */
    int32_t layout;
} tc_weight;

/* Bytes of a matrix in layout TILES; 0 for a type or shape that has none and stays FILE. */
TC_EXPORT int64_t tc_tiles_bytes(int32_t type, int64_t rows, int64_t cols);
/* From rows of a file to tiles. */
TC_EXPORT void tc_pack_tiles(tc_pool *pool, const tc_weight *file, uint8_t *tiles);
/* Rows of a FILE matrix as floats: out (num_rows, cols). row_ids NULL: the first num_rows rows. 0, or -1
 * for an unknown type or a row that does not exist. */
TC_EXPORT int tc_dequantize(tc_pool *pool, const tc_weight *file, const int32_t *row_ids,
                            int64_t num_rows, float *out);
/* Whether `tc_matmul` takes a type. */
TC_EXPORT int tc_is_supported(int32_t type);

/* ---- products ---- */

/* The rows of a product's input, as floats and, if `q` is not NULL, rounded to 8 bits. Plain float
 * weights take the floats in any case. */
typedef struct {
    const float *x;
    int64_t ldx; /* floats from a row to the next */
    const uint8_t *q;
    int64_t q_bytes; /* from a row to the next */
    int64_t rows, cols;
} tc_input;

TC_EXPORT int64_t tc_rounded_bytes(int64_t cols);
/* Rounds columns [first, first + count) of one row, multiples of 32; x points to column first. */
void tc_round_row(const float *x, int64_t first, int64_t count, int64_t cols, uint8_t *row);

/* y[t * ldy + r - first] = sum over columns of w[r] * x[t], for first <= r < last and every row t
 * of the input. `first` is a multiple of 8. Runs on the calling thread, allocates nothing. */
void tc_matmul(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
               int64_t ldy);

/* x (rows, cols) through matrices end to end, y (rows, sum of their rows), as one call of the pool.
 * parts: 0 multiplies floats; 1 rounds x to 8 bits; 2 adds the product of what that leaves of x,
 * rounded likewise: 15 bits, for matrices whose bytes cost more than their products. scratch:
 * tc_linear_scratch(rows, cols, sum of rows, parts) bytes. */
TC_EXPORT int64_t tc_linear_scratch(int64_t rows, int64_t cols, int64_t width, int parts);
TC_EXPORT void tc_linear(tc_pool *pool, const tc_weight *weights, int num_weights, const float *x,
                         int64_t rows, int parts, uint8_t *scratch, float *y);

/* ---- rows.c: norms and activations of one row ---- */

/* x += update, or norm(update) * update_weight if that is not NULL; out = norm(x) * weight, with
 * norm(v) = v / sqrt(mean(v^2) + eps). update may be NULL. */
void tc_norm_row(float *x, const float *update, const float *update_weight, const float *weight,
                 float eps, int64_t cols, float *out);

enum { TC_SILU = 0, TC_GELU_TANH = 1 };
void tc_act_mul_row(const float *gate, const float *up, int activation, int64_t cols, float *out);
/* 1 / sqrt(mean(x^2) + eps) */
float tc_inverse_rms(const float *x, int64_t cols, float eps);

/* The same for rows end to end; x (rows, 2 * cols) of the activation holds a row's gate, then up. */
TC_EXPORT void tc_norm_rows(tc_pool *pool, float *x, const float *update, const float *update_weight,
                            const float *weight, float eps, int64_t rows, int64_t cols, float *out);
TC_EXPORT void tc_act_mul_rows(tc_pool *pool, const float *x, int activation, int64_t rows,
                               int64_t cols, float *out);

/* ---- attention.c ---- */

/* Attention of one layer for all tokens of a step, from the projection to the heads' results.
 * Semantics: ops/rotary_kv_write.py, decode_attention.py and prefill_attention.py. */
typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, half; /* half: rotating pairs (i, i + half) */
    int32_t window;                                  /* 0: none */
    float scale;
    float eps;
    const float *q_norm, *k_norm; /* (head_dim), or NULL */
    const float *rope;            /* (positions, 2, half), cos and sin */
    void *k_cache, *v_cache;      /* (num_blocks, block_size, num_kv_heads, head_dim) */
    int32_t cache_type;           /* TC_F32, TC_F16, TC_BF16 */
    int32_t block_size;
    int32_t num_reqs, num_tokens;
    const int32_t *tables; /* (S, max_blocks) block ids of the layer's group, read through rows */
    int64_t max_blocks;
    const int32_t *rows;       /* (num_reqs) */
    const int32_t *starts;     /* (num_reqs + 1) first token of each request */
    const int32_t *seq_lens;   /* (num_reqs) cached tokens with those of this step, without items */
    const int32_t *positions;  /* (num_tokens) of the rotation; with items, the first of a request
                                  is also its index in the sequence */
    const int64_t *slots;      /* (num_tokens), -1 writes nothing */
    const int32_t *prefix_len; /* (num_reqs) tokens before a request's items; NULL: no items */
    const int32_t *item_start; /* (num_tokens) of an item token, the index of its item's start */
    float *heads;              /* (num_tokens, num_heads + 2 * num_kv_heads, head_dim), mutated */
    float *out;                /* (num_tokens, num_heads * head_dim) */
    float *scratch;            /* tc_attention_scratch(...) floats of this step, aligned to
                                  8 bytes, better to 64 */
} tc_attention;

enum { TC_ATTENTION_TASKS = 3 };
TC_EXPORT int64_t tc_attention_scratch(const tc_attention *a, int num_threads);
/* Writes at most TC_ATTENTION_TASKS tasks that compute `out`; returns their number. `a` must live
 * until they have run. */
int tc_attention_tasks(const tc_attention *a, int num_threads, tc_task *tasks);
TC_EXPORT void tc_attention_run(tc_pool *pool, const tc_attention *a);

/* ---- step.c: layers of a dense decoder ---- */

/* One layer: norm, attention, norm, gated MLP. A norm first adds the update of the part before it to
 * the residual, normed itself where `*_update_norm` is not NULL (models/decoder.py). */
typedef struct {
    const float *attn_norm, *attn_update_norm;
    const float *mlp_norm, *mlp_update_norm;
    const tc_weight *qkv, *output, *gate_up, *down; /* matrices that share an input, end to end */
    const float *qkv_bias, *output_bias;            /* of all rows, or NULL */
    int32_t num_qkv, num_output, num_gate_up, num_down;
    int32_t group; /* of block tables and slots */
    int32_t window;
    const float *q_norm, *k_norm, *rope;
    void *k_cache, *v_cache;
} tc_layer;

typedef struct {
    const tc_layer *layers;
    int32_t num_layers;
    int32_t hidden, intermediate; /* columns of the residual, rows of gate and of up */
    int32_t num_heads, num_kv_heads, head_dim, half;
    int32_t activation;
    int32_t cache_type, block_size;
    int32_t rounds; /* whether inputs of products are rounded to 8 bits */
    float eps, scale;
    const float *last_update_norm; /* of the update of the last layer, or NULL */
} tc_decoder;

/* The tokens of a step; see tc_attention. */
typedef struct {
    int32_t num_reqs, num_tokens;
    const int32_t *rows, *starts, *seq_lens, *positions;
    const int64_t *slots;  /* (groups, num_tokens) */
    const int32_t *tables; /* (groups, table_rows, max_blocks) */
    int64_t table_rows, max_blocks;
    const int32_t *prefix_len, *item_start;
    float *x;         /* (num_tokens, hidden), the residual, mutated */
    uint8_t *scratch; /* tc_step_scratch(...) bytes; keeps what one call leaves to the next */
} tc_step;

TC_EXPORT int64_t tc_step_scratch(const tc_decoder *decoder, const tc_step *step, int num_threads);
/* Runs layers first .. last - 1 for all tokens, one call of the pool. The update of a layer is added
 * by the next one, by `x += update` after the last of all. */
TC_EXPORT void tc_run_layers(tc_pool *pool, const tc_decoder *decoder, const tc_step *step,
                             int32_t first, int32_t last);

#endif
