// n-gram drafts: after the search of ngram_tiles.cuh, the budget is divided and drafts are written.
#pragma once

#include "speculation/ngram_tiles.cuh"

// Copy the drafts of `rows` rows, below 2**log2_width each. A few instructions a token: one CTA of
// few warps waits for each of them. COPIES rows of a thread are in flight.
template <int COPIES>
__device__ __forceinline__ void copy_drafts(const Shared& s, int rows, int log2_width) {
  const int step = THREADS >> log2_width; // rows at a time
  const int slot = threadIdx.x & (1 << log2_width) - 1;
  for (int row = threadIdx.x >> log2_width; row < rows; row += COPIES * step) {
    Token token[COPIES];
#pragma unroll
    for (int k = 0; k < COPIES; k++) {
      const int at = row + k * step;
      if (at < rows && slot < s.count[at]) token[k] = s.copy[at].source[slot];
    }
#pragma unroll
    for (int k = 0; k < COPIES; k++) {
      const int at = row + k * step;
      if (at < rows && slot < s.count[at]) s.copy[at].target[slot] = token[k];
    }
  }
}

// Length and drafts of a row whose room is not bound by the budget, by one warp.
template <class Rule>
__device__ __forceinline__ void write_row(const Args& a, const Share& share, const Row& r, int row,
                                          u64 key) {
  int count = 0;
  const bool is_generated = key & GENERATED;
  const int follower = (int)(key & (GENERATED - 1));
  if (share.drafts && key != NONE)
    count = max(0, min(min(share.want, (is_generated ? r.step : r.prompt_len) - follower),
                       a.draft_room - share.base));
  const Token* source = (is_generated ? r.generated : r.prompt) + follower;
  Token* target = a.drafts + row * a.draft_stride + share.base;
  for (int slot = threadIdx.x & 31; slot < count; slot += 32) target[slot] = source[slot];
  if ((threadIdx.x & 31) == 0) Rule::write(a, row, share, count);
}

template <class Rule>
__device__ __forceinline__ int count_active(const Args& a) {
  int active = 0;
  for (int first = 0; first < a.rows; first += THREADS) {
    const int row = first + threadIdx.x;
    active += __syncthreads_count(row < a.rows && Rule::read(a, row).is_active);
  }
  return active;
}

// Divide the budget, write lengths and drafts, and clean the workspace; one CTA, after all others.
template <class Rule>
__device__ __forceinline__ void finish(const Args& a, Shared& s) {
  int left = read_threshold(a);
  if (a.rows > THREADS) left -= count_active<Rule>(a);
  for (int first = 0; first < a.rows; first += THREADS) {
    if (threadIdx.x == 0) s.width = 0;
    const int row = first + threadIdx.x;
    Share share = {false, false, 0, 0, 0};
    int found = 0;
    if (row < a.rows) {
      share = Rule::read(a, row);
      const Row r = read_row(a, row); // before the key is known: loads overlap
      const u64 key = read_key(a.workspace + 1 + row);
      a.workspace[1 + row] = NONE;
      const bool is_generated = key & GENERATED;
      const int follower = (int)(key & (GENERATED - 1));
      s.copy[threadIdx.x] = {(is_generated ? r.generated : r.prompt) + follower,
                             a.drafts + row * a.draft_stride + share.base};
      if (share.drafts && share.base >= 0 && key != NONE)
        found = max(0, min(min(share.want, (is_generated ? r.step : r.prompt_len) - follower),
                           a.draft_room - share.base));
    }
    if (a.rows <= THREADS) left -= __syncthreads_count(share.is_active);
    int total;
    const int sum = block_scan(share.weight + found, s.warp_sums, total);
    const int room = left - (sum - found);
    const int count = room >= 2 ? min(found, room) : 0;
    left -= total;
    s.count[threadIdx.x] = count;
    if (row < a.rows) Rule::write(a, row, share, count);
    const int most = __reduce_max_sync(FULL, count);
    if ((threadIdx.x & 31) == 0) atomicMax(&s.width, most);
    __syncthreads();
    const int log2_width = 32 - __clz(s.width); // 2**log2_width > every count
    const int rows = min(THREADS, a.rows - first);
    if (s.width && 1 << log2_width <= THREADS) {
      if (rows <= 4 * (THREADS >> log2_width)) copy_drafts<4>(s, rows, log2_width);
      else copy_drafts<64 / TOKEN_BYTES>(s, rows, log2_width);
    } else if (s.width) { // more drafts than threads
      for (int at = 0; at < rows; at++)
        for (int slot = threadIdx.x; slot < s.count[at]; slot += THREADS)
          s.copy[at].target[slot] = s.copy[at].source[slot];
    }
    __syncthreads(); // the arrays and the width have been read
  }
  if (threadIdx.x == 0) a.workspace[0] = 0;
}

// Whether all other CTAs have come here before; what they wrote is visible then.
__device__ __forceinline__ bool take_ticket(const Args& a, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    s.is_last = atomicAdd((unsigned*)a.workspace, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return s.is_last;
}

template <class Rule>
__device__ __forceinline__ void draft(const Args& a) {
  __shared__ Shared s;
  int rows = a.rows, tiles = a.max_tiles, turn = 0;
  if (a.is_pruning && prune<Rule>(a, s, rows, tiles)) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
      if (threadIdx.x == 0) s.best = NONE;
      const bool is_searched = search_tile<Rule, true>(a, s, row, 0, turn);
      turn ^= 1;
      if (is_searched) __syncthreads();
      if (threadIdx.x < 32) {
        const u64 key = is_searched ? s.best : NONE;
        __syncwarp(); // before thread 0 sets it again
        write_row<Rule>(a, Rule::read(a, row), read_row(a, row), row, key);
      }
    }
    return;
  }
  const int items = rows * tiles; // below 2**31: checked on the host
  for (int item = blockIdx.x; item < items; item += gridDim.x)
    turn ^= search_tile<Rule, false>(a, s, item % rows, item / rows, turn);
  if (take_ticket(a, s)) finish<Rule>(a, s);
}

// The rule of ngram_match and ngram_index. A row in prefill (E) keeps its length, an idle one (I)
// gets 0, the others (D) 1 + drafts. The reserve u0 counts E and D rows and is given back by D rows
// alone: a D row lowers it by one and holds one token, so its weight is 0; an E row's weight is its
// length.
struct MatchRule {
  static constexpr bool IS_PRIVATE = true; // what a row writes no other row reads
  static __device__ __forceinline__ Share read(const Args& a, int row) {
    const int encoder = a.encoder[row], decoder = a.decoder[row];
    const bool is_prefill = encoder > 0;
    const long long to_limit = (long long)a.max_dec[row] - (long long)a.steps[row] - 1;
    const long long limit = a.draft_limit[row];
    Share share;
    share.is_active = is_prefill || decoder > 0;
    share.drafts = !is_prefill && decoder != 0;
    share.want = clamp(limit < to_limit ? limit : to_limit, 0, a.draft_room);
    share.base = 1;
    share.weight = is_prefill ? a.lens[row] : 0;
    return share;
  }
  static __device__ __forceinline__ void write(const Args& a, int row, const Share& share,
                                               int count) {
    if (share.drafts)
      a.lens[row] = 1 + count;
    else if (a.encoder[row] <= 0)
      a.lens[row] = 0;
  }
};
