// decode_attention, second kernel: adds up the partial results of decode_attention_split.cu where
// several CTAs share a row. Layout of partial results: at the parameters. Host side:
// decode_attention_split.py.
//
// With FOLDS, the first kernel has added splits to groups, and the CTA with a row's first split has
// added up that row's groups (`is_held`). This kernel adds the remaining sums, in order. As many
// CTAs as shared a tile of rows add them, each for its part of rows and columns. Without FOLDS,
// every row has all splits to add.
//
// Macros: as decode_attention_split.cu, and BATCH (splits that a warp loads together, whole
// groups), COLUMNS (of a lane: 1 or 2), CTAS (an SM, for the registers: CTAs that wait beside the
// kernel ahead need room).
#include "attention/decode_attention_results.cuh"
#include "attention/decode_attention_splits.cuh"
#include "attention/decode_attention_walk.cuh"

#define CHUNKS ((BATCH + 31) / 32)
#define SLAB (32 * COLUMNS)  // columns of a warp
#define SLABS (D / SLAB)     // of a row

// A CTA's part of a tile of rows.
struct Part {
  int task, end;                     // slabs of its rows
  int first_token, head, first_row;  // of the tile
  int begin;             // place of the rows
  int low, first, last;  // splits: of the rows, to begin with (a group's first), of the rows
  u32 held;              // of 32 splits from `first` on, those whose places have sums
};

// A warp's part of a row of results.
struct Slab {
  const float* partials;  // (slots, D), from its first column on
  const float2* stats;    // (slots,)
  Result out;
  DEV Slab(const float* all, const float2* all_stats, const Results& results, int row, int slots,
           int slab)
      : partials(all + (i64)row * slots * D + slab * SLAB), stats(all_stats + (i64)row * slots),
        out(results.of(row, slab * SLAB)) {}
};

// Zeros where they are not read.
DEV void load_columns(float (&x)[COLUMNS], const float* from, bool is_read) {
#if COLUMNS == 1
  x[0] = is_read ? __ldcg(from) : 0.f;
#else
  const float2 v = is_read ? __ldcg((const float2*)from) : make_float2(0.f, 0.f);
  x[0] = v.x, x[1] = v.y;
#endif
}
DEV void store_columns(const Result& out, int column, const float (&x)[COLUMNS]) {
  u16* to = out.at(column);
#if COLUMNS == 1
  *to = (u16)pack(x[0], 0.f);
#elif IMAGE
  const u32 both = pack(x[0], x[1]);
  *to = (u16)both, *out.at(column + 1) = (u16)(both >> 16);
#else
  *(u32*)to = pack(x[0], x[1]);
#endif
}

// Adds up results of splits `first`, which begins a group, to `last`; the place of `low` is 0. A
// bit of held(first split) says of each of 32 splits whether there is one.
template <class F>
DEV void merge_slab(const Slab& slab, int low, int first, int last, F held) {
  const int lane = threadIdx.x & 31;
  float acc[COLUMNS] = {}, total = 0.f, maximum = NEG_INF;
  for (int base = first; base <= last; base += BATCH) {
    float2 of[CHUNKS];
    u32 is_there[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      is_there[i] = held(base + 32 * i) & (BATCH - 32 * i < 32 ? (1u << (BATCH - 32 * i) % 32) - 1 : ~0u);
      of[i] = is_there[i] >> lane & 1 ? __ldcg(slab.stats + base + 32 * i + lane - low)
                                      : make_float2(NEG_INF, 0.f);
    }
    float x[BATCH][COLUMNS];
#pragma unroll
    for (int i = 0; i < BATCH; i += GROUP) {
      if ((is_there[i / 32] >> i % 32 & ((1u << GROUP) - 1)) == 0) continue;
#pragma unroll
      for (int j = i; j < i + GROUP; ++j)
        load_columns(x[j], slab.partials + (base + j - low) * D + lane * COLUMNS,
                     is_there[i / 32] >> j % 32 & 1);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (is_there[i] == 0) continue;
      // Maxima of a group up to each split, then of all up to each group.
      float most = of[i].x;
#pragma unroll
      for (int step = 1; step < GROUP; step <<= 1) {
        const float other = __shfl_up_sync(~0u, most, step);
        if (lane % GROUP >= step) most = fmaxf(most, other);
      }
      float before = __shfl_up_sync(~0u, most, 1), decay, group_decay;
      if (lane % GROUP == 0) before = NEG_INF;
      const float weight = rise(before, of[i].x, decay);
      const float of_group = __shfl_sync(~0u, most, lane | (GROUP - 1));
      most = of_group;
#pragma unroll
      for (int step = GROUP; step < 32; step <<= 1) {
        const float other = __shfl_up_sync(~0u, most, step);
        if (lane >= step) most = fmaxf(most, other);
      }
      before = __shfl_up_sync(~0u, most, GROUP);
      before = lane < GROUP ? maximum : fmaxf(before, maximum);
      const float group_weight = rise(before, of_group, group_decay);
      maximum = __shfl_sync(~0u, before, 31);
#pragma unroll
      for (int first_of = 0; first_of < min(32, BATCH - 32 * i); first_of += GROUP) {
        if ((is_there[i] >> first_of & ((1u << GROUP) - 1)) == 0) continue;
        float sum = 0.f, group_acc[COLUMNS] = {};
#pragma unroll
        for (int j = first_of; j < first_of + GROUP; ++j) {
          const float by = __shfl_sync(~0u, decay, j), of_split = __shfl_sync(~0u, weight, j);
          sum = add_scaled(sum, by, __shfl_sync(~0u, of[i].y, j), of_split);
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c)
            group_acc[c] = add_scaled(group_acc[c], by, x[32 * i + j][c], of_split);
        }
        const float by = __shfl_sync(~0u, group_decay, first_of);
        const float of_sum = __shfl_sync(~0u, group_weight, first_of);
        total = add_scaled(total, by, sum, of_sum);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) acc[c] = add_scaled(acc[c], by, group_acc[c], of_sum);
      }
    }
  }
  const float by = total == 0.f ? 1.f : total;  // 0 where nothing is seen
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) acc[c] = __fdiv_rn(acc[c], by);
  store_columns(slab.out, lane * COLUMNS, acc);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode_attention_merge(
    const int* cu_seqlens,  // (reqs + 1,)
    const int* seq_lens,    // (reqs,)
    const float* partials,  // (tokens * heads, slots, D)
    const float2* stats,    // (tokens * heads, slots): maximum and sum
    u16* out,               // (tokens * heads, D), or decode_attention_results.cuh
    int reqs, int kv_heads, int group, int slots, int window,
#if IMAGE
    int tile,  // tokens of the image's
#endif
    int most_queries) {
  launch_dependents();
#if IMAGE
  const Results into{out, kv_heads * group, tile};
#else
  const Results into{out};
#endif
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#if FOLDS
  const Lengths lengths{nullptr, cu_seqlens, seq_lens, reqs, kv_heads, group, window, 0};
  const int share = blockIdx.x;
  Walk at;
  at.measure(lengths);
  const int from = at.border(share), stop = at.border(share + 1);
  // The rows that the share begins with, and those that it ends with.
  Part parts[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (from >= stop) break;
    const int rows_at = at.find_rows(lengths, i ? stop - 1 : from);
    if (at.is_whole || (i ? rows_at < from : rows_at == from)) continue;
    at.enter_split(at.last_split());
    const int owner = at.share_of(rows_at);
    const int last = at.share_of(rows_at + at.begin - at.first_tile());
    if (owner == last || share > last) continue;
    Part& part = parts[i];
    part.first_row = at.row_tile * ROWS;
    const int tasks = min(ROWS, at.of.queries * group - part.first_row) * SLABS;
    part.task = tasks * (share - owner) / (last - owner + 1);
    part.end = tasks * (share - owner + 1) / (last - owner + 1);
    part.first_token = at.of.first_token, part.head = at.kv_head * group;
    part.begin = rows_at;
    // After the whole groups of the first CTA. Their sum is in the place of the last of them.
    const int whole = at.split_behind(at.border(owner + 1) - rows_at) & -GROUP;
    part.first = max(whole - GROUP, at.first_split() & -GROUP);
    part.low = at.first_split(), part.last = at.last_split();
    part.held = __ballot_sync(~0u, at.is_held(rows_at, part.first + lane));
  }
  wait_for_inputs();
  const int first_tasks = parts[0].end - parts[0].task;
  const int tasks = first_tasks + parts[1].end - parts[1].task;
  for (int i = warp; i < tasks; i += WARPS) {
    const bool is_second = i >= first_tasks;
    const Part part = is_second ? parts[1] : parts[0];
    const int task = is_second ? parts[1].task + i - first_tasks : parts[0].task + i;
    const int packed = part.first_row + task / SLABS, token = packed / group;
    const auto held = [&](int first) {
      if (first < part.first + 32) return part.held >> (first - part.first);
      at.find_rows(lengths, part.begin);
      return __ballot_sync(~0u, at.is_held(part.begin, first + lane));
    };
    const int result = (part.first_token + token) * kv_heads * group + part.head + packed - token * group;
    merge_slab(Slab(partials, stats, into, result, slots, task % SLABS), part.low, part.first,
               part.last, held);
  }
#else
  Request of;
  of.load(blockIdx.y / most_queries, cu_seqlens, seq_lens, window);
  const int query = blockIdx.y % most_queries, task = blockIdx.x * WARPS + warp;
  const int position = of.seq_len - of.queries + query, low = split_of(of.low);
  const int last = position < 0 ? -1 : split_of(position);
  wait_for_inputs();  // who waits for this kernel waits for the ones ahead too
  const auto held = [&](int first) {
    return __ballot_sync(~0u, first + lane >= low && first + lane <= last);
  };
  if (query < of.queries && task < kv_heads * group * SLABS)
    merge_slab(Slab(partials, stats, into, (of.first_token + query) * kv_heads * group + task / SLABS,
                    slots, task % SLABS),
               low, low & -GROUP, last, held);
#endif
}
