// mhc_mix_finish: from the products of a token's residual streams to the next block's normed input and
// the weights of the way back. Host side, floor: kernels/fused/mhc_mix_finish.py.
//
// A CTA takes a token. Its first X_WARPS warps have 8 channels of four streams a lane, which they
// request before they add up the products; the last warp goes through Sinkhorn's iteration meanwhile,
// with a 4 x 4 matrix in the registers of each lane.
//
// Macros: HIDDEN (a multiple of 8), SPLITS (pieces of products), COLUMNS (floats of a piece: 24
// products, the sum of squares), IS_BF16 (1).
#include "include/attention_ptx.cuh"
#include "include/barrier_ptx.cuh"
#include "include/shared_ptx.cuh"

#define STREAMS 4
#define ROWS 24
#define X_WARPS 16
#define WARPS (X_WARPS + 1)
#define RUNS ((HIDDEN / 8 + 32 * X_WARPS - 1) / (32 * X_WARPS))  // of 8 channels, of a lane
#define LOG2_E 1.442695041f

DEV float sigmoid(float x) { return rcp_approx(1.f + exp2_approx(-LOG2_E * x)); }
DEV float sum_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Softmax of the rows of a 4 x 4 matrix, then columns and rows in turn; the last step is on columns.
DEV void sinkhorn(float (&comb)[4][4], int iters, float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float top = comb[i][0], sum = 0.f;
#pragma unroll
    for (int j = 1; j < 4; ++j) top = comb[i][j] > top ? comb[i][j] : top;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      comb[i][j] = exp2_approx(LOG2_E * (comb[i][j] - top));
      sum += comb[i][j];
    }
    const float factor = rcp_approx(sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) comb[i][j] = comb[i][j] * factor + eps;
  }
  for (int turn = 0; turn < iters; ++turn) {
    if (turn)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = (comb[i][0] + comb[i][1]) + (comb[i][2] + comb[i][3]);
        const float factor = rcp_approx(sum + eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) comb[i][j] *= factor;
      }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = (comb[0][j] + comb[1][j]) + (comb[2][j] + comb[3][j]);
      const float factor = rcp_approx(sum + eps);
#pragma unroll
      for (int i = 0; i < 4; ++i) comb[i][j] *= factor;
    }
  }
}
// The weights of the way back, by one warp; lane l has number l of the 24 before their functions.
DEV void store_coefficients(float* post, float* comb, float mixed, int iters, float eps) {
  const int lane = threadIdx.x & 31;
  if (lane >= STREAMS && lane < 2 * STREAMS) post[lane - STREAMS] = 2.f * sigmoid(mixed);
  float cells[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) cells[i / 4][i % 4] = __shfl_sync(~0u, mixed, 2 * STREAMS + i);
  sinkhorn(cells, iters, eps);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (lane == i) comb[i] = cells[i / 4][i % 4];
}

DEV u32 word_of(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
DEV float4 read_floats(const float* from) { return *(const float4*)from; }

// What a thread has of the weights, which depend on nothing.
struct Weights {
  float scale, base;
  float4 weights[RUNS][2];  // of the norm
  DEV Weights(const float* scales, const float* bases, const float* norm) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kind = lane < STREAMS ? 0 : lane < 2 * STREAMS ? 1 : 2;
    scale = lane < ROWS ? scales[kind] : 0.f, base = lane < ROWS ? bases[lane] : 0.f;
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int channel = 8 * (threadIdx.x + 32 * X_WARPS * run);
      const bool is_known = norm && warp < X_WARPS && channel < HIDDEN;
      weights[run][0] = is_known ? read_floats(norm + channel) : make_float4(1.f, 1.f, 1.f, 1.f);
      weights[run][1] = is_known ? read_floats(norm + channel + 4) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
  }
};

// All pointers are a token's: out (HIDDEN,) and streams (4, HIDDEN) bf16, post (4,), comb (4, 4),
// parts (SPLITS, COLUMNS).
DEV void finish_token(const Weights& own, u8* memory, u16* out, float* post, float* comb,
                      const u16* streams, i64 stream_stride, const float* parts, bool has_norm,
                      int iters, float rms_eps, float hc_eps, float norm_eps) {
  float* sums = (float*)memory;            // (X_WARPS, 32): products of a warp's pieces
  float* squares = sums + 32 * X_WARPS;    // (X_WARPS,): of x
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint4 old[RUNS][STREAMS];
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const int channel = 8 * (threadIdx.x + 32 * X_WARPS * run);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
      old[run][i] = make_uint4(0, 0, 0, 0);
      if (warp < X_WARPS && channel < HIDDEN)
        old[run][i] = __ldcg((const uint4*)(streams + i * stream_stride + channel));
    }
  }
  if (warp < X_WARPS) {
    float sum = 0.f;
#pragma unroll 8
    for (int piece = warp; piece < SPLITS; piece += X_WARPS)
      if (lane <= ROWS) sum += __ldcg(parts + piece * COLUMNS + lane);
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < X_WARPS; ++i) total += sums[32 * i + lane];
  const float mean = __shfl_sync(~0u, total, ROWS) * (1.f / (STREAMS * HIDDEN));
  const float mixed = total * rsqrtf(mean + rms_eps) * own.scale + own.base;
  if (warp == X_WARPS) {
    store_coefficients(post, comb, mixed, iters, hc_eps);
    return;
  }
  const float own_pre = sigmoid(mixed) + hc_eps;
  float pre[STREAMS];
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) pre[i] = __shfl_sync(~0u, own_pre, i);
  float x[RUNS][8] = {}, square = 0.f;
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
#pragma unroll
    for (int i = 0; i < STREAMS; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float a, b;
        unpack(word_of(old[run][i], k), a, b);
        x[run][2 * k] += pre[i] * a, x[run][2 * k + 1] += pre[i] * b;
      }
#pragma unroll
    for (int k = 0; k < 8; ++k) square += x[run][k] * x[run][k];
  }
  float factor = 1.f;
  if (has_norm) {
    square = sum_warp(square);
    if (lane == 0) squares[warp] = square;
    bar_sync(1, 32 * X_WARPS);
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < X_WARPS; ++i) all += squares[i];
    factor = rsqrtf(all * (1.f / HIDDEN) + norm_eps);
  }
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const int channel = 8 * (threadIdx.x + 32 * X_WARPS * run);
    if (channel >= HIDDEN) continue;
    const float(&v)[8] = x[run];
    const float4 a = own.weights[run][0], b = own.weights[run][1];
    *(uint4*)(out + channel) = make_uint4(
        pack(v[0] * factor * a.x, v[1] * factor * a.y), pack(v[2] * factor * a.z, v[3] * factor * a.w),
        pack(v[4] * factor * b.x, v[5] * factor * b.y), pack(v[6] * factor * b.z, v[7] * factor * b.w));
  }
}

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
