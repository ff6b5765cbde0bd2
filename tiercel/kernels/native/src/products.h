/* A product with matrices end to end, cut into pieces for the threads of a pool. */
#ifndef TIERCEL_PRODUCTS_H
#define TIERCEL_PRODUCTS_H

#include "native.h"

/* All weights have the input's columns. The cut changes no result. */
int64_t tc_num_pieces(const tc_weight *weights, int num_weights, int64_t rows_of_input, int num_threads);
/* y (rows of the input, sum of the weights' rows), ldy floats from a row to the next; bias of all
 * rows, or NULL. */
void tc_multiply_piece(const tc_weight *weights, int num_weights, const float *bias, const tc_input *in,
                       int64_t piece, int64_t num_pieces, float *y, int64_t ldy);

/* Rounding of an input, cut likewise: `rows` rows of floats, ldx apart, to in->q. */
int64_t tc_num_rounding_pieces(int64_t rows, int64_t cols);
void tc_round_piece(const tc_input *in, int64_t piece, uint8_t *q);

#endif
