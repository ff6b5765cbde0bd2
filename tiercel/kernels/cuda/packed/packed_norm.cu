// packed_norm: x += update, then x / rms(x) * weight as images for packed_gemm.cu (packed_places.cuh),
// each in its order of columns. A CTA has a token, a thread 16 columns and a step of each image.
// Macros: COLS (columns), TOKENS (of a tile), ORDER, SECOND (of columns; 0: no second image),
// HAS_UPDATE.
#include "packed/packed_places.cuh"
#include "packed/packed_ptx.cuh"

constexpr int UNITS = COLS / 256, WIDTH = COLS / 16;  // threads
constexpr u32 SUMS = COLS * 2;  // behind the normed row

DEV float add_up(u32 sums, float mine, int tid) {  // of all threads, in a fixed order
#pragma unroll
  for (int step = 16; step; step >>= 1) mine += __shfl_xor_sync(~0u, mine, step);
  if (tid % 32 == 0) store_shared<u32>(sums + tid / 32 * 4, __float_as_uint(mine));
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < (WIDTH + 31) / 32; ++i) total += load_shared<float>(sums + 4 * i);
  return total;
}
template <int OF> DEV void write_image(uint4* image, u32 row, int token, int tid) {
  const int s = tid & 15, unit = tid >> 4;
  uint2 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) v[t] = load_shared<uint2>(row + 2 * (unit * 256 + column_of<OF>(s, t)));
  store_step(image, (i64)(token / TOKENS) * UNITS + unit, s, token % TOKENS, v);
}

extern "C" __global__ void __launch_bounds__((WIDTH + 31) / 32 * 32) packed_norm(
    float4* x,             // (m, WIDTH * 16), the sum is written there
    const uint4* update,   // of the same shape, fp16; HAS_UPDATE
    const float4* weight,  // (WIDTH * 16,)
    uint4* image, uint4* second,
    float* roots,  // (m,), what rows are multiplied by before the weight
    int m, float eps) {
  SHARED_MEMORY(memory);
  const int tid = threadIdx.x, token = blockIdx.x;
  const u32 row = shared_address(memory);
  launch_dependents();
  float v[16] = {}, factors[16] = {};
  if (tid < WIDTH) {  // from cold memory, so before the wait
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = weight[4 * tid + i];
      factors[4 * i] = four.x, factors[4 * i + 1] = four.y;
      factors[4 * i + 2] = four.z, factors[4 * i + 3] = four.w;
    }
  }
  wait_for_inputs();
  float squares = 0;
  if (token < m && tid < WIDTH) {
    float4* place = x + ((i64)token * WIDTH + tid) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = place[i];
      v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
#if HAS_UPDATE
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 more = update[((i64)token * WIDTH + tid) * 2 + i];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        v[8 * i + k] += half_to_float(word(more, k / 2) >> (k & 1) * 16 & 0xffff);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      place[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
#endif
#pragma unroll
    for (int k = 0; k < 16; ++k) squares = fmaf(v[k], v[k], squares);
  }
  const float scale = rsqrtf(add_up(row + SUMS, squares, tid) * (1.f / (16 * WIDTH)) + eps);
  if (tid == 0 && token < m) roots[token] = scale;
  if (tid < WIDTH) {
    u32 pairs[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const u32 low = float_to_half(v[2 * k] * scale * factors[2 * k]);
      pairs[k] = low | (u32)float_to_half(v[2 * k + 1] * scale * factors[2 * k + 1]) << 16;
    }
    store_shared(row + 32 * tid, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    store_shared(row + 32 * tid + 16, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
  }
  __syncthreads();
  if (tid >= WIDTH) return;
  write_image<ORDER>(image, row, token, tid);
#if SECOND
  write_image<SECOND>(second, row, token, tid);
#endif
}
