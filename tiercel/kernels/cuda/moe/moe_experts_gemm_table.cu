// moe_experts_gemm_table: pairs (token, slot) into tiles of one expert each, by one CTA. The pairs
// of an expert fill as few tiles as hold them, of about equal size, a multiple of TOKEN_STEP. Which
// place of a tile a pair gets differs from launch to launch; its result does not. A pair of expert
// -1, which another rank has, gets none.
// Macros: EXPERTS, TOKENS (of a tile at most).
#include "moe/moe_experts_ptx.cuh"

#define TOKEN_STEP 16
#define TABLE_THREADS 1024

struct Share {  // of an expert
  u32 tiles, size, tokens;  // size: pairs of a tile; tokens: those and padding
  DEV explicit Share(u32 count) {
    tiles = (count + TOKENS - 1) / TOKENS, size = tiles ? (count + tiles - 1) / tiles : 0;
    tokens = (size + TOKEN_STEP - 1) / TOKEN_STEP * TOKEN_STEP;
  }
};

extern "C" __global__ void __launch_bounds__(TABLE_THREADS) moe_experts_gemm_table(
    const i64* ids,  // (num_pairs,), -1 for another rank's
    uint4* tiles,    // (num_tiles + 1,): expert, first row of the images, pairs, rows; their number
    u32* pairs,      // (rows of the images,)
    uint2* places,   // (num_pairs,): first row of the tile, place in it | rows of it << 16, or 0
    int num_pairs, int num_tiles) {
  __shared__ u32 counts[EXPERTS], rows[EXPERTS], sizes[EXPERTS], used;
  const int tid = threadIdx.x;
  wait_for_inputs();
  launch_dependents();
  for (int e = tid; e < EXPERTS; e += TABLE_THREADS) counts[e] = 0;
  __syncthreads();
  for (int i = tid; i < num_pairs; i += TABLE_THREADS)
    if (ids[i] >= 0) atomicAdd(counts + ids[i], 1u);
  __syncthreads();
  if (tid < 32) {
    constexpr int EACH = (EXPERTS + 31) / 32;
    const int first = min(tid * EACH, EXPERTS), last = min(first + EACH, EXPERTS);
    u32 own_tiles = 0, own_rows = 0;
    for (int e = first; e < last; ++e) {
      const Share share(counts[e]);
      own_tiles += share.tiles, own_rows += share.tiles * share.tokens;
    }
    u32 tile = own_tiles, row = own_rows;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 t = __shfl_up_sync(~0u, tile, step), r = __shfl_up_sync(~0u, row, step);
      if (tid >= step) tile += t, row += r;
    }
    if (tid == 31) used = tile;
    tile -= own_tiles, row -= own_rows;
    for (int e = first; e < last; ++e) {
      const int count = counts[e];
      const Share share(count);
      rows[e] = row, sizes[e] = share.size, counts[e] = 0;
      for (u32 k = 0; k < share.tiles; ++k, ++tile, row += share.tokens) {
        const int left = count - (int)(k * share.size);  // none, if an expert has many tiles
        tiles[tile] = make_uint4(e, row, left > 0 ? min(left, (int)share.size) : 0, share.tokens);
      }
    }
  }
  __syncthreads();
  if (tid == 0) tiles[num_tiles] = make_uint4(used, 0, 0, 0);
  for (int i = tid; i < num_pairs; i += TABLE_THREADS) {
    if (ids[i] < 0) {
      places[i] = make_uint2(0, 0);
      continue;
    }
    const u32 e = (u32)ids[i], rank = atomicAdd(counts + e, 1u), size = sizes[e];
    const u32 tokens = (size + TOKEN_STEP - 1) / TOKEN_STEP * TOKEN_STEP;
    const u32 first = rows[e] + rank / size * tokens, n = rank % size;
    pairs[first + n] = i;
    places[i] = make_uint2(first, n | tokens << 16);
  }
}
