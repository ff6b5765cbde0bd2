// moe_experts_gemm_image: the tokens' columns as products read them, a copy for each of a token's
// pairs in its tile. A CTA is a token. Macros: KIND (WholeOf), COLS, TOPK.
#include "moe/moe_experts_gemm_units.cuh"

constexpr int UNITS = (COLS + 255) / 256;
#define IMAGE_THREADS 256
typedef WholeOf<KIND> Unit;

extern "C" __global__ void __launch_bounds__(IMAGE_THREADS) moe_experts_gemm_image(
    const u8* x,          // (num_tokens, COLS) bf16
    const uint2* places,  // of moe_experts_gemm_table, (num_tokens * TOPK,)
    u8* image) {
  __shared__ __align__(16) u8 row[UNITS * 512];
  const int tid = threadIdx.x;
  wait_for_inputs();
  launch_dependents();
  x += (i64)blockIdx.x * COLS * 2, places += (i64)blockIdx.x * TOPK;
  for (int i = tid; i < UNITS * 32; i += IMAGE_THREADS) {
    u32 pairs[4];
    Unit::split(pairs, 8 * i < COLS ? load_fresh(x + 16 * i) : make_uint4(0, 0, 0, 0));
    const Place at = Unit::place(8 * i & 255);
#pragma unroll
    for (int p = 0; p < 4; ++p)
      *(u32*)(row + (i >> 5) * 512 + 16 * pair_chunk<Unit>(at, p) + pair_byte<Unit>(at, p)) = pairs[p];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < TOPK; ++k) {
    const uint2 place = places[k];
    if (place.y == 0) continue;  // another rank's expert
    u8* tile = image + (i64)place.x * (UNITS * 512);
    for (int i = tid; i < UNITS * 32; i += IMAGE_THREADS)
      *(uint4*)(tile + chunk_of_image(i >> 5, i & 31, place.y & 0xffff, place.y >> 16)) =
          *(const uint4*)(row + 16 * i);
  }
}
