// packed_gemm, first kernel: activations in the layout that packed_gemm.cu copies to shared memory.
// Macros: QTYPE (UnitType.code of packed_types.py), TOKENS (of a tile).
//
// The image of a tile is, for each unit of 256 columns, four matrices of TOKENS rows x 64 columns
// in the 128-byte swizzle of wgmma: 16-byte piece c of row n is at piece c ^ (n % 8). Columns are in
// the order of packed_places.cuh.
#include "packed/packed_places.cuh"
#include "packed/packed_ptx.cuh"

extern "C" __global__ void __launch_bounds__(256) packed_image(
    const uint2* x,  // (m, units * 256) fp16, contiguous
    uint4* image,    // (tiles, units, 4, TOKENS, 8 pieces)
    int m, int units) {
  launch_next();
  wait_for_inputs();
  const int id = blockIdx.x * 256 + threadIdx.x;  // step, then unit, then token
  const int s = id & 15, unit = (id >> 4) % units, token = (id >> 4) / units;
  const int tile = token / TOKENS, n = token % TOKENS;
  if (tile * TOKENS >= m) return;
  uint2 v[4] = {};
  if (token < m) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      v[t] = x[((i64)token * units + unit) * 64 + column_of<QTYPE>(s, t) / 4];
    }
  }
  u32 even[4], odd[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    even[t] = __byte_perm(v[t].x, v[t].y, 0x5410);  // columns 0 and 2 of the four
    odd[t] = __byte_perm(v[t].x, v[t].y, 0x7632);
  }
  uint4* row = image + (((i64)tile * units + unit) * 4 + (s >> 2)) * TOKENS * 8 + n * 8;
  const int piece = 2 * (s & 3);
  row[piece ^ (n & 7)] = make_uint4(even[0], even[1], even[2], even[3]);
  row[(piece + 1) ^ (n & 7)] = make_uint4(odd[0], odd[1], odd[2], odd[3]);
}
