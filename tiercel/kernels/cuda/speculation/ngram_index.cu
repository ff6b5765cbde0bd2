// ngram_index: the search of ngram_match with an index of first occurrences, so that a step's cost
// depends on its new tokens alone. Layouts: `Args` of ngram_tiles.cuh and `Index`. Host side:
// ngram_index.py.
//
// Per row and window size n: an open-addressing table of places, each with 8 bits of its window's
// hash below it, so that slots of other windows need no look at their tokens. A place names a
// window by its follower e: e in the prompt, prompt_len + e in the generated text; so the smallest
// place is the prompt before the generated text, and there the leftmost. A window is inserted once
// its follower is there. Probes begin at a multiple of 16 slots, which are read together: 64 bytes
// cost memory what 16 do, and hardly a window is after them.
// Insertion: claim an empty slot, or lower a slot that holds the same tokens; windows of equal hash
// bits are compared by their tokens, so a collision changes nothing, and a claimed slot keeps its
// n-gram, so the order of insertions does not matter either.
//
// Step (parts == 0): a CTA of two warps per row. One looks the query up, a size each lane, and
// inserts new windows, all in one pass, since each is the same chain of trips to memory: tokens,
// slots, tokens at a slot's place. A window that is on its way in may be missed in the table, so
// those are compared with the query directly. The other warp sees whether the budget can bind,
// whatever is found: where it cannot, the row's drafts are written immediately, and no row waits
// for another; else the last CTA divides the budget. Extension (parts > 0): `parts` CTAs per row
// insert, and no row drafts.
//
// Macros besides those of ngram_tiles.cuh: LARGEST_N, of the windows; 4 at most are in registers.
#include "speculation/ngram_draft.cuh"

#define EMPTY 0x7fffffff
#define TAG_BITS 8
#define TAGS ((1 << TAG_BITS) - 1)
#define PLACE_BITS (31 - TAG_BITS)
#define MAX_PLACE (EMPTY >> TAG_BITS) // places are below
#define NO_RANK 0xffffffffu
#define GROUP 16 // slots that are read together

struct Index {
  int* slots;    // (rows, max_n - min_n + 1, capacity)
  int* inserted; // (rows, 2): followers below are done, in prompt and generated text
  int capacity;  // power of two
  int parts;
};

// Four tokens of a window that has `count` more, zeros after them; one trip to memory.
__device__ __forceinline__ void read_tokens(const Token* tokens, int count, Token (&token)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) token[k] = k < count ? tokens[k] : 0;
}

__device__ __forceinline__ unsigned mix(unsigned hash, const Token (&token)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) hash = (hash ^ (unsigned)token[k]) * 0x85ebca6bu + (hash >> 15);
  return hash;
}

// Of a window of n tokens, the first of which are at hand.
__device__ __forceinline__ unsigned hash_window(const Token* window, int n,
                                                const Token (&head)[4]) {
  unsigned hash = mix(0x9e3779b9u * n, head);
  for (int first = 4; LARGEST_N > 4 && first < n; first += 4) {
    Token token[4];
    read_tokens(window + first, n - first, token);
    hash = mix(hash, token);
  }
  hash ^= hash >> 16;
  hash *= 0xc2b2ae35u;
  return hash ^ hash >> 13;
}

__device__ __forceinline__ bool equal_four(const Token (&a)[4], const Token (&b)[4]) {
  return a[0] == b[0] & a[1] == b[1] & a[2] == b[2] & a[3] == b[3];
}

// Whether other tokens are those of a window, whose head is at hand.
__device__ __forceinline__ bool equal_window(const Token* other, const Token* window, int n,
                                             const Token (&head)[4]) {
  Token token[4], wanted[4];
  read_tokens(other, n, token);
  bool same = equal_four(token, head);
  for (int first = 4; LARGEST_N > 4 && same && first < n; first += 4) {
    read_tokens(other + first, n - first, token);
    read_tokens(window + first, n - first, wanted);
    same = equal_four(token, wanted);
  }
  return same;
}

__device__ __forceinline__ const Token* window_at(const Row& r, int place, int n) {
  return (place < r.prompt_len ? r.prompt + place : r.generated + (place - r.prompt_len)) - n;
}

// Whether a stored place is within its text: a table that was not cleared may hold any.
__device__ __forceinline__ bool is_inside(const Row& r, int place, int n) {
  const int end = place < r.prompt_len ? place : place - r.prompt_len;
  return end >= n && place - r.prompt_len <= r.step;
}

__device__ __forceinline__ int* table_of(const Args& a, const Index& x, int row, int n) {
  // 64-bit: rows * sizes * capacity passes 2**31.
  return x.slots + ((long long)row * (a.max_n - a.min_n + 1) + n - a.min_n) * x.capacity;
}

// The smallest is the best: the longest window, of equal ones the first place.
__device__ __forceinline__ unsigned make_rank(const Args& a, int n, int place) {
  return (unsigned)(a.max_n - n) << PLACE_BITS | place;
}

// The key of ngram_tiles.cuh.
__device__ __forceinline__ u64 make_key(const Row& r, unsigned rank) {
  if (rank == NO_RANK) return NONE;
  const int place = rank & (1 << PLACE_BITS) - 1;
  const bool is_prompt = place < r.prompt_len;
  const u64 kind = is_prompt ? 0 : GENERATED;
  return (u64)(rank >> PLACE_BITS) << 40 | kind | (u64)(is_prompt ? place : place - r.prompt_len);
}

// What a thread does in a table: insert a window, look one up (place < 0), or nothing (n == 0).
struct Job {
  int n, place;
  const Token* window;
};

// New windows of a row: followers from the first ones on, of both texts in turn.
struct News {
  int prompt, generated;              // first followers
  unsigned num_prompt, num_followers; // of the prompt, of both
};

// Loaded together with the other fields of the row table, not after one of them.
__device__ __forceinline__ int2 read_inserted(const Index& x, int row) {
  return load_pair(x.inserted + 2 * row);
}

__device__ __forceinline__ News find_news(const Row& r, int2 inserted) {
  const int prompt = max(1, inserted.x), generated = max(1, inserted.y);
  const unsigned num_prompt = max(0, r.prompt_len - prompt);
  return {prompt, generated, num_prompt, num_prompt + max(0, r.step - generated)};
}

// Jobs are counted over followers and, below, sizes up to a power of two: log2 of that.
__device__ __forceinline__ int log2_sizes(const Args& a) { return 32 - __clz(a.max_n - a.min_n); }

// The insertions of the nth new follower.
__device__ __forceinline__ Job make_insertion(const Row& r, const News& news, unsigned nth, int n) {
  const bool is_prompt = nth < news.num_prompt;
  const int follower = is_prompt ? news.prompt + (int)nth
                                 : news.generated + (int)(nth - news.num_prompt);
  const int place = is_prompt ? follower : r.prompt_len + follower;
  return {follower < n || place >= MAX_PLACE ? 0 : n, place, window_at(r, place, n)};
}

__device__ __forceinline__ void read_slots(const int* slots, int (&slot)[GROUP]) {
#pragma unroll
  for (int k = 0; k < GROUP; k += 4) load_volatile((int(&)[4])slot[k], slots + k);
}

// An insertion under way: `slot` is where the window goes, null for nowhere, and `old` what was
// there. `old` is first awaited in `settle`.
struct Claim {
  Job job;
  int *table, *slot;
  int value, old;
};

__device__ __forceinline__ void begin_insertion(Claim& claim, int* slot) {
  if (claim.job.place < 0) return;
  claim.slot = slot;
  claim.old = atomicCAS(slot, EMPTY, claim.value);
}

// Look a job's window up, or begin to insert it; the rank of the window if it is in the table
// and wanted, or new and equal to the query. `want`: tokens after a found one that will be read.
__device__ __forceinline__ unsigned run_job(const Args& a, const Index& x, const Row& r, int row,
                                            const Job& job, int want, Claim& claim) {
  claim.slot = nullptr;
  if (job.n == 0) return NO_RANK;
  claim.job = job;
  claim.table = table_of(a, x, row, job.n);
  Token head[4];
  read_tokens(job.window, job.n, head);
  const unsigned hash = hash_window(job.window, job.n, head);
  const int tag = hash >> 32 - TAG_BITS, start = hash & x.capacity - 1 & ~(GROUP - 1);
  claim.value = job.place << TAG_BITS | tag;
  int stored[GROUP];
  read_slots(claim.table + start, stored);
  unsigned rank = NO_RANK; // of a new window, while the slots are on their way
  const Token* query = r.generated + r.step + a.query_shift - job.n;
  if (job.place >= 0 && job.n <= r.step && equal_window(query, job.window, job.n, head))
    rank = make_rank(a, job.n, job.place);
  for (int first = 0; first < x.capacity; first += GROUP) {
    int* slots = claim.table + (start + first & x.capacity - 1);
    if (first) read_slots(slots, stored);
    unsigned equal = 0, empty = 0;
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      equal |= (unsigned)((stored[k] & TAGS) == tag) << k;
      empty |= (unsigned)(stored[k] == EMPTY) << k;
    }
    const int stop = empty ? __ffs(empty) - 1 : GROUP;
    equal &= (1u << stop) - 1;
    if (!equal && stop < GROUP) { // before other lanes read tokens
      begin_insertion(claim, slots + stop);
      return rank;
    }
    while (equal) { // one, as a rule, so that all lanes of a warp read their tokens together
      const int k = __ffs(equal) - 1;
      equal &= equal - 1;
      int value = stored[0];
#pragma unroll
      for (int other = 1; other < GROUP; other++) value = k == other ? stored[other] : value;
      const int place = value >> TAG_BITS;
      if (!is_inside(r, place, job.n)) continue;
      const Token* follower = window_at(r, place, 0);
      if (job.place < 0) { // the drafts, if this is the window that is taken
        const Token* last = place < r.prompt_len ? r.prompt + r.prompt_len : r.generated + r.step;
        prefetch(follower);
        prefetch(follower + want < last ? follower + want - 1 : last - 1);
      }
      if (!equal_window(follower - job.n, job.window, job.n, head)) continue;
      if (job.place < 0) return make_rank(a, job.n, place);
      if (job.place < place) atomicMin(slots + k, claim.value);
      return rank;
    }
    if (stop == GROUP) continue;
    begin_insertion(claim, slots + stop);
    return rank;
  }
  return rank;
}

// End an insertion: where another one took its slot, go on from there.
__device__ __forceinline__ void settle(const Index& x, const Row& r, const Claim& claim) {
  if (!claim.slot) return;
  int* slot = claim.slot;
  int old = claim.old;
  for (int probe = 0; probe < x.capacity && old != EMPTY; probe++) {
    const int n = claim.job.n, place = old >> TAG_BITS;
    if ((old & TAGS) == (claim.value & TAGS) && is_inside(r, place, n)) {
      Token head[4];
      read_tokens(claim.job.window, n, head);
      if (equal_window(window_at(r, place, n), claim.job.window, n, head)) {
        if (claim.value < old) atomicMin(slot, claim.value);
        return;
      }
    }
    slot = claim.table + ((int)(slot - claim.table) + 1 & x.capacity - 1);
    old = atomicCAS(slot, EMPTY, claim.value);
  }
}

__device__ __forceinline__ void note_inserted(const Index& x, const Row& r, int row, int prompt,
                                              int generated) {
  x.inserted[2 * row] = max(prompt, r.prompt_len);
  x.inserted[2 * row + 1] = max(generated, r.step);
}

// Whether every row may draft as much as there is room for: no R of ngram_draft.cuh is below 2.
// For a warp; all CTAs agree, since no kernel writes the lengths of rows in prefill.
__device__ __forceinline__ bool is_unbound(const Args& a) {
  long long held = 0;
#pragma unroll 8
  for (int row = threadIdx.x & 31; row < a.rows; row += 32)
    if (a.encoder[row] > 0) held += max(0, a.lens[row]);
  long long most = (long long)a.rows * (1 + a.draft_room);
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) held += __shfl_xor_sync(FULL, held, lane);
  return read_threshold(a) - most - held >= 2;
}

// Look up and insert; the best rank of a row, in all lanes of its warp. The last insertions are not
// settled: their slots may be on the way.
__device__ __forceinline__ unsigned search_row(const Args& a, const Index& x, const Share& share,
                                               const Row& r, const News& news, int row,
                                               Claim& claim) {
  const unsigned lane = threadIdx.x & 31;
  const int shift = log2_sizes(a);
  const Token* end = r.generated + r.step + a.query_shift;
  unsigned best = NO_RANK;
  // Unsigned: 64 sizes of 2**25 tokens pass 2**31. Follower 0 stands for the query.
  for (unsigned number = lane; number >> shift <= news.num_followers; number += 32) {
    settle(x, r, claim);
    const unsigned nth = number >> shift;
    const int n = a.min_n + (int)(number & (1u << shift) - 1);
    Job job = {share.drafts && share.want > 0 && n <= r.step ? n : 0, -1, end - n};
    if (nth) job = make_insertion(r, news, nth - 1, n);
    if (n > a.max_n) job.n = 0;
    best = min(best, run_job(a, x, r, row, job, share.want, claim));
  }
  __syncwarp();
  if (lane == 0) note_inserted(x, r, row, news.prompt, news.generated);
  return __reduce_min_sync(FULL, best);
}

__device__ __forceinline__ void step(const Args& a, const Index& x, Shared& s) {
  bool unbound = false;
  for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Share share;
    Row r;
    Claim claim;
    unsigned best = NO_RANK;
    if (threadIdx.x < 32) {
      const int2 inserted = read_inserted(x, row);
      share = MatchRule::read(a, row);
      r = read_row(a, row);
      claim.slot = nullptr;
      if (share.is_active)
        best = search_row(a, x, share, r, find_news(r, inserted), row, claim);
    } else {
      unbound = is_unbound(a);
    }
    unbound = __syncthreads_or(unbound);
    if (threadIdx.x >= 32) continue;
    const u64 key = make_key(r, best);
    if (unbound) write_row<MatchRule>(a, share, r, row, key);
    else if (threadIdx.x == 0 && key != NONE) a.workspace[1 + row] = key;
    settle(x, r, claim);
  }
  if (!unbound && take_ticket(a, s)) finish<MatchRule>(a, s);
}

__device__ __forceinline__ void extend(const Args& a, const Index& x, Shared& s) {
  const int shift = log2_sizes(a);
  for (int item = blockIdx.x; item < a.rows * x.parts; item += gridDim.x) {
    const int row = item / x.parts, part = item % x.parts;
    if (!MatchRule::read(a, row).is_active) continue;
    const Row r = read_row(a, row);
    const News news = find_news(r, read_inserted(x, row));
    const unsigned jobs = news.num_followers << shift;
    for (unsigned job = part * THREADS + threadIdx.x; job < jobs; job += x.parts * THREADS) {
      const int n = a.min_n + (int)(job & (1u << shift) - 1);
      Claim claim;
      Job insertion = make_insertion(r, news, job >> shift, n);
      if (n > a.max_n) insertion.n = 0;
      run_job(a, x, r, row, insertion, 0, claim);
      settle(x, r, claim);
    }
  }
  if (!take_ticket(a, s)) return;
  for (int row = threadIdx.x; row < a.rows; row += THREADS)
    if (MatchRule::read(a, row).is_active)
      note_inserted(x, read_row(a, row), row, x.inserted[2 * row], x.inserted[2 * row + 1]);
  if (threadIdx.x == 0) a.workspace[0] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_index(const Args a,
                                                                       const Index x) {
  __shared__ Shared s;
  wait_for_inputs();
  if (x.parts == 0) step(a, x, s);
  else extend(a, x, s);
}
