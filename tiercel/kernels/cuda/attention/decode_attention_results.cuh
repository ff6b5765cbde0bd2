// Where decode_attention writes a result: to rows, or to the image of tokens that packed_gemm reads
// (packed_places.cuh). Macros: D, IMAGE (order of the image's columns; 0: rows of 16 bits).
#pragma once

#include "include/types.cuh"
#if IMAGE
#include "packed/packed_columns.cuh"
#endif

struct Result {  // of a token and head, from a column on
#if IMAGE
  u16* matrix;      // of the token's tile: the first of (heads * D / 256, 4, tile, 64)
  int tile, token;  // tokens of a tile; in it
  int first;
  DEV u16* at(int c, int c2 = 0, int c3 = 0) const {  // of their sum
    const int column = first + c + c2 + c3;
    const ColumnPlace to = place_of<IMAGE>(column & 255);
    const int piece = (2 * (to.step & 3) + (column & 1)) ^ (token & 7);
    return matrix + (((column >> 8) * 4 + (to.step >> 2)) * tile + token) * 64 + 8 * piece +
           2 * to.lane + (column >> 1 & 1);
  }
#else
  u16* columns;
  DEV u16* at(int c, int c2 = 0, int c3 = 0) const { return columns + c + c2 + c3; }
#endif
};
struct Results {
  u16* out;  // (tokens * heads, D), or (tiles, heads * D / 256, 4, tile, 64)
#if IMAGE
  int heads, tile;
  DEV Result of(int row, int first) const {
    const int token = row / heads, head = row - token * heads;
    return {out + (i64)(token / tile) * heads * D * tile, tile, token % tile, head * D + first};
  }
#else
  DEV Result of(int row, int first) const { return {out + (i64)row * D + first}; }
#endif
};
