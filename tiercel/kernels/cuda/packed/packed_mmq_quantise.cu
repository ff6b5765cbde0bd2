// packed_mmq, first kernel: rounds tokens to 8 bits. packed_mmq.cu has the layout of their image.
// Macro: TOKENS (of a tile).
//
// A thread takes 64 columns of a token, two groups of 32: x = d * q with |q| <= 127 and d of 22
// bits, so that 1.5 * 2^23 * d is exact; and d * sum(q) / 32 as two fp16, value and remainder.
#include "packed/packed_ptx.cuh"

extern "C" __global__ void packed_mmq_quantise(const uint4* x,  // (m, blocks * 256) fp16
                                            u8* image,       // see packed_mmq.cu
                                            int m, int blocks) {
  launch_dependents();
  wait_for_inputs();
  // Neighbours are tokens of a tile: what they write is contiguous.
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const int n = (int)(i % TOKENS), pair = (int)(i / TOKENS % (blocks * 4));
  const i64 tile = i / TOKENS / (blocks * 4), token = tile * TOKENS + n;
  if (token >= m) return;
  const int p = pair & 3;
  u8* unit = image + (tile * blocks + pair / 4) * TOKENS * 320;
  const uint4* from = x + (token * blocks * 4 + pair) * 8;
  uint4 v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = from[k];
  u16 near[2], rest[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float f[32], most = 0;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      f[k] = half_to_float(word(v[4 * j + k / 8], k / 2 % 4) >> (k & 1) * 16 & 0xffff);
      most = max_or_nan(most, fabsf(f[k]));
    }
    const float d = __uint_as_float(__float_as_uint(most * (1.f / 127)) & ~3u);
    const float inverse = d > 0 ? 127.f / most : 0.f;
    int sum = 0;
    u32 q[8];  // fragments' order: of lane t the columns 4 t .. and 16 + 4 t ..
#pragma unroll
    for (int k = 0; k < 8; ++k) q[k] = 0;
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const int value = __float2int_rn(f[k] * inverse);
      sum += value;
      q[2 * (k / 4 % 4) + k / 16] |= (value & 0xff) << 8 * (k & 3);
    }
    uint4* to = (uint4*)(unit + ((2 * p + j) * TOKENS + n) * 32);
    to[0] = make_uint4(q[0], q[1], q[2], q[3]), to[1] = make_uint4(q[4], q[5], q[6], q[7]);
    ((float*)(unit + TOKENS * 256))[(2 * p + j) * TOKENS + n] = d;
    const float mean = d * (float)sum * (1.f / 32);
    near[j] = float_to_half(mean);
    rest[j] = float_to_half(mean - half_to_float(near[j]));
  }
  *(uint2*)(unit + TOKENS * 288 + n * 32 + 8 * p) =
      make_uint2(near[0] | (u32)near[1] << 16, rest[0] | (u32)rest[1] << 16);
}
