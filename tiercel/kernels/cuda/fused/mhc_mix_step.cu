// mhc_mix_step: residual streams of a few tokens between two blocks, in one launch: the output of one
// is written back, and the next one's input is mixed and normed. Host side, floor:
// kernels/fused/mhc_mix_step.py.
//
// A CTA takes PIECE channels of all streams of a token. Warp w multiplies stream w % 4 by the rows
// w / 4, w / 4 + 4, ... of fn, which it requests before the wait, four channels a lane. The CTA of a
// token that is the last one to count has all pieces at hand, and finishes the token.
//
// Macros: those of mhc_mix_finish.cuh, of which SPLITS are the pieces; IS_FLOAT_Y (whether the block's
// output is float32, not bfloat16).
#include "fused/mhc_mix_finish.cuh"

#define PIECE 128
#define OWN_ROWS (ROWS / (X_WARPS / STREAMS))
static_assert(X_WARPS % STREAMS == 0 && ROWS % (X_WARPS / STREAMS) == 0, "rows of a warp");

DEV float4 widen(uint2 v) {
  float4 x;
  unpack(v.x, x.x, x.y), unpack(v.y, x.z, x.w);
  return x;
}
DEV float4 read_y(const u8* y, i64 at) {
#if IS_FLOAT_Y
  return __ldcg((const float4*)(y + 4 * at));
#else
  return widen(__ldcg((const uint2*)(y + 2 * at)));
#endif
}
DEV void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x += factor * x.x, sum.y += factor * x.y, sum.z += factor * x.z, sum.w += factor * x.w;
}
DEV float dot(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) mhc_mix_step(
    u16* out,             // (tokens, HIDDEN) bf16: the next block's input
    float* post,          // (tokens, 4): of the way back from it
    float* comb,          // (tokens, 4, 4)
    u16* new_streams,     // (tokens, 4, HIDDEN) bf16
    float* parts,         // (tokens, SPLITS, COLUMNS)
    u32* tickets,         // (tokens,) zeros, and zeros again at the end
    const u16* streams,   // (tokens, 4, HIDDEN) bf16
    const u8* y,          // (tokens, HIDDEN): of the block before
    const float* old_post, const float* old_comb,
    const float* fn,      // (24, 4 * HIDDEN)
    const float* scale, const float* base,
    const float* norm,    // (HIDDEN,) or null
    i64 token_stride, i64 stream_stride, i64 y_stride,  // elements, multiples of 8; of y, of 4
    int iters, float rms_eps, float hc_eps, float norm_eps) {
  launch_dependents();
  SHARED_MEMORY(memory);
  float* sums = (float*)memory;  // (X_WARPS, OWN_ROWS + 1): of a warp's rows, and of squares
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int stream = warp % STREAMS, first_row = warp / STREAMS;
  const int piece = blockIdx.x, channel = PIECE * piece + 4 * lane;
  const i64 token = blockIdx.y;
  const bool is_known = warp < X_WARPS && channel < HIDDEN;
  float4 rows[OWN_ROWS];
#pragma unroll
  for (int k = 0; k < OWN_ROWS; ++k) {
    const i64 row = first_row + X_WARPS / STREAMS * k;
    rows[k] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (is_known) rows[k] = read_floats(fn + (row * STREAMS + stream) * HIDDEN + channel);
  }
  wait_for_inputs();

  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (is_known) {
    float4 old[STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS; ++i)
      old[i] = widen(__ldcg((const uint2*)(streams + token * token_stride + i * stream_stride + channel)));
    const float4 added = read_y(y, token * y_stride + channel);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i)
      add_scaled(x, __ldcg(old_comb + (token * STREAMS + i) * STREAMS + stream), old[i]);
    add_scaled(x, __ldcg(old_post + token * STREAMS + stream), added);
    const uint2 rounded = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
    if (first_row == 0)
      *(uint2*)(new_streams + (token * STREAMS + stream) * HIDDEN + channel) = rounded;
    x = widen(rounded);
  }
  if (warp < X_WARPS) {
#pragma unroll
    for (int k = 0; k <= OWN_ROWS; ++k) {
      const float sum = sum_warp(k < OWN_ROWS ? dot(rows[k < OWN_ROWS ? k : 0], x) : dot(x, x));
      if (lane == 0) sums[warp * (OWN_ROWS + 1) + k] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x <= ROWS) {  // the last one has the squares, which the first four warps know
    const int row = threadIdx.x, first = row < ROWS ? row % (X_WARPS / STREAMS) : 0;
    const int k = row < ROWS ? row / (X_WARPS / STREAMS) : OWN_ROWS;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) sum += sums[(first * STREAMS + i) * (OWN_ROWS + 1) + k];
    parts[(token * SPLITS + piece) * COLUMNS + row] = sum;
  }
  __syncthreads();  // all of this CTA is written, and `sums` has been read
  if (threadIdx.x == 0) {
    __threadfence();
    sums[0] = atomicInc(tickets + token, SPLITS - 1) == SPLITS - 1 ? 1.f : 0.f;
    __threadfence();
  }
  __syncthreads();
  const bool is_last = sums[0] != 0.f;
  __syncthreads();
  if (!is_last) return;
  const Weights own(scale, base, norm);
  finish_token(own, memory, out + token * HIDDEN, post + token * STREAMS, comb + token * STREAMS * STREAMS,
               new_streams + token * STREAMS * HIDDEN, HIDDEN, parts + token * SPLITS * COLUMNS,
               norm != nullptr, iters, rms_eps, hc_eps, norm_eps);
}
