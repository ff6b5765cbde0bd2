/* Products of tiles with activations of 8 bits. */
#ifndef TIERCEL_INT8_TILES_H
#define TIERCEL_INT8_TILES_H

#include "native.h"

/* `tc_matmul` of a weight in layout TILES and an input with `q`. */
void tc_matmul_tiles_int8(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy);

#endif
