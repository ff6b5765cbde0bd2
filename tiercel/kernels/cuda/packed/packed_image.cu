// packed_gemm, first kernel: activations in the layout that packed_gemm.cu copies to shared memory.
// Macros: QTYPE (4: Q4_K, 6: Q6_K), TOKENS (of a tile).
//
// The image of a tile is, for each unit of 256 columns, four matrices of TOKENS rows x 64 columns
// in the 128-byte swizzle of wgmma: 16-byte piece c of row n is at piece c ^ (n % 8). Columns are
// permuted so that a lane of the weights' fragments finds its own: step s of 16 columns takes from
// lane t the columns c0 .. c0 + 3 of the weights (packed_units.cuh says which bytes a lane holds),
// at the places 2 t, 2 t + 8, 2 t + 1, 2 t + 9:
//   Q4_K  s = 2 (4 j + k) + high: c0 = 64 t + 32 high + 16 j + 4 k
//   Q6_K  s = 4 k + i: c0 = 128 (t / 2) + 16 (t % 2) + 32 i + 4 k
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
      const int c0 = QTYPE == 4 ? 64 * t + 32 * (s & 1) + 4 * (s >> 1)
                                : 128 * (t >> 1) + 16 * (t & 1) + 32 * (s & 3) + 4 * (s >> 2);
      v[t] = x[((i64)token * units + unit) * 64 + c0 / 4];
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
