// The second kernel of split attention: rows that several CTAs share become their results. Behind:
// attention_ptx.cuh, attention_splits.cuh, split_walk.cuh. Host side: split_attention.py.
//
// With FOLDS, the CTA that has a row's first split has added its own splits already, at the place of
// the last of them; here those of the others follow, in order. As many CTAs as have shared a tile of
// rows do that, each for its part of rows and columns. Without, every row has all splits to add.
// Macros: as split_attention.cu, and BATCH (splits that a warp asks for at once), COLUMNS (of a lane:
// 1 or 2), CTAS (an SM, for the registers: those that wait beside the kernel ahead need room).
#define CHUNKS ((BATCH + 31) / 32)
#define SLAB (32 * COLUMNS)  // columns of a warp
#define SLABS (D / SLAB)     // of a row

// A CTA's part of a tile of rows.
struct Part {
  int task, end;                     // slabs of its rows
  int first_token, head, first_row;  // of the tile
  int first, splits;  // the place of what is added already, and the number of places
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
DEV void store_columns(u16* to, const float (&x)[COLUMNS]) {
#if COLUMNS == 1
  *to = (u16)pack(x[0], 0.f);
#else
  *(u32*)to = pack(x[0], x[1]);
#endif
}

DEV void merge_slab(const float* partial, const float2* stat, u16* out, int first, int splits) {
  const int lane = threadIdx.x & 31;
  float acc[COLUMNS] = {}, total = 0.f, maximum = NEG_INF;
  for (int base = first; base < splits; base += BATCH) {
    float2 of[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int at = base + 32 * i + lane;
      of[i] = at < splits && 32 * i + lane < BATCH ? __ldcg(stat + at) : make_float2(NEG_INF, 0.f);
    }
    float x[BATCH][COLUMNS];
#pragma unroll
    for (int i = 0; i < BATCH; i += 8) {
      if (base + i >= splits) break;
#pragma unroll
      for (int j = i; j < i + 8; ++j)
        load_columns(x[j], partial + (base + j) * D + lane * COLUMNS, base + j < splits);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      if (base + 32 * i >= splits) break;
      float most = of[i].x;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const float other = __shfl_up_sync(~0u, most, step);
        if (lane >= step) most = fmaxf(most, other);
      }
      float before = __shfl_up_sync(~0u, most, 1), decay;
      before = lane ? fmaxf(before, maximum) : maximum;
      const float weight = rise(before, of[i].x, decay);
      maximum = __shfl_sync(~0u, before, 31);
#pragma unroll
      for (int j = 0; j < min(32, BATCH - 32 * i); ++j) {
        if (j % 8 == 0 && base + 32 * i + j >= splits) break;
        const float of_sum = __shfl_sync(~0u, decay, j), of_split = __shfl_sync(~0u, weight, j);
        total = add_scaled(total, of_sum, __shfl_sync(~0u, of[i].y, j), of_split);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          acc[c] = add_scaled(acc[c], of_sum, x[32 * i + j][c], of_split);
      }
    }
  }
  const float by = total == 0.f ? 1.f : total;  // 0 where nothing is seen
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) acc[c] = __fdiv_rn(acc[c], by);
  store_columns(out + lane * COLUMNS, acc);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) merge_splits(
    const int* cu_seqlens,  // (reqs + 1,)
    const int* seq_lens,    // (reqs,)
    const float* partials,  // (tokens * heads, slots, D)
    const float2* stats,    // (tokens * heads, slots): maximum and sum
    u16* out,               // (tokens * heads, D)
    int reqs, int kv_heads, int group, int slots, int window, int most_queries) {
  let_dependents_start();
  const int warp = threadIdx.x >> 5;
  const auto merge = [&](i64 line, int slab, int first, int splits) {
    merge_slab(partials + line * slots * D + slab * SLAB, stats + line * slots,
               out + line * D + slab * SLAB, first, splits);
  };
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
    part.first = at.split_behind(at.border(owner + 1) - rows_at) - at.first_split() - 1;
    part.splits = at.last_split() - at.first_split() + 1;
  }
  wait_for_predecessor();
  const int first_tasks = parts[0].end - parts[0].task;
  const int tasks = first_tasks + parts[1].end - parts[1].task;
  for (int i = warp; i < tasks; i += WARPS) {
    const bool is_second = i >= first_tasks;
    const Part& part = is_second ? parts[1] : parts[0];
    const int task = is_second ? parts[1].task + i - first_tasks : parts[0].task + i;
    const int packed = part.first_row + task / SLABS, token = packed / group;
    merge((part.first_token + token) * (i64)(kv_heads * group) + part.head + packed - token * group,
          task % SLABS, part.first, part.splits);
  }
#else
  Request of;
  of.load(blockIdx.y / most_queries, cu_seqlens, seq_lens, window);
  const int query = blockIdx.y % most_queries, task = blockIdx.x * WARPS + warp;
  const int position = of.seq_len - of.queries + query, first_split = split_of(of.low);
  const int splits = position < 0 ? 0 : split_of(position) - first_split + 1;
  wait_for_predecessor();  // who waits for this kernel waits for the ones ahead too
  if (query < of.queries && task < kv_heads * group * SLABS)
    merge((of.first_token + query) * (i64)(kv_heads * group) + task / SLABS, task % SLABS, 0, splits);
#endif
}
