// mhc_mix_step: writes a block's output back into the residual streams of a token and mixes them into
// the next block's normed input. Host side, floor: kernels/fused/mhc_mix_step.py.
//
// A cluster takes a token, a CTA HIDDEN / CLUSTER channels of its four streams, a thread four channels
// of one stream. Its 24 rows of fn are requested before the wait for the kernel ahead, and stay in
// registers. CTAs send their sums to all CTAs of the cluster: first 24 products and the sum of
// squares, then the square of the mixed channels for the norm. While that one travels, one warp of
// the cluster goes through Sinkhorn's iteration.
//
//   parts      CLUSTER x 32 floats         products of each CTA, then the sum of squares
//   squares    CLUSTER x WARPS floats      of the mixed channels, of each warp of each CTA
//   sums       WARPS x 32 floats           products of the CTA's own warps
//   streams    4 x CHANNELS floats         the new streams as they are rounded
//
// Macros: CLUSTER, QUADS (of a CTA's channels of a stream, in fours; a multiple of 8), IS_FLOAT_Y
// (else y is bfloat16), CTAS (an SM, for the registers), IS_BF16 (1).
#include "attention/cluster_ptx.cuh"

#define STREAMS 4
#define ROWS 24
#define WARPS (QUADS / 8)
#define CHANNELS (4 * QUADS)
#define HIDDEN (CHANNELS * CLUSTER)
#define PARTS_AT 0
#define SQUARES_AT (PARTS_AT + 4 * 32 * CLUSTER)
#define SUMS_AT (SQUARES_AT + 4 * WARPS * CLUSTER)
#define STREAMS_AT (SUMS_AT + 4 * 32 * WARPS)

DEV float sigmoid(float x) { return reciprocal(1.f + exp2_fast(-1.442695041f * x)); }

// Sums of 32 values over a warp, 31 exchanges for all: lane l has that of value l.
DEV float sum_each(float (&values)[32]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int width = 16; width; width /= 2) {
    const bool is_high = lane & width;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float sent = is_high ? values[i] : values[i + width];
      const float kept = is_high ? values[i + width] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, width);
    }
  }
  return values[0];
}
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
    for (int j = 1; j < 4; ++j) top = fmaxf(top, comb[i][j]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      comb[i][j] = exp2_fast(1.442695041f * (comb[i][j] - top));
      sum += comb[i][j];
    }
    const float factor = reciprocal(sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) comb[i][j] = comb[i][j] * factor + eps;
  }
  for (int turn = 0; turn < iters; ++turn) {
    if (turn)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = (comb[i][0] + comb[i][1]) + (comb[i][2] + comb[i][3]);
        const float factor = reciprocal(sum + eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) comb[i][j] *= factor;
      }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = (comb[0][j] + comb[1][j]) + (comb[2][j] + comb[3][j]);
      const float factor = reciprocal(sum + eps);
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

DEV void read_four(float (&values)[4], const u16* from) {
  const uint2 v = __ldcg((const uint2*)from);
  unpack(v.x, values[0], values[1]), unpack(v.y, values[2], values[3]);
}
DEV void read_y(float (&values)[4], const void* y, i64 at) {
#if IS_FLOAT_Y
  const float4 v = __ldcg((const float4*)((const float*)y + at));
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
#else
  read_four(values, (const u16*)y + at);
#endif
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(32 * WARPS, CTAS) mhc_mix_step(
    u16* out,                // (tokens, 4, HIDDEN) bf16: the streams between the blocks
    u16* mixed_out,          // (tokens, HIDDEN) bf16: the next block's input
    float* next_post,        // (tokens, 4)
    float* next_comb,        // (tokens, 4, 4)
    const u16* streams,      // (tokens, 4, HIDDEN) bf16
    const void* y,           // (tokens, HIDDEN)
    const float* post,       // (tokens, 4)
    const float* comb,       // (tokens, 4, 4)
    const float* fn,         // (24, 4 * HIDDEN)
    const float* scale,      // (3,)
    const float* base,       // (24,)
    const float* norm,       // (HIDDEN,)
    i64 token_stride, i64 stream_stride, i64 y_stride,  // elements, multiples of 4
    int iters, float rms_eps, float hc_eps, float norm_eps) {
  let_dependents_start();
  cluster_arrive();
  const u32 memory = shared_base();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int rank = blockIdx.x;
  const i64 token = blockIdx.y;
  const int stream = tid / QUADS, quad = tid % QUADS, channel = rank * CHANNELS + 4 * quad;
  uint4 weights[ROWS];
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
    weights[row] = load_rows(fn + ((i64)row * STREAMS + stream) * HIDDEN + channel);
  const int kind = lane < STREAMS ? 0 : lane < 2 * STREAMS ? 1 : 2;
  const float own_scale = lane < ROWS ? scale[kind] : 0.f, own_base = lane < ROWS ? base[lane] : 0.f;
  const float own_norm = norm[rank * CHANNELS + tid];
  wait_for_predecessor();

  float old[STREAMS][4], new_y[4], values[4];
#pragma unroll
  for (int i = 0; i < STREAMS; ++i)
    read_four(old[i], streams + token * token_stride + i * stream_stride + channel);
  read_y(new_y, y, token * y_stride + channel);
  const float own_post = __ldcg(post + token * STREAMS + stream);
  float shares[STREAMS];
#pragma unroll
  for (int i = 0; i < STREAMS; ++i)
    shares[i] = __ldcg(comb + (token * STREAMS + i) * STREAMS + stream);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    values[k] = (shares[0] * old[0][k] + shares[1] * old[1][k]) +
                (shares[2] * old[2][k] + shares[3] * old[3][k]) + own_post * new_y[k];
  const uint2 rounded = make_uint2(pack(values[0], values[1]), pack(values[2], values[3]));
  *(uint2*)(out + (token * STREAMS + stream) * HIDDEN + channel) = rounded;
  unpack(rounded.x, values[0], values[1]), unpack(rounded.y, values[2], values[3]);
  store_floats(memory + STREAMS_AT + 4 * (stream * CHANNELS + 4 * quad),
               make_float4(values[0], values[1], values[2], values[3]));

  float products[32] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const uint4& w = weights[row];
    products[row] = __uint_as_float(w.x) * values[0] + __uint_as_float(w.y) * values[1] +
                    __uint_as_float(w.z) * values[2] + __uint_as_float(w.w) * values[3];
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) products[ROWS] += values[k] * values[k];
  store_float(memory + SUMS_AT + 4 * tid, sum_each(products));
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += load_float(memory + SUMS_AT + 4 * (32 * i + lane));
  cluster_wait();  // all CTAs of the cluster have begun
  for (int to = warp; to < CLUSTER; to += WARPS)
    store_remote_float(memory + PARTS_AT + 4 * (32 * rank + lane), to, sum);
  cluster_sync();

  float total = 0.f;
#pragma unroll
  for (int i = 0; i < CLUSTER; ++i) total += load_float(memory + PARTS_AT + 4 * (32 * i + lane));
  const float mean = __shfl_sync(~0u, total, ROWS) * (1.f / (STREAMS * HIDDEN));
  const float mixed = total * rsqrtf(mean + rms_eps) * own_scale + own_base;
  const float pre = sigmoid(mixed) + hc_eps;
  float x = 0.f;
#pragma unroll
  for (int i = 0; i < STREAMS; ++i)
    x += __shfl_sync(~0u, pre, i) * load_float(memory + STREAMS_AT + 4 * (i * CHANNELS + tid));
  const float square = sum_warp(x * x);
  if (lane < CLUSTER)
    store_remote_float(memory + SQUARES_AT + 4 * (rank * WARPS + warp), lane, square);
  cluster_arrive();
  if (rank == 0 && warp == 0)
    store_coefficients(next_post + token * STREAMS, next_comb + token * STREAMS * STREAMS, mixed,
                       iters, hc_eps);
  cluster_wait();
  float squares = 0.f;
  for (int i = lane; i < CLUSTER * WARPS; i += 32)
    squares += load_float(memory + SQUARES_AT + 4 * i);
  const float factor = rsqrtf(sum_warp(squares) * (1.f / HIDDEN) + norm_eps);
  mixed_out[token * HIDDEN + rank * CHANNELS + tid] = (u16)pack(x * factor * own_norm, 0.f);
}
