/* Products of which tc_matmul (native.h) chooses one. All have its meaning and take any number of
 * rows of input; the result's bits do not depend on that number. */
#ifndef TIERCEL_FLOAT_PRODUCTS_H
#define TIERCEL_FLOAT_PRODUCTS_H

#include "native.h"

/* Layout FILE, any type, float activations. */
void tc_matmul_file_float(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy);
/* Layout TILES, float activations. */
void tc_matmul_tiles_float(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                           int64_t ldy);
/* Layout FILE, quantised types, activations rounded to 8 bits. */
void tc_matmul_file_int8(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                         int64_t ldy);

#endif
