// indexer_scores: scores of packed index keys by wgmma (sm_90a), 64 keys x 64 heads x 128 channels a
// tile. Host side, floor: kernels/attention/indexer_scores.py.
//
//   score(t, e) = sum over heads of weights[t, h] x factor x relu(q[t, h] . keys[e])
//
// A warpgroup takes tiles of one token's keys in turn. A lane loads 32 channels of two keys, one group
// with its scale each, and decodes them to operands of products in registers: within a product the
// order of channels is free, if the queries have the same. Queries are in shared memory, 64 heads x
// 128 channels in that order; those that are not bfloat16 as two bfloat16 numbers each, high and low.
//
// Of each 32-bit word of codes i, pair k holds channels 8 i + k and 8 i + k + 4; a product of 16 takes
// pairs of 4 lanes, of two k. Rows of no key are zeros, and nothing else is read.
//
// Macros: WGS (warpgroups), CTAS (an SM), QUERY (0: bfloat16, 1: float32, 2: float16), LONG_VISIBLE
// (whether `visible` is int64), IS_BF16 (1), CLUSTER (1).
#include "attention/indexer_scores_ptx.cuh"
#include "include/global_ptx.cuh"
#include "include/half_ptx.cuh"

#define NTHR (128 * WGS)
#define D 128
#define HEADS 64
#define KEYS 64
#define TERMS (QUERY ? 2 : 1)
#define CHUNK (HEADS * 128)  // 64 channels

struct Work {
  float* scores;        // (tokens, max_entries)
  float* bests;         // (tokens, best_stride): the best of each 16 scores
  const u8* q;          // (tokens, heads, D)
  const u8 *keys, *scales;
  const int* tables;    // (rows, columns)
  const i64* rows;      // (tokens,) of the tables
  const void* visible;  // (tokens,)
  const float* weights; // (tokens, heads)
  i64 q_token_bytes, q_head_bytes, weight_stride, weight_head_stride;
  i64 block_bytes, entry_bytes, scale_block_bytes, scale_entry_bytes;
  int heads, max_entries, best_stride, table_stride, per_block;
  u32 magic, shift;     // n / per_block is the high word of n x magic, >> shift; magic 0: n
  float factor;
};

// 8 channels of a query as they are in memory, and as pairs (n, n + 4) of bfloat16, n = 0 to 3; low: what
// is missing of those.
struct Channels { uint4 words[QUERY == 1 ? 2 : 1]; };
DEV void split(const Channels& x, u32 (&high)[4], u32 (&low)[4]) {
  const uint4 a = x.words[0];
#if QUERY == 0
  high[0] = __byte_perm(a.x, a.z, 0x5410), high[1] = __byte_perm(a.x, a.z, 0x7632);
  high[2] = __byte_perm(a.y, a.w, 0x5410), high[3] = __byte_perm(a.y, a.w, 0x7632);
#else
  float v[8];
#if QUERY == 1
  const uint4 b = x.words[1];
  const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int n = 0; n < 8; ++n) v[n] = __uint_as_float(words[n]);
#else
  const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) unpack_fp16(words[n], v[2 * n], v[2 * n + 1]);
#endif
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    high[n] = pack(v[n], v[n + 4]);
    low[n] = pack(v[n] - __uint_as_float(high[n] << 16),
                  v[n + 4] - __uint_as_float(high[n] & 0xffff0000u));
  }
#endif
}
// Queries of a token, each thread's part of them.
struct Queries {
  static constexpr int OWN = HEADS * D / 8 / NTHR;
  Channels own[OWN];
  DEV void load(const Work& w, int token) {
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      const int i = n * NTHR + threadIdx.x, head = i / (D / 8);
      const u8* from = w.q + token * w.q_token_bytes + head * w.q_head_bytes +
                       (QUERY == 1 ? 4 : 2) * 8 * (i % (D / 8));
#pragma unroll
      for (int half = 0; half < (QUERY == 1 ? 2 : 1); ++half)
        own[n].words[half] =
            head < w.heads ? load_no_allocate<uint4>(from + 16 * half) : make_uint4(0, 0, 0, 0);
    }
  }
  // To shared memory, in the order of products.
  DEV void store(u32 base) const {
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
      const int i = k * NTHR + threadIdx.x, head = i / (D / 8), quad = i / 4 % 4, word = i % 4;
      u32 high[4], low[4];
      split(own[k], high, low);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int step = 2 * word + n / 2;  // the product of 16 channels
        const int column = 16 * (step % 4) + 8 * (n % 2) + 2 * quad;
        const u32 at = base + step / 4 * CHUNK + 128 * head + (2 * column ^ (head & 7) << 4);
        store_shared<u32>(at, high[n]);
        if (TERMS == 2) store_shared<u32>(at + 2 * CHUNK, low[n]);
      }
    }
  }
};
struct Key { uint4 codes; u32 scale; };
// Of 8 codes E2M1 pair k, times 2^-126.
DEV u32 pair_of_codes(u32 word, int k) {
  const u32 sign = k == 3 ? word : word << 12 - 4 * k;
  const u32 magnitude = k < 2 ? word << 6 - 4 * k : word >> 4 * k - 6;
  return (sign & 0x80008000u) | (magnitude & 0x01c001c0u);
}
DEV u32 pair_of(u32 exponent) { return exponent << 7 | exponent << 23; }
// 32 channels of a key as 16 pairs.
DEV void decode(const Key& key, u32 (&pairs)[16]) {
  // 2^126 x 2^(scale - 127), and the rest of it where that is out of range; 255 is NaN.
  const u32 factor = key.scale > 128 ? pair_of(254) : key.scale ? pair_of(key.scale + 126) : 0x3f003f00u;
  const u32 words[4] = {key.codes.x, key.codes.y, key.codes.z, key.codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) pairs[4 * i + k] = mul_bf16x2(pair_of_codes(words[i], k), factor);
  if (key.scale > 128) {
    const u32 rest = key.scale == 255 ? 0x7fc07fc0u : pair_of(key.scale - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = mul_bf16x2(pairs[i], rest);
  }
}
DEV u32 column_of(const Work& w, int entry) {
  return w.magic ? __umulhi((u32)entry, w.magic) >> w.shift : (u32)entry;
}
DEV int block_of(const Work& w, const int* table, int entry, int seen) {
  return entry < seen ? table[column_of(w, entry)] : 0;
}
DEV Key load_key(const Work& w, int block, int entry, int seen, int quad) {
  if (entry >= seen) return {make_uint4(0, 0, 0, 0), 127};
  const i64 index = (u32)entry - column_of(w, entry) * w.per_block;
  return {load_no_allocate<uint4>(w.keys + block * w.block_bytes + index * w.entry_bytes + 16 * quad),
          w.scales[block * w.scale_block_bytes + index * w.scale_entry_bytes + quad]};
}

extern "C" __global__ void __launch_bounds__(NTHR, CTAS) indexer_scores(const __grid_constant__ Work w) {
  launch_dependents();
  const u32 base = aligned_base();
  const int tid = threadIdx.x, lane = tid & 31, quad = lane & 3, token = blockIdx.y;
  const int wg = uni(tid >> 7), row = 16 * (tid >> 5 & 3) + (lane >> 2);
  wait_for_inputs();
  // What depends on nothing is loaded first, then what waits for it: rows, blocks, keys.
  const i64 wanted =
      LONG_VISIBLE ? ((const i64*)w.visible)[token] : (i64)((const int*)w.visible)[token];
  const int* table = w.tables + w.rows[token] * w.table_stride;
  Queries held;
  held.load(w, token);
  float weights[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int head = 8 * (i / 2) + 2 * quad + i % 2;
    weights[i] = head < w.heads ? w.weights[token * w.weight_stride + head * w.weight_head_stride] : 0.f;
  }
  const int seen = (int)(wanted < w.max_entries ? wanted : w.max_entries);
  const int tiles = uni((max(seen, 0) + KEYS - 1) / KEYS), step = gridDim.x * WGS;
  if ((int)blockIdx.x * WGS >= tiles) return;
  int tile = blockIdx.x * WGS + wg;
  // Two tiles ahead: blocks; one: keys.
  int blocks[2];
  Key keys[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) blocks[h] = block_of(w, table, KEYS * tile + row + 8 * h, seen);
  held.store(base);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int entry = KEYS * tile + row + 8 * h;
    keys[h] = load_key(w, blocks[h], entry, seen, quad);
    blocks[h] = block_of(w, table, entry + KEYS * step, seen);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) weights[i] *= w.factor;
  fence_shared_writes();
  __syncthreads();
  const u32 queries = uniform(mdesc(base, 16));
  float* to = w.scores + (i64)token * w.max_entries;
  float* bests = w.bests + (i64)token * w.best_stride;
  for (; tile < tiles; tile += step) {
    const int entry = KEYS * tile + row;
    u32 a[2][16];
    decode(keys[0], a[0]), decode(keys[1], a[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int next = entry + 8 * h + KEYS * step;
      keys[h] = load_key(w, blocks[h], next, seen, quad);
      blocks[h] = block_of(w, table, next + KEYS * step, seen);
    }
    float s[32];
    wg_fence();
#pragma unroll
    for (int i = 0; i < TERMS * D / 16; ++i) {
      const int n = i % 8;
      const u32 b = queries + (i / 4 * CHUNK + i % 4 * 32 >> 4);
      if (i == 0) wgmma_keys<0>(s, a[0][0], a[1][0], a[0][1], a[1][1], b);
      else wgmma_keys<1>(s, a[0][2 * n], a[1][2 * n], a[0][2 * n + 1], a[1][2 * n + 1], b);
    }
    wg_commit();
    wg_wait<0>();
    pin(s);
    float sums[2] = {0.f, 0.f}, best = __int_as_float(0xff800000);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          sums[h] = fmaf(max_or_nan(s[4 * j + 2 * h + e], 0.f), weights[2 * j + e], sums[h]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] += __shfl_xor_sync(~0u, sums[h], 1);
      sums[h] += __shfl_xor_sync(~0u, sums[h], 2);
      if (quad == h && entry + 8 * h < seen) to[entry + 8 * h] = sums[h];
      if (entry + 8 * h < seen) best = max_or_nan(best, sums[h]);
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) best = max_or_nan(best, __shfl_xor_sync(~0u, best, mask));
    if (lane == 0 && entry < seen) bests[entry / 16] = best;
  }
}
