// packed_gemm, first kernel: the image of tokens (packed_places.cuh). Macros: ORDER (of columns), TOKENS
// (of a tile).
#include "packed/packed_places.cuh"
#include "packed/packed_ptx.cuh"

extern "C" __global__ void __launch_bounds__(256) packed_image(
    const uint2* x,  // (m, units * 256) fp16, contiguous
    uint4* image,    // (tiles, units, 4, TOKENS, 8 pieces)
    int m, int units) {
  launch_dependents();
  wait_for_inputs();
  const int id = blockIdx.x * 256 + threadIdx.x;  // step, then unit, then token
  const int s = id & 15, unit = (id >> 4) % units, token = (id >> 4) / units;
  const int tile = token / TOKENS;
  if (tile * TOKENS >= m) return;
  uint2 v[4] = {};
  if (token < m) {
#pragma unroll
    for (int t = 0; t < 4; ++t)
      v[t] = x[((i64)token * units + unit) * 64 + column_of<ORDER>(s, t) / 4];
  }
  store_step(image, (i64)tile * units + unit, s, token % TOKENS, v);
}
