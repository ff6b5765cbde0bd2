// indexer_scores_few: DeepSeek-V4's indexer scores of few tokens over packed keys (E2M1, a scale for
// 32 channels). Host side, floor: kernels/attention/indexer_scores_few.py.
//
// A warp takes 8 NT keys and all heads of one token. A lane loads the 32 channels of one key that
// share a scale and decodes them to pairs of bfloat16, which are B of the products as they are:
// within a product the order of channels is free, if queries have the same. Queries are in shared
// memory as A of the products, in one plane, or in two whose sum has 16 bits of a float.
//
// Macros: H (heads), IS_SPLIT (two planes; queries are float32, else bfloat16), NT, WARPS, LONG_SEEN,
// LONG_TABLES, LONG_ROWS (whether `visible`, the tables and their rows are int64), CLUSTER (1).
#include "attention/cluster_ptx.cuh"

#define D 128
#define TILES (H / 16)
#define PLANE (TILES * 8 * 512)
#define WEIGHTS_AT (PLANE * (1 + IS_SPLIT))

DEV i64 integer(const void* from, i64 at, bool is_long) {
  return is_long ? ((const i64*)from)[at] : (i64)((const int*)from)[at];
}
// Eight E2M1 as pairs of channels (i, i + 4): their bits are those of a bfloat16, times 2^126.
DEV void widen_e2m1(u32 word, u32 factor, u32 (&pairs)[4]) {
  pairs[0] = (word & 0x00080008u) << 12 | (word & 0x00070007u) << 6;
  pairs[1] = (word & 0x00800080u) << 8 | (word & 0x00700070u) << 2;
  pairs[2] = (word & 0x08000800u) << 4 | (word & 0x07000700u) >> 2;
  pairs[3] = (word & 0x80008000u) | (word & 0x70007000u) >> 6;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = multiply_pairs(multiply_pairs(pairs[i], 0x7e807e80u), factor);
}
DEV u32 pair_of_scale(u32 scale) {
  const u32 one = scale == 255 ? 0x7fc0u : scale ? scale << 7 : 0x40u;
  return one | one << 16;
}
// Eight channels of a head.
DEV void load_channels(float (&x)[8], const void* q, i64 at) {
#if IS_SPLIT
  const float4* from = (const float4*)((const float*)q + at);
  const float4 a = from[0], b = from[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#else
  const uint4 a = *(const uint4*)((const u16*)q + at);
  unpack(a.x, x[0], x[1]), unpack(a.y, x[2], x[3]), unpack(a.z, x[4], x[5]), unpack(a.w, x[6], x[7]);
#endif
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) indexer_scores_few(
    float* scores,         // (tokens, max_entries)
    const void* q,         // (tokens, H, D)
    const float* weights,  // (tokens, H)
    const u8* keys,        // (blocks, entries, D / 2)
    const u8* scales,      // (blocks, entries, D / 32)
    const void* tables,    // (rows, columns)
    const void* rows,      // (tokens,) of the tables
    const void* visible,   // (tokens,)
    i64 q_token, i64 q_head, i64 weight_token, i64 weight_head,
    i64 block_bytes, i64 entry_bytes, i64 scale_block_bytes, i64 scale_entry_bytes,
    int table_stride, int per_block, int max_entries, float factor) {
  let_dependents_start();
  const u32 base = shared_base();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = lane >> 2, quad = lane & 3;
  const int token = blockIdx.y;
  const int first = (blockIdx.x * WARPS + warp) * 8 * NT;
  wait_for_predecessor();
  const i64 wanted = integer(visible, token, LONG_SEEN);
  const int seen = (int)(wanted < max_entries ? wanted : max_entries);
  if ((int)blockIdx.x * WARPS * 8 * NT >= seen) return;

  const i64 row = integer(rows, token, LONG_ROWS) * table_stride;
  uint4 data[NT];
  u32 scale[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int entry = first + 8 * n + group;
    data[n] = make_uint4(0, 0, 0, 0), scale[n] = 127;
    if (entry < seen) {
      const i64 block = integer(tables, row + entry / per_block, LONG_TABLES);
      const int index = entry % per_block;
      data[n] = load_rows(keys + block * block_bytes + index * entry_bytes + 16 * quad);
      scale[n] = scales[block * scale_block_bytes + index * scale_entry_bytes + quad];
    }
  }
  // Products 2 j and 2 j + 1 take channels 8 j to 8 j + 7 of each of the four groups.
  for (int i = tid; i < TILES * 4 * 32; i += 32 * WARPS) {
    const int from = i & 31, j = i >> 5 & 3, tile = i >> 7;
    u32 high[2][4], low[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
      const int head = 16 * tile + (from >> 2) + 8 * half;
      load_channels(x, q, token * q_token + head * q_head + 32 * (from & 3) + 8 * j);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const u32 pair = pack(x[p], x[p + 4]);
        float a, b;
        unpack(pair, a, b);
        high[p / 2][half + 2 * (p % 2)] = pair;
        low[p / 2][half + 2 * (p % 2)] = pack(x[p] - a, x[p + 4] - b);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const u32 at = base + 16 * ((tile * 8 + 2 * j + step) * 32 + from);
      store_16(at, make_uint4(high[step][0], high[step][1], high[step][2], high[step][3]));
      if (IS_SPLIT)
        store_16(at + PLANE, make_uint4(low[step][0], low[step][1], low[step][2], low[step][3]));
    }
  }
  for (int head = tid; head < H; head += 32 * WARPS)
    store_float(base + WEIGHTS_AT + 4 * head,
                weights[token * weight_token + head * weight_head] * factor);
  __syncthreads();

  u32 pairs[NT][4][4];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const u32 both = pair_of_scale(scale[n]);
    widen_e2m1(data[n].x, both, pairs[n][0]), widen_e2m1(data[n].y, both, pairs[n][1]);
    widen_e2m1(data[n].z, both, pairs[n][2]), widen_e2m1(data[n].w, both, pairs[n][3]);
  }
  float sums[NT][2] = {};
#pragma unroll 1
  for (int tile = 0; tile < TILES; ++tile) {
    float dots[NT][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int plane = 0; plane <= IS_SPLIT; ++plane) {
        const u32 at = base + plane * PLANE + 16 * ((tile * 8 + step) * 32 + lane);
        const float4 x = load_floats(at);
        const u32 heads[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                              __float_as_uint(x.w)};
#pragma unroll
        for (int n = 0; n < NT; ++n)
          mma(dots[n], heads, pairs[n][step / 2][2 * (step % 2)],
              pairs[n][step / 2][2 * (step % 2) + 1]);
      }
    }
    const float a = load_float(base + WEIGHTS_AT + 4 * (16 * tile + group));
    const float b = load_float(base + WEIGHTS_AT + 4 * (16 * tile + group + 8));
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      sums[n][0] += fmaxf(dots[n][0], 0.f) * a + fmaxf(dots[n][2], 0.f) * b;
      sums[n][1] += fmaxf(dots[n][1], 0.f) * a + fmaxf(dots[n][3], 0.f) * b;
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = sums[n][e];
      sum += __shfl_xor_sync(~0u, sum, 4);
      sum += __shfl_xor_sync(~0u, sum, 8);
      sum += __shfl_xor_sync(~0u, sum, 16);
      const int entry = first + 8 * n + 2 * quad + e;
      if (group == 0 && entry < seen) scores[(i64)token * max_entries + entry] = sum;
    }
}
