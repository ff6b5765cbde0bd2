// The image of tokens that packed_gemm.cu copies to shared memory: for each tile of tokens and each
// unit of 256 columns four matrices of TOKENS rows x 64 columns in the 128-byte swizzle of wgmma,
// 16-byte piece c of row n at piece c ^ (n % 8). Macro: TOKENS.
//
// Columns are in an order of the weights' fragments: lane t of step s multiplies four neighbouring
// columns of a unit, at the places 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of the step. Orders:
//   4   Q4_K: s = 2 (4 j + k) + high: from column 64 t + 32 high + 16 j + 4 k
//   6   Q6_K: s = 4 k + i: from 128 (t / 2) + 16 (t % 2) + 32 i + 4 k
//   32  types with a scale for 32 columns: s = 2 j + half: from 32 j + 16 half + 4 t
#pragma once

#include "include/types.cuh"

template <int OF> DEV int column_of(int s, int t) {
  return OF == 4   ? 64 * t + 32 * (s & 1) + 4 * (s >> 1)
         : OF == 6 ? 128 * (t >> 1) + 16 * (t & 1) + 32 * (s & 3) + 4 * (s >> 2)
                     : 16 * s + 4 * t;
}
struct Place { int step, lane; };
template <int OF> DEV Place place_of(int column) {  // the inverse
  if constexpr (OF == 4)
    return {(column >> 5 & 1) | (column >> 2 & 7) << 1, column >> 6};
  else if constexpr (OF == 6)
    return {(column >> 5 & 3) | (column >> 2 & 3) << 2, (column >> 7) * 2 + (column >> 4 & 1)};
  else
    return {column >> 4, column >> 2 & 3};
}
// Write a step of token n of a tile; v are the columns of lanes 0 .. 3.
DEV void store_step(uint4* image, i64 unit, int s, int n, const uint2 (&v)[4]) {
  u32 even[4], odd[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    even[t] = __byte_perm(v[t].x, v[t].y, 0x5410);  // columns 0 and 2 of the four
    odd[t] = __byte_perm(v[t].x, v[t].y, 0x7632);
  }
  uint4* row = image + (unit * 4 + (s >> 2)) * TOKENS * 8 + n * 8;
  const int piece = 2 * (s & 3);
  row[piece ^ (n & 7)] = make_uint4(even[0], even[1], even[2], even[3]);
  row[(piece + 1) ^ (n & 7)] = make_uint4(odd[0], odd[1], odd[2], odd[3]);
}
