/* Columns of a tile (layout TILES, native.h) as floats: 8 rows of each column together. */
#ifndef TIERCEL_FLOAT_TILES_DECODE_H
#define TIERCEL_FLOAT_TILES_DECODE_H

#include "tiles.h"

/* Groups [first, first + count) of a tile: out[32 * count][8]. The floats are those of
 * tc_decode_columns for the file's rows, bit for bit. */
void tc_decode_tile(int32_t type, const uint8_t *tile, int64_t first, int64_t count, float *out);

#endif
