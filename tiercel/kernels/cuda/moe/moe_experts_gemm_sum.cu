// moe_experts_gemm_sum: the slots of a token, in their order. Macros: COLS, TOPK, OUT (0 fp16, 1
// bf16, 2 float32).
#include "moe/moe_experts_ptx.cuh"

#define SUM_THREADS 256

extern "C" __global__ void __launch_bounds__(SUM_THREADS) moe_experts_gemm_sum(
    const float* y,       // (num_tokens, TOPK, COLS)
    const uint2* places,  // of moe_experts_gemm_table
    u8* out) {            // (num_tokens, COLS)
  wait_for_inputs();
  launch_dependents();
  const int column = 4 * (blockIdx.y * SUM_THREADS + threadIdx.x);
  if (column >= COLS) return;
  const float* from = y + (i64)blockIdx.x * TOPK * COLS + column;
  float4 v[TOPK];
#pragma unroll
  for (int k = 0; k < TOPK; ++k) {
    v[k] = make_float4(0, 0, 0, 0);  // of another rank's expert
    if (places[(i64)blockIdx.x * TOPK + k].y) v[k] = __ldcg((const float4*)(from + (i64)k * COLS));
  }
  float4 sum = v[0];
#pragma unroll
  for (int k = 1; k < TOPK; ++k)
    sum = make_float4(sum.x + v[k].x, sum.y + v[k].y, sum.z + v[k].z, sum.w + v[k].w);
  const i64 at = (i64)blockIdx.x * COLS + column;
#if OUT == 0
  *(uint2*)(out + 2 * at) = make_uint2(pack_fp16(sum.x, sum.y), pack_fp16(sum.z, sum.w));
#elif OUT == 1
  *(uint2*)(out + 2 * at) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
#else
  *(float4*)(out + 4 * at) = sum;
#endif
}
