/* Rows of layout FILE as floats. */
#include "decode.h"
#include "float_bytes.h"

static void widen(int32_t type, int64_t bytes, const uint8_t *row, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + TC_LANES <= count; i += TC_LANES) vf_store(out + i, tc_load_floats(type, row + i * bytes));
    if (i == count) return;
    float last[TC_LANES];
    vf_store(last, tc_load_some_floats(type, row + i * bytes, count - i));
    memcpy(out + i, last, (size_t)(count - i) * sizeof *out);
}

static void widen_columns(int32_t type, const uint8_t *row, int64_t first, int64_t count, float *out) {
    switch (type) {
    case TC_F32: memcpy(out, row + 4 * first, (size_t)count * 4); break;
    case TC_F16: widen(TC_F16, 2, row + 2 * first, count, out); break;
    default: widen(TC_BF16, 2, row + 2 * first, count, out);
    }
}

void tc_decode_columns(const tc_format *format, const uint8_t *row, int64_t first, int64_t count,
                       float *out) {
    if (!format->codes) {
        widen_columns(format->type, row, first, count, out);
        return;
    }
    for (int64_t group = first / TC_GROUP; group < (first + count) / TC_GROUP; ++group) {
        tc_codes codes;
        tc_decode_codes(format, row, group, &codes);
        for (int i = 0; i < TC_GROUP; i += TC_LANES, out += TC_LANES) {
            vf scaled = vf_mul(vf_set(codes.d[i / 16]), vf_from_i8(codes.q + i));
            vf_store(out, vf_add(scaled, vf_set(codes.m[i / 16])));
        }
    }
}

typedef struct {
    const tc_weight *file;
    const tc_format *format;
    const int32_t *row_ids;
    int64_t num_rows, piece_rows;
    float *out;
} rows_task;

static void decode_piece(const void *arg, int64_t piece, int worker) {
    (void)worker;
    const rows_task *task = arg;
    const tc_weight *file = task->file;
    int64_t last = (piece + 1) * task->piece_rows;
    if (last > task->num_rows) last = task->num_rows;
    for (int64_t i = piece * task->piece_rows; i < last; ++i) {
        const uint8_t *row = file->data + (task->row_ids ? task->row_ids[i] : i) * file->row_bytes;
        tc_decode_columns(task->format, row, 0, file->cols, task->out + i * file->cols);
    }
}

int tc_dequantize(tc_pool *pool, const tc_weight *file, const int32_t *row_ids, int64_t num_rows,
                  float *out) {
    const tc_format *format = tc_find_format(file->type);
    if (!format) return -1;
    for (int64_t i = 0; row_ids && i < num_rows; ++i)
        if (row_ids[i] < 0 || row_ids[i] >= file->rows) return -1;
    int64_t piece_rows = file->cols < 4096 ? 4096 / (file->cols + 1) + 1 : 1; /* some microseconds */
    rows_task arg = {file, format, row_ids, num_rows, piece_rows, out};
    tc_task task = {decode_piece, &arg, (num_rows + piece_rows - 1) / piece_rows};
    if (num_rows) tc_pool_run(pool, &task, 1);
    return 0;
}

int tc_is_supported(int32_t type) { return tc_find_format(type) != NULL; }
