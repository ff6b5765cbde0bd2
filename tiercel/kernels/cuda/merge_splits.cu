// The second kernel of split attention: a row's splits become its result. Behind:
// attention_splits.cuh. Host side: split_attention.py.
//
// A row is one head of one new token. Its splits are added in CLASSES classes, split i in class
// i % CLASSES, each in order; then the classes in order. So the result does not depend on how many
// threads do it: with IS_WIDE a warp has a class, else a warp has a whole row, of at most 32 splits.
// Macros: D, IS_BF16, IS_WIDE, HAS_ROUNDS (a row may have more than CLASSES splits), BATCH (splits
// that a warp asks for at once), CTAS (an SM, for the registers: those that wait beside the kernel
// ahead need room).
#define CLASSES 8
#define COLS (D / 32)  // of a lane

struct Sum {
  float of[COLS], total;
};

// Weight and columns of one split, added.
DEV void add_split(Sum& sum, float weight, float total, const float2 (&columns)[COLS / 2]) {
  sum.total = __fmaf_rn(weight, total, sum.total);
#pragma unroll
  for (int c = 0; c < COLS; c += 2) {
    sum.of[c] = __fmaf_rn(weight, columns[c / 2].x, sum.of[c]);
    sum.of[c + 1] = __fmaf_rn(weight, columns[c / 2].y, sum.of[c + 1]);
  }
}
// A lane's columns of split i, zeros where there is none.
DEV void fetch_columns(float2 (&x)[COLS / 2], const float* partial, int i, int splits, int lane) {
#pragma unroll
  for (int c = 0; c < COLS; c += 2)
    x[c / 2] = i < splits ? *(const float2*)(partial + i * D + COLS * lane + c)
                          : make_float2(0.f, 0.f);
}
DEV void store_row(u16* out, i64 row, const Sum& sum, int lane) {
  const float total = sum.total == 0.f ? 1.f : sum.total;  // 0 where nothing is seen, as in padding
#pragma unroll
  for (int c = 0; c < COLS; c += 2)
    *(u32*)(out + row * D + COLS * lane + c) =
        pack(__fdiv_rn(sum.of[c], total), __fdiv_rn(sum.of[c + 1], total));
}
DEV float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

extern "C" __global__ void __launch_bounds__(32 * CLASSES, CTAS) merge_splits(
    const float* partials,  // (tokens * heads, slots, D)
    const float2* stats,    // (tokens * heads, slots): maximum and sum
    u16* out,               // (tokens * heads, D)
    const int* cu_seqlens,  // (reqs + 1,)
    const int* seq_lens,    // (reqs,)
    int heads, int slots, int window, int most_queries) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  let_dependents_start();
  Request of;
  of.load(blockIdx.y / most_queries, cu_seqlens, seq_lens, window);
  const int query = blockIdx.y % most_queries;
#if IS_WIDE
  const int head = blockIdx.x;
#else
  const int head = blockIdx.x * CLASSES + warp;
#endif
  if (query >= of.queries || head >= heads) {
    wait_for_predecessor();  // who waits for this kernel waits for the ones ahead too
    return;
  }
  const i64 row = (i64)(of.first_token + query) * heads + head;
  const int position = of.seq_len - of.queries + query, first = split_of(of.low);
  const int splits = position < 0 ? 0 : split_of(position) - first + 1;
  const float* partial = partials + row * slots * D;
  const float2* stat = stats + row * slots;
  wait_for_predecessor();

#if IS_WIDE
  __shared__ float columns[CLASSES][D];
  __shared__ float totals[CLASSES];
  // Classes are those of the split's place in the sequence, not behind the first visible one, which
  // drafts would move.
  const int start = (warp - first % CLASSES + CLASSES) % CLASSES;
  float2 of_class[BATCH], x[BATCH][COLS / 2];
  auto fetch = [&](int from) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int i = from + b * CLASSES;
      of_class[b] = i < splits ? stat[i] : make_float2(NEG_INF, 0.f);
      fetch_columns(x[b], partial, i, splits, lane);
    }
  };
  fetch(start);
  float most = NEG_INF;  // every warp looks at all of them
#pragma unroll 4
  for (int i = lane; i < splits; i += 32) most = fmaxf(most, stat[i].x);
  most = warp_max(most);
  if (most == NEG_INF) most = 0.f;
  Sum sum = {};
  for (int i = start; i < splits; i += BATCH * CLASSES) {
    if (i != start) fetch(i);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      add_split(sum, exp2_fast(of_class[b].x - most), of_class[b].y, x[b]);
  }
#pragma unroll
  for (int c = 0; c < COLS; ++c) columns[warp][COLS * lane + c] = sum.of[c];
  if (lane == 0) totals[warp] = sum.total;
  __syncthreads();
  if (warp) return;
  Sum all = {};
#pragma unroll
  for (int w = 0; w < CLASSES; ++w) {
    all.total = __fadd_rn(all.total, totals[w]);
#pragma unroll
    for (int c = 0; c < COLS; ++c) all.of[c] = __fadd_rn(all.of[c], columns[w][COLS * lane + c]);
  }
#else
  // A lane holds the maximum and sum of one split.
  const float2 own = lane < splits ? stat[lane] : make_float2(NEG_INF, 0.f);
  float most = warp_max(own.x);
  if (most == NEG_INF) most = 0.f;
  const float own_weight = exp2_fast(own.x - most);
  Sum all = {};
#pragma unroll
  for (int w = 0; w < CLASSES; w += BATCH) {
    Sum sums[BATCH] = {};
    int base = 0;
    do {
      float2 x[BATCH][COLS / 2];
      int place[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        place[b] = base + (w + b - first % CLASSES + CLASSES) % CLASSES;
        fetch_columns(x[b], partial, place[b], splits, lane);
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const float weight = __shfl_sync(~0u, own_weight, place[b]);
        add_split(sums[b], weight, __shfl_sync(~0u, own.y, place[b]), x[b]);
      }
      base += CLASSES;
    } while (HAS_ROUNDS && base < splits);
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      all.total = __fadd_rn(all.total, sums[b].total);
#pragma unroll
      for (int c = 0; c < COLS; ++c) all.of[c] = __fadd_rn(all.of[c], sums[b].of[c]);
    }
  }
#endif
  store_row(out, row, all, lane);
}
