// mhc_mix_finish: from the products of a token's residual streams to the next block's normed input and
// the weights of the way back; a CTA takes a token. Host side, floor: kernels/fused/mhc_mix_finish.py.
//
// Macros: those of mhc_mix_finish.cuh.
#include "fused/mhc_mix_finish.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) mhc_mix_finish(
    u16* out,             // (tokens, HIDDEN) bf16
    float* post,          // (tokens, 4)
    float* comb,          // (tokens, 4, 4)
    const u16* streams,   // (tokens, 4, HIDDEN) bf16
    const float* parts,   // (tokens, SPLITS, COLUMNS)
    const float* scale,   // (3,)
    const float* base,    // (24,)
    const float* norm,    // (HIDDEN,) or null
    i64 token_stride, i64 stream_stride,  // elements, multiples of 8
    int iters, float rms_eps, float hc_eps, float norm_eps) {
  launch_dependents();
  SHARED_MEMORY(memory);
  const Weights own(scale, base, norm);
  wait_for_inputs();
  const i64 token = blockIdx.x;
  finish_token(own, memory, out + token * HIDDEN, post + token * STREAMS, comb + token * STREAMS * STREAMS,
               streams + token * token_stride, stream_stride, parts + token * SPLITS * COLUMNS,
               norm != nullptr, iters, rms_eps, hc_eps, norm_eps);
}
