// decode_attention: shared memory of a CTA of decode_attention_split.cu, and sums over splits.
//
// Splits are added to the sum of their group, groups to the sum of their row, one at a time and in
// order, so that bits do not depend on which CTA has which splits. A sum's place among partial
// results is that of its last split. Where a CTA has a row from its first split on, and its share
// ends inside of a group, it writes two sums: the row's, in the place of the group before, and the
// group's.
//
// Macros: as decode_attention_split.cu. With SHARED_SUMS the row's sum is in shared memory while a
// group's is made, else in registers.
#pragma once

#include "attention/decode_attention_ptx.cuh"
#include "attention/decode_attention_splits.cuh"
#include "attention/decode_attention_walk.cuh"

#define WARPS 4
#define KT (TILE / 64)               // times 16 keys: what a warp scores
#define SPAN (TILE < BLOCK_SIZE ? TILE : BLOCK_SIZE)  // keys of a tile in one block
#define BLOCKS (TILE / SPAN)         // of a tile
#define PIECES (D / 8)               // of 16 bytes, of a row of keys
#define LINES (32 * WARPS / PIECES)  // rows that all threads copy together
#define KV_BYTES (TILE * D * 2)
#define STAGE_BYTES (2 * KV_BYTES + ROWS * D * 2)  // keys, values, and queries where a unit begins
#define DT (D / WARPS / 16)                 // tiles of 16 value columns of a warp
#define WEIGHTS (STAGES * STAGE_BYTES)      // (ROWS, TILE) in 16 bits
#define MAXIMA (WEIGHTS + ROWS * TILE * 2)  // (ROWS, WARPS) float
#define SUMS (MAXIMA + ROWS * 16)           // (ROWS, WARPS) float
#define RESULTS (SUMS + ROWS * 16)          // (ROWS,) int: rows of `out`, or -1
#define ROW_ACC (RESULTS + ROWS * 4)        // (DT, NR, threads, 4) float: sums of rows
#define ROW_SCALE (ROW_ACC + ROWS * D * 4)  // (NR, WARPS, 4 lanes, 4) float
#define LENGTHS (SHARED_SUMS ? ROW_SCALE + ROWS * 32 : ROW_ACC)  // (3 * KEPT + 1,) int

// The place of piece `piece` of row `row` among rows of `pieces` pieces, without bank conflicts.
DEV u32 swizzled(int row, int piece, int pieces) {
  return (row * pieces + (piece ^ (row & 7))) * 16;
}

// What 8 lanes with equal lane % 4 have of NR * 2 rows, reduced: lane 4 g + t gets that of tile
// `row_of_group(g)` and row 2 t + g % 2. A third of the shuffles that all rows for all lanes take.
template <class F> DEV float reduce(const float (&of)[NR][2], int lane, F both) {
  float x[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (r >= NR) break;
    const float other = __shfl_xor_sync(~0u, lane & 4 ? of[r][0] : of[r][1], 4);
    x[r] = both(lane & 4 ? of[r][1] : of[r][0], other);
  }
#pragma unroll
  for (int r = 0; r < 4; r += 2) {
    if (r >= NR) break;
    const float sent = r + 1 == NR ? x[r] : lane & 8 ? x[r] : x[r + 1];
    const float kept = r + 1 == NR ? x[r] : lane & 8 ? x[r + 1] : x[r];
    x[r] = both(kept, __shfl_xor_sync(~0u, sent, 8));
  }
  const float sent = NR < 3 ? x[0] : lane & 16 ? x[0] : x[2];
  const float kept = NR < 3 ? x[0] : lane & 16 ? x[2] : x[0];
  return both(kept, __shfl_xor_sync(~0u, sent, 16));
}
DEV int row_of_group(int group_lane) {
  return NR == 1 ? 0 : NR == 2 ? group_lane >> 1 & 1 : min(group_lane >> 1, NR - 1);
}

// What is added up: splits to the sum of a group, groups to that of a row. Lane 4 g + t has columns
// g and g + 8 of 16 of rows 2 t and 2 t + 1 of each tile of 8; maximum and sum only of one tile's.
struct Sums {
  float acc[DT][NR][4], maximum[2], sum[2];
#if FOLDS && !SHARED_SUMS
  float row_acc[DT][NR][4], row_maximum[2], row_sum[2];  // of the groups before
#endif
  u32 smem;
  int lane, warp, tile;  // of 8 rows

  DEV explicit Sums(u32 shared) : smem(shared), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {
    tile = min(lane / 4, NR - 1);
  }
  // From the lane that has a row's maximum and sum.
  DEV float of_row(float x, int r) const {
    return NR == 1 ? x : __shfl_sync(~0u, x, 4 * r + lane % 4);
  }
  DEV u32 row_scale() const { return smem + ROW_SCALE + ((tile * WARPS + warp) * 4 + lane % 4) * 16; }
  DEV u32 row_place(int d, int r) const {
    return smem + ROW_ACC + ((d * NR + r) * 32 * WARPS + threadIdx.x) * 16;
  }
  DEV void clear() {
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int d = 0; d < DT; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[d][r][i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = NEG_INF, sum[h] = 0.f;
  }
  // A split, whose warps' sums are at SUMS.
  DEV void add(const float (&of)[DT][NR][4], const float (&maxima)[NR][2]) {
    float decay[2], weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 of_warps = load_shared<float4>(smem + SUMS + (8 * tile + 2 * (lane & 3) + h) * 16);
      const float total = __fadd_rn(__fadd_rn(of_warps.x, of_warps.y),
                                    __fadd_rn(of_warps.z, of_warps.w));
      float most = NEG_INF;  // of this lane's tile; an index would take it through memory
#pragma unroll
      for (int r = 0; r < NR; ++r) most = lane < 4 * r ? most : maxima[r][h];
      weight[h] = rise(maximum[h], most, decay[h]);
      sum[h] = add_scaled(sum[h], decay[h], total, weight[h]);
    }
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float by = of_row(decay[h], r), of_split = of_row(weight[h], r);
#pragma unroll
        for (int d = 0; d < DT; ++d)
#pragma unroll
          for (int i = h; i < 4; i += 2)
            acc[d][r][i] = add_scaled(acc[d][r][i], by, of[d][r][i], of_split);
      }
  }
  // The sum at hand becomes that of its row so far.
  DEV void keep_row() {
#if FOLDS && SHARED_SUMS
    __syncwarp();  // all lanes have read the one before
    if (lane / 4 < NR)
      store_shared<float4>(row_scale(), make_float4(maximum[0], maximum[1], sum[0], sum[1]));
#pragma unroll
    for (int d = 0; d < DT; ++d)
#pragma unroll
      for (int r = 0; r < NR; ++r)
        store_shared<float4>(row_place(d, r), make_float4(acc[d][r][0], acc[d][r][1], acc[d][r][2],
                                                  acc[d][r][3]));
    __syncwarp();
#elif FOLDS
#pragma unroll
    for (int h = 0; h < 2; ++h) row_maximum[h] = maximum[h], row_sum[h] = sum[h];
#pragma unroll
    for (int d = 0; d < DT; ++d)
#pragma unroll
      for (int r = 0; r < NR; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) row_acc[d][r][i] = acc[d][r][i];
#endif
  }
  // The row's sum so far takes the place of the one at hand, which is added to it if it is to be.
  DEV void take_row(bool is_added) {
#if FOLDS
#if SHARED_SUMS
    const float4 v = load_shared<float4>(row_scale());
    const float row_maximum[] = {v.x, v.y}, row_sum[] = {v.z, v.w};
#endif
    float decay[2], weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = row_maximum[h];
      weight[h] = rise(most, is_added ? maximum[h] : NEG_INF, decay[h]);
      if (!is_added) decay[h] = 1.f;
      maximum[h] = most;
      sum[h] = add_scaled(row_sum[h], decay[h], sum[h], weight[h]);
    }
#pragma unroll
    for (int r = 0; r < NR; ++r) {
      const float by[] = {of_row(decay[0], r), of_row(decay[1], r)};
      const float of_group[] = {of_row(weight[0], r), of_row(weight[1], r)};
#pragma unroll
      for (int d = 0; d < DT; ++d) {
#if SHARED_SUMS
        const float4 x = load_shared<float4>(row_place(d, r));
        const float of_row_so_far[] = {x.x, x.y, x.z, x.w};
#else
        const float(&of_row_so_far)[4] = row_acc[d][r];
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i)
          acc[d][r][i] = add_scaled(of_row_so_far[i], by[i % 2], acc[d][r][i], of_group[i % 2]);
      }
    }
#endif
  }
  // As a partial result. results: the tile's rows of `out`, or -1.
  DEV void store(float* partials, float2* stats, int slots, int place, const int* results) const {
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int result = results[8 * r + 2 * (lane & 3) + h];
        if (result < 0) continue;
        const i64 to = (i64)result * slots + place;
#pragma unroll
        for (int d = 0; d < DT; ++d) {
          float* column = partials + to * D + 16 * (warp * DT + d) + lane / 4;
          column[0] = acc[d][r][h], column[8] = acc[d][r][2 + h];
        }
        if (warp == 0 && lane / 4 == r) stats[to] = make_float2(maximum[h], sum[h]);
      }
  }
  // As results.
  DEV void finish(const Results& out, const int* results) const {
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = of_row(sum[h], r), by = total == 0.f ? 1.f : total;  // 0 in padding
        const int result = results[8 * r + 2 * (lane & 3) + h];
        if (result < 0) continue;
#pragma unroll
        for (int d = 0; d < DT; ++d) {
          const Result to = out.of(result, 0);
          const int column = 16 * (warp * DT + d);
          u16* low = to.at(column, lane / 4);
          const u32 both = pack(__fdiv_rn(acc[d][r][h], by), __fdiv_rn(acc[d][r][2 + h], by));
          *low = (u16)both, *to.at(column, lane / 4, 8) = (u16)(both >> 16);
        }
      }
  }
};
