// indexer_select: each token's best entries by their scores, in ascending order, then -1; ties go to
// the lower entry. Host side, floor: kernels/attention/indexer_select.py.
//
// A CTA takes a token. Scores are unsigned integers of the same order. Histograms of 11, 11 and 10 bits
// give the least that is chosen; they end as soon as a bin is chosen whole. Chosen entries are bits of
// a map, from which they are written in order.
//
// Up to CAPACITY scores are held in shared memory. Of more, candidates are: the scores come with the
// best of every 16, and topk groups of them reach a bound, so no score below it is chosen. Groups
// that reach it are read, and of random scores little more than topk reach it. If candidates are more
// than CAPACITY, scores are read again for each histogram.
//
//   bins      3 x BINS words      histograms
//   sums      64 words            of warps, and results that all threads read
//   chosen    MOST / 32 words     map of entries; then one of entries equal to the least
//   values    CAPACITY words
//   entries   CAPACITY words, if HAS_GROUPS: of the candidates
//   groups    GROUPS words, if HAS_GROUPS: those that are read
//
// The groups' best are in the second map until it is used.
//
// Macros: MOST (entries), CAPACITY, HAS_GROUPS, IS_LONG (whether `visible` is int64), CLUSTER (1),
// IS_BF16 (without effect).
#include "attention/indexer_select_ptx.cuh"

#define WARPS 32
#define BINS 2048
#define GROUPS 4096
#define CTA_THREADS (32 * WARPS)
#define SUMS_AT (3 * 4 * BINS)
#define CHOSEN_AT (SUMS_AT + 4 * 64)
#define EQUAL_AT (CHOSEN_AT + MOST / 8)
#define VALUES_AT (EQUAL_AT + MOST / 8)
#define ENTRIES_AT (VALUES_AT + 4 * CAPACITY)
#define GROUPS_AT (ENTRIES_AT + 4 * CAPACITY)
#define BEST_AT EQUAL_AT
// In `sums`, behind those of warps.
#define BIN_AT (SUMS_AT + 4 * 32)
#define REST_AT (SUMS_AT + 4 * 33)
#define COUNT_AT (SUMS_AT + 4 * 34)
#define COUNTER_AT (SUMS_AT + 4 * 36)
#define BATCH 12  // loads in flight

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
// Sum of all values up to this thread's.
DEV u32 scan(u32 x, u32 base) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 sum = scan_warp(x);
  __syncthreads();  // the sums of the scan before have been read
  if (lane == 31) store_shared<u32>(base + SUMS_AT + 4 * warp, sum);
  __syncthreads();
  const u32 of_warp = load_shared<u32>(base + SUMS_AT + 4 * lane);  // each lane that of another one
  const u32 before = scan_warp(of_warp) - of_warp;
  return __shfl_sync(~0u, before, warp) + sum;
}
DEV u32 ordered(float score) {
  const u32 bits = score == 0.f ? 0u : __float_as_uint(score);  // -0 ties with 0
  return score != score ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
// Numbers among which some are chosen: in shared memory, or scores.
struct Set {
  u32 at;
  const float* scores;  // null: in shared memory
  int count;
  DEV u32 value(int i) const { return scores ? ordered(scores[i]) : load_shared<u32>(at + 4 * i); }
};
struct Bound {
  u32 least;  // of the chosen, if all that reach it are
  u32 rest;   // how many of those equal to it are chosen; 0: all
};
// The bound of the best `wanted` of a set that has more, by some histograms; fewer than three give a
// bound that some more reach.
template <int PASSES> DEV Bound find_bound(const Set& set, u32 wanted, u32 base) {
  const int tid = threadIdx.x;
  u32 least = 0, rest = wanted;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const u32 mask = pass == 2 ? 1023 : 2047;
    const u32 bins = base + 4 * BINS * pass;
    const int above = pass == 1 ? 21 : 10;
#pragma unroll 4
    for (int i = tid; i < set.count; i += CTA_THREADS) {
      const u32 value = set.value(i);
      if (pass == 0 || value >> above == least >> above) add_shared(bins + 4 * (value >> shift & mask), 1);
    }
    __syncthreads();
    // Bins from the highest on: two of a thread.
    const int high = BINS - 1 - 2 * tid;
    const uint2 pair = load_shared<uint2>(bins + 4 * (high - 1));
    const u32 upto = scan(pair.x + pair.y, base), before = upto - pair.x - pair.y;
    if (before < rest && rest <= upto) {
      const bool is_low = before + pair.y < rest;
      store_shared<u32>(base + BIN_AT, high - is_low);
      store_shared<u32>(base + REST_AT, rest - before - (is_low ? pair.y : 0));
      store_shared<u32>(base + COUNT_AT, is_low ? pair.x : pair.y);
    }
    __syncthreads();
    least |= load_shared<u32>(base + BIN_AT) << shift;
    rest = load_shared<u32>(base + REST_AT);
    if (rest == load_shared<u32>(base + COUNT_AT)) return {least, 0};
  }
  return {least, rest};
}
DEV void clear_words(u32 at, int count) {
  for (int i = threadIdx.x; i < count; i += CTA_THREADS) store_shared<u32>(at + 4 * i, 0);
}
// Places at the end of a list for what a lane has: one of each `has`, -1 for none.
template <int N> DEV void append(u32 counter, const bool (&has)[N], int (&places)[N]) {
  const int lane = threadIdx.x & 31;
  int total = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const u32 lanes = __ballot_sync(~0u, has[n]);
    places[n] = has[n] ? total + __popc(lanes & ((1u << lane) - 1)) : -1;
    total += __popc(lanes);
  }
  if (total == 0) return;
  const int first = __shfl_sync(~0u, lane == 0 ? take_shared(counter, total) : 0, 0);
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (has[n]) places[n] += first;
}
// Candidates among more than CAPACITY scores; all scores if they are too many.
DEV Set find_candidates(const float* row, const float* best, int seen, int topk, u32 base) {
  const int tid = threadIdx.x, parts = (seen + 15) / 16;
  // Groups of 16 scores, or of 64: the bests of those are four side by side.
  const bool is_joined = seen > 16 * GROUPS;
  const int log2_size = is_joined ? 6 : 4, count = (seen + (1 << log2_size) - 1) >> log2_size;
  constexpr int OWN = GROUPS / CTA_THREADS;
  u32 mosts[OWN];
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    const int i = n * CTA_THREADS + tid;
    mosts[n] = 0;
    if (i >= count) continue;
    if (!is_joined) {
      mosts[n] = ordered(best[i]);
      continue;
    }
    const float4 x = *(const float4*)(best + 4 * i);
    const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (4 * i + k < parts) mosts[n] = max(mosts[n], ordered(four[k]));
  }
#pragma unroll
  for (int n = 0; n < OWN; ++n)
    if (n * CTA_THREADS + tid < count)
      store_shared<u32>(base + BEST_AT + 4 * (n * CTA_THREADS + tid), mosts[n]);
  __syncthreads();
  const u32 least = count > topk ? find_bound<2>({base + BEST_AT, nullptr, count}, topk, base).least : 0;
  {
    bool has[OWN];
    int places[OWN];
#pragma unroll
    for (int n = 0; n < OWN; ++n) has[n] = n * CTA_THREADS + tid < count && mosts[n] >= least;
    append(base + COUNTER_AT, has, places);
#pragma unroll
    for (int n = 0; n < OWN; ++n)
      if (has[n]) store_shared<u32>(base + GROUPS_AT + 4 * places[n], n * CTA_THREADS + tid);
  }
  __syncthreads();  // the bests have been read, and bins
  clear_words(base, 2 * BINS);
  clear_words(base + EQUAL_AT, (seen + 31) / 32);
  const int total = load_shared<u32>(base + COUNTER_AT) << log2_size, mask = (1 << log2_size) - 1;
  for (int i = tid; i < (total + 31) / 32 * 32; i += CTA_THREADS * BATCH) {
    u32 values[BATCH];
    int entries[BATCH], places[BATCH];
    bool has[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
      const int at = i + n * CTA_THREADS;
      entries[n] = seen;
      if (at < total)
        entries[n] =
            (load_shared<u32>(base + GROUPS_AT + 4 * (at >> log2_size)) << log2_size) + (at & mask);
      values[n] = entries[n] < seen ? ordered(row[entries[n]]) : 0;
    }
#pragma unroll
    for (int n = 0; n < BATCH; ++n) has[n] = entries[n] < seen && values[n] >= least;
    append(base + COUNTER_AT + 4, has, places);
#pragma unroll
    for (int n = 0; n < BATCH; ++n)
      if (has[n] && places[n] < CAPACITY) {
        store_shared<u32>(base + VALUES_AT + 4 * places[n], values[n]);
        store_shared<u32>(base + ENTRIES_AT + 4 * places[n], entries[n]);
      }
  }
  __syncthreads();
  const int found = load_shared<u32>(base + COUNTER_AT + 4);
  if (found > CAPACITY) return {0, row, seen};
  return {base + VALUES_AT, nullptr, found};
}

extern "C" __global__ void __launch_bounds__(CTA_THREADS, 1) indexer_select(
    int* out,             // (tokens, topk), rows `out_stride` apart
    const float* scores,  // (tokens, max_entries)
    const float* bests,   // (tokens, best_stride) of each 16 scores, if HAS_GROUPS
    const void* visible,  // (tokens,)
    int max_entries, int best_stride, int topk, int out_stride) {
  launch_dependents();
  const u32 base = shared_base();
  const int tid = threadIdx.x, lane = tid & 31, token = blockIdx.y;
  clear_words(base, 3 * BINS + 64);
  wait_for_inputs();
  const i64 wanted = IS_LONG ? ((const i64*)visible)[token] : (i64)((const int*)visible)[token];
  const int seen = (int)(wanted < max_entries ? wanted : max_entries);
  const float* row = scores + (i64)token * max_entries;
  int* to = out + (i64)token * out_stride;
  for (int i = max(seen, 0) + tid; i < topk; i += CTA_THREADS) to[i] = -1;
  if (seen <= topk) {
    for (int i = tid; i < seen; i += CTA_THREADS) to[i] = i;
    return;
  }
  const int words = (seen + 31) / 32;
  clear_words(base + CHOSEN_AT, words);
  Set set = {base + VALUES_AT, nullptr, seen};
  bool has_entries = false;
  if (HAS_GROUPS && seen > CAPACITY) {
    __syncthreads();
    set = find_candidates(row, bests + (i64)token * best_stride, seen, topk, base);
    has_entries = set.scores == nullptr;
  } else {
    clear_words(base + EQUAL_AT, words);
#pragma unroll 8
    for (int i = tid; i < seen; i += CTA_THREADS)
      store_shared<u32>(base + VALUES_AT + 4 * i, ordered(row[i]));
    __syncthreads();
  }
  const Bound bound = find_bound<3>(set, topk, base);
  for (int i = tid; i < (set.count + 31) / 32 * 32; i += CTA_THREADS) {
    const u32 value = i < set.count ? set.value(i) : 0;
    const bool is_equal = i < set.count && bound.rest && value == bound.least;
    const bool is_chosen = i < set.count && !is_equal && value >= bound.least;
    if (has_entries) {
      const u32 entry = is_equal || is_chosen ? load_shared<u32>(base + ENTRIES_AT + 4 * i) : 0;
      if (is_equal || is_chosen)
        or_shared(base + (is_equal ? EQUAL_AT : CHOSEN_AT) + entry / 32 * 4, 1u << entry % 32);
      continue;
    }
    const u32 chosen = __ballot_sync(~0u, is_chosen), equal = __ballot_sync(~0u, is_equal);
    if (lane == 0) {
      store_shared<u32>(base + CHOSEN_AT + i / 32 * 4, chosen);
      if (bound.rest) store_shared<u32>(base + EQUAL_AT + i / 32 * 4, equal);
    }
  }
  __syncthreads();
  // A thread has some words of the maps.
  const int own = (words + CTA_THREADS - 1) / CTA_THREADS, first = tid * own;
  const int last = min(first + own, words);
  if (bound.rest) {
    u32 count = 0;
    for (int i = first; i < last; ++i) count += __popc(load_shared<u32>(base + EQUAL_AT + 4 * i));
    int left = (int)bound.rest - (int)(scan(count, base) - count);
    for (int i = first; i < last; ++i) {
      u32 bits = load_shared<u32>(base + EQUAL_AT + 4 * i), kept = 0;
      for (; bits && left > 0; --left) kept |= bits & -bits, bits &= bits - 1;
      store_shared<u32>(base + CHOSEN_AT + 4 * i, load_shared<u32>(base + CHOSEN_AT + 4 * i) | kept);
    }
  }
  u32 count = 0;
  for (int i = first; i < last; ++i) count += __popc(load_shared<u32>(base + CHOSEN_AT + 4 * i));
  to += scan(count, base) - count;
  for (int i = first; i < last; ++i)
    for (u32 bits = load_shared<u32>(base + CHOSEN_AT + 4 * i); bits; bits &= bits - 1)
      *to++ = 32 * i + __ffs(bits) - 1;
}
