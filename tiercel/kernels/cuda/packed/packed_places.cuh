// The image of tokens that packed_gemm.cu copies to shared memory: for each tile of tokens and each
// unit of 256 columns four matrices of TOKENS rows x 64 columns in the 128-byte swizzle of wgmma,
// 16-byte piece c of row n at piece c ^ (n % 8), columns in the order of packed_columns.cuh. Macro: TOKENS.
#pragma once

#include "packed/packed_columns.cuh"

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
