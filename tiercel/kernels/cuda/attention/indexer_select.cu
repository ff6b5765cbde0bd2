// indexer_select: each token's best entries by their scores, in ascending order, then -1; ties go to
// the lower entry. Host side, floor: kernels/attention/indexer_select.py.
//
// A cluster takes a token, each CTA a run of its scores, which it keeps in shared memory as unsigned
// integers of the same order. Three histograms of 11, 11 and 10 bits, added up over the cluster, give
// the least integer that is chosen; each CTA then finds the places of its own entries from how many
// the CTAs before it have. A cluster of one CTA reads no other's memory.
//
//   bins      3 x BINS words    histograms of the CTA
//   counts    1024 words        chosen entries of 32, then of all before them
//   sums      64 words          of warps, and results that all threads read
//   values    the rest
//
// Macros: CLUSTER, IS_LONG (whether `visible` is int64), IS_BF16 (without effect).
#include "attention/cluster_ptx.cuh"

#define WARPS 32
#define BINS 2048
#define COUNTS_AT (3 * 4 * BINS)
#define SUMS_AT (COUNTS_AT + 4 * 1024)
#define VALUES_AT (SUMS_AT + 4 * 64)
#define ALL_THREADS_OF_CTA (32 * WARPS)

// Sum of all values of a warp up to this lane's.
DEV u32 scan_warp(u32 x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 y = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += y;
  }
  return x;
}
// Sum of all values up to this thread's; `total` of the CTA.
DEV u32 scan(u32 x, u32 sums_at, u32& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 sum = scan_warp(x);
  __syncthreads();  // the sums of the scan before have been read
  if (lane == 31) store_word(sums_at + 4 * warp, sum);
  __syncthreads();
  const u32 of_warp = load_word(sums_at + 4 * lane);  // each lane that of another one
  const u32 upto = scan_warp(of_warp);
  total = __shfl_sync(~0u, upto, WARPS - 1);
  return __shfl_sync(~0u, upto - of_warp, warp) + sum;
}
// Two words of a CTA of the cluster.
DEV uint2 load_words_of(u32 address, int rank) {
  return CLUSTER == 1 ? load_words(address) : load_remote_words(address, rank);
}
DEV u32 ordered(float score) {
  const u32 bits = score == 0.f ? 0u : __float_as_uint(score);  // -0 ties with 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(ALL_THREADS_OF_CTA, 1) indexer_select(
    int* out,             // (tokens, topk), rows `out_stride` apart
    const float* scores,  // (tokens, max_entries)
    const void* visible,  // (tokens,)
    int max_entries, int topk, int out_stride) {
  let_dependents_start();
  const u32 base = shared_base();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int rank = blockIdx.x, token = blockIdx.y;
  for (u32 i = tid; i < 3 * BINS; i += ALL_THREADS_OF_CTA) store_word(base + 4 * i, 0);
  wait_for_predecessor();
  const i64 wanted = IS_LONG ? ((const i64*)visible)[token] : (i64)((const int*)visible)[token];
  const int seen = (int)(wanted < max_entries ? wanted : max_entries);
  const int share = (seen + CLUSTER - 1) / CLUSTER, first = rank * share;
  const int own = max(0, min(share, seen - first));
  const int turns = (share + ALL_THREADS_OF_CTA - 1) / ALL_THREADS_OF_CTA;
  const float* row = scores + (i64)token * max_entries + first;
  __syncthreads();
  for (int i = tid; i < own; i += ALL_THREADS_OF_CTA) {
    const u32 value = ordered(row[i]);
    store_word(base + VALUES_AT + 4 * i, value);
    add_shared(base + 4 * (value >> 21), 1);
  }

  const bool has_all = seen <= topk;
  u32 bound = 0, rest = 0;  // of the chosen: the least, and how many of those equal to it
  if (!has_all) {
    rest = topk;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      const u32 mask = pass == 2 ? 1023 : 2047;
      const u32 bins = base + 4 * BINS * pass;
      if (pass > 0) {
        const int above = pass == 1 ? 21 : 10;
        for (int i = tid; i < own; i += ALL_THREADS_OF_CTA) {
          const u32 value = load_word(base + VALUES_AT + 4 * i);
          if (value >> above == bound >> above) add_shared(bins + 4 * (value >> shift & mask), 1);
        }
      }
      cluster_sync();
      // Bins from the highest on: two of a thread, added up over the cluster.
      const int high = BINS - 1 - 2 * tid;
      u32 counts[2] = {0, 0};
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        const uint2 pair = load_words_of(bins + 4 * (high - 1), r);
        counts[0] += pair.y, counts[1] += pair.x;
      }
      u32 total;
      const u32 upto = scan(counts[0] + counts[1], base + SUMS_AT, total);
      const u32 before = upto - counts[0] - counts[1];
      if (before < rest && rest <= upto) {
        const bool is_low = before + counts[0] < rest;
        store_word(base + SUMS_AT + 4 * 32, high - is_low);
        store_word(base + SUMS_AT + 4 * 33, rest - before - (is_low ? counts[0] : 0));
      }
      __syncthreads();
      bound |= load_word(base + SUMS_AT + 4 * 32) << shift;
      rest = load_word(base + SUMS_AT + 4 * 33);
    }
  }

  // Entries above the bound in the low half of a word, entries equal to it in the high half.
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * ALL_THREADS_OF_CTA + tid;
    const u32 value = i < own ? load_word(base + VALUES_AT + 4 * i) : 0;
    const u32 above = __ballot_sync(~0u, i < own && (has_all || value > bound));
    const u32 equal = __ballot_sync(~0u, i < own && !has_all && value == bound);
    if (lane == 0)
      store_word(base + COUNTS_AT + 4 * (turn * WARPS + warp), __popc(above) | __popc(equal) << 16);
  }
  __syncthreads();
  const u32 count = tid < turns * WARPS ? load_word(base + COUNTS_AT + 4 * tid) : 0;
  // Two scans: either half may pass 16 bits.
  u32 all_above, all_equal;
  const u32 above_upto = scan(count & 0xffff, base + SUMS_AT, all_above);
  const u32 equal_upto = scan(count >> 16, base + SUMS_AT, all_equal);
  const u32 above_before = above_upto - (count & 0xffff), equal_before = equal_upto - (count >> 16);
  if (tid == 0) {
    store_word(base + SUMS_AT + 4 * 34, all_above);
    store_word(base + SUMS_AT + 4 * 35, all_equal);
  }
  cluster_sync();
  u32 above_of_others = 0, equal_of_others = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const uint2 chosen = load_words_of(base + SUMS_AT + 4 * 34, r);
    if (r < rank) above_of_others += chosen.x, equal_of_others += chosen.y;
  }
  // Places of the first of 32 entries: above in `counts`, equal in the histograms' memory.
  if (tid < turns * WARPS) {
    store_word(base + COUNTS_AT + 4 * tid, above_of_others + above_before);
    store_word(base + 4 * tid, equal_of_others + equal_before);
  }
  __syncthreads();
  int* to = out + (i64)token * out_stride;
  for (int turn = 0; turn < turns; ++turn) {
    const int i = turn * ALL_THREADS_OF_CTA + tid;
    const u32 value = i < own ? load_word(base + VALUES_AT + 4 * i) : 0;
    const bool is_above = i < own && (has_all || value > bound);
    const bool is_equal = i < own && !has_all && value == bound;
    const u32 lower = (1u << lane) - 1;
    const u32 above = load_word(base + COUNTS_AT + 4 * (turn * WARPS + warp)) +
                      __popc(__ballot_sync(~0u, is_above) & lower);
    const u32 equal = load_word(base + 4 * (turn * WARPS + warp)) +
                      __popc(__ballot_sync(~0u, is_equal) & lower);
    if (is_above || (is_equal && equal < rest)) to[above + min(equal, rest)] = first + i;
  }
  if (rank == 0)
    for (int i = max(seen, 0) + tid; i < topk; i += ALL_THREADS_OF_CTA) to[i] = -1;
  cluster_sync();  // nobody leaves while its memory is read
}
