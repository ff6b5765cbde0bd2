/* Which product a weight and an input take. */
#include "float_products.h"
#include "int8_tiles.h"
#include "native.h"

static int is_plain_float(int32_t type) { return type == TC_F32 || type == TC_F16 || type == TC_BF16; }

void tc_matmul(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
               int64_t ldy) {
    if (w->layout == TC_TILES) {
        if (in->q)
            tc_matmul_tiles_int8(w, first, last, in, y, ldy);
        else
            tc_matmul_tiles_float(w, first, last, in, y, ldy);
    } else if (in->q && !is_plain_float(w->type)) {
        tc_matmul_file_int8(w, first, last, in, y, ldy);
    } else {
        tc_matmul_file_float(w, first, last, in, y, ldy);
    }
}
