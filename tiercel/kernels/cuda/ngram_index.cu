// The search of ngram_match with an index of first occurrences, so that a step costs as much as it
// has new tokens. Behind: ngram_draft.cuh. Host side: ngram_index.py.
//
// Per row and window size n: an open-addressing table of places, each with 8 bits of its window's
// hash below it, so that slots of other windows need no look at their tokens. A place names a
// window by its follower e: e in the prompt, prompt_len + e in the generated text; so the smallest
// place is the prompt before the generated text, and there the leftmost. A window is inserted once
// its follower is there. Probes begin at a multiple of four slots, which are read together.
// Insertion: claim an empty slot, or lower a slot that holds the same tokens; windows of equal hash
// bits are compared by their tokens, so a collision changes nothing, and a claimed slot keeps its
// n-gram, so the order of insertions does not matter either.
//
// Step (parts == 0): a warp per row. Its lanes look the query up, a size each, and insert new
// windows, all in one pass, since each is the same chain of trips to memory: tokens, slot, tokens
// at the slot's place. A window that is on its way in may be missed in the table, so those are
// compared with the query directly. Where the budget cannot bind, whatever is found, each warp
// writes the drafts of its row, and no row waits for another; else the last CTA divides the budget.
// Extension (parts > 0): `parts` CTAs per row insert and nobody drafts.
#define EMPTY 0x7fffffff
#define TAG_BITS 8
#define TAGS ((1 << TAG_BITS) - 1)
#define MAX_PLACE (EMPTY >> TAG_BITS) // places are below
#define WARPS (THREADS / 32)

struct Index {
  int* slots;    // (rows, max_n - min_n + 1, capacity)
  int* inserted; // (rows, 2): followers below are done, in prompt and generated text
  int capacity;  // power of two
  int parts;
};

// Four tokens at a time, so that a window costs one trip to memory.
__device__ __forceinline__ unsigned hash_tokens(const Token* window, int n) {
  unsigned hash = 0x9e3779b9u * n;
  for (int first = 0; first < n; first += 4) {
    Token token[4];
#pragma unroll
    for (int k = 0; k < 4; k++) token[k] = first + k < n ? window[first + k] : 0;
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (first + k < n) hash = (hash ^ (unsigned)token[k]) * 0x85ebca6bu + (hash >> 15);
  }
  hash ^= hash >> 16;
  hash *= 0xc2b2ae35u;
  return hash ^ hash >> 13;
}

__device__ __forceinline__ bool equal_tokens(const Token* a, const Token* b, int n) {
  bool same = true;
  for (int first = 0; first < n; first += 4) {
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (first + k < n) same &= a[first + k] == b[first + k];
  }
  return same;
}

__device__ __forceinline__ const Token* window_at(const Row& r, int place, int n) {
  return (place < r.prompt_len ? r.prompt + place : r.generated + (place - r.prompt_len)) - n;
}

// Whether the window of a stored place lies in its text: a table that was not cleared may name any.
__device__ __forceinline__ bool holds(const Row& r, int place, const Token* tokens, int n) {
  const int end = place < r.prompt_len ? place : place - r.prompt_len;
  if (end < n || place - r.prompt_len > r.step) return false;
  return equal_tokens(window_at(r, place, n), tokens, n);
}

__device__ __forceinline__ int* table_of(const Args& a, const Index& x, int row, int n) {
  // 64-bit: rows * sizes * capacity passes 2**31.
  return x.slots + ((long long)row * (a.max_n - a.min_n + 1) + n - a.min_n) * x.capacity;
}

__device__ __forceinline__ u64 make_key(const Args& a, const Row& r, int n, int place) {
  const bool is_prompt = place < r.prompt_len;
  const u64 kind = is_prompt ? 0 : GENERATED;
  return (u64)(a.max_n - n) << 40 | kind | (u64)(is_prompt ? place : place - r.prompt_len);
}

// What a thread does in a table: insert a window, look one up (place < 0), or nothing (n == 0).
struct Job {
  int n, place;
  const Token* window;
};

// New windows of a row: followers from the first ones on, of both texts in turn.
struct News {
  int prompt, generated;            // first followers
  unsigned num_prompt, num_windows; // followers of the prompt, of both
};

__device__ __forceinline__ News find_news(const Index& x, const Row& r, int row) {
  const int prompt = max(1, x.inserted[2 * row]), generated = max(1, x.inserted[2 * row + 1]);
  const unsigned num_prompt = max(0, r.prompt_len - prompt);
  return {prompt, generated, num_prompt, num_prompt + max(0, r.step - generated)};
}

// Insertion `number`, counted over followers and sizes.
__device__ __forceinline__ Job make_insertion(const Args& a, const Row& r, const News& news,
                                              unsigned number) {
  const unsigned sizes = a.max_n - a.min_n + 1, nth = number / sizes;
  const int n = a.min_n + (int)(number % sizes);
  const bool is_prompt = nth < news.num_prompt;
  const int follower = is_prompt ? news.prompt + (int)nth
                                 : news.generated + (int)(nth - news.num_prompt);
  const int place = is_prompt ? follower : r.prompt_len + follower;
  return {follower < n || place >= MAX_PLACE ? 0 : n, place, window_at(r, place, n)};
}

__device__ __forceinline__ int4 read_slots(const int* slots) { // past L1: others write them
  int4 v;
  asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(slots));
  return v;
}

// An insertion under way: `slot` is where the window goes, null for nowhere, and `old` what was
// there. Nobody waits for `old` before `settle`.
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

// Look a job's window up, or begin to insert it; the key of the window if it is in the table and
// wanted, or new and equal to the query.
__device__ __forceinline__ u64 run_job(const Args& a, const Index& x, const Row& r, int row,
                                       const Job& job, Claim& claim) {
  claim.slot = nullptr;
  if (job.n == 0) return NONE;
  claim.job = job;
  claim.table = table_of(a, x, row, job.n);
  const unsigned hash = hash_tokens(job.window, job.n);
  const int tag = hash >> 32 - TAG_BITS, start = hash & x.capacity - 1 & ~3;
  claim.value = job.place << TAG_BITS | tag;
  int4 v = read_slots(claim.table + start);
  u64 key = NONE; // of a new window, while the slots are on their way
  const Token* query = r.generated + r.step + a.query_shift - job.n;
  if (job.place >= 0 && job.n <= r.step && equal_tokens(job.window, query, job.n))
    key = make_key(a, r, job.n, job.place);
  for (int first = 0; first < x.capacity; first += 4) {
    int* slots = claim.table + (start + first & x.capacity - 1);
    if (first) v = read_slots(slots);
    const int stored[4] = {v.x, v.y, v.z, v.w};
    unsigned equal = 0, empty = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      equal |= (unsigned)((stored[k] & TAGS) == tag) << k;
      empty |= (unsigned)(stored[k] == EMPTY) << k;
    }
    const int stop = empty ? __ffs(empty) - 1 : 4;
    equal &= (1u << stop) - 1;
    if (!equal && stop < 4) { // before other lanes read tokens
      begin_insertion(claim, slots + stop);
      return key;
    }
    while (equal) { // one, as a rule, so that all lanes of a warp read their tokens together
      const int k = __ffs(equal) - 1;
      equal &= equal - 1;
      const int place = (k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w) >> TAG_BITS;
      if (!holds(r, place, job.window, job.n)) continue;
      if (job.place < 0) return make_key(a, r, job.n, place);
      if (job.place < place) atomicMin(slots + k, claim.value);
      return key;
    }
    if (stop == 4) continue;
    begin_insertion(claim, slots + stop);
    return key;
  }
  return key;
}

// End an insertion: where another one took its slot, go on from there.
__device__ __forceinline__ void settle(const Index& x, const Row& r, const Claim& claim) {
  if (!claim.slot) return;
  int* slot = claim.slot;
  int old = claim.old;
  for (int probe = 0; probe < x.capacity && old != EMPTY; probe++) {
    if ((old & TAGS) == (claim.value & TAGS) &&
        holds(r, old >> TAG_BITS, claim.job.window, claim.job.n)) {
      if (claim.value < old) atomicMin(slot, claim.value);
      return;
    }
    slot = claim.table + ((int)(slot - claim.table) + 1 & x.capacity - 1);
    old = atomicCAS(slot, EMPTY, claim.value);
  }
}

__device__ __forceinline__ void note_inserted(const Index& x, const Row& r, int row) {
  x.inserted[2 * row] = max(x.inserted[2 * row], r.prompt_len);
  x.inserted[2 * row + 1] = max(x.inserted[2 * row + 1], r.step);
}

// Look up and insert; the best key of a row, in all lanes of its warp. The last insertions are not
// settled: their slots may be on the way.
__device__ __forceinline__ u64 search_row(const Args& a, const Index& x, const Share& share,
                                          const Row& r, const News& news, int row, Claim& claim) {
  claim.slot = nullptr;
  if (!share.is_active) return NONE;
  const unsigned lane = threadIdx.x & 31;
  const Token* end = r.generated + r.step + a.query_shift;
  // Unsigned: 64 sizes of 2**25 tokens pass 2**31.
  const unsigned sizes = a.max_n - a.min_n + 1;
  const unsigned looks = share.drafts && share.want > 0 ? sizes : 0;
  u64 best = NONE;
  for (unsigned number = lane; number < looks + news.num_windows * sizes; number += 32) {
    settle(x, r, claim);
    const int n = a.min_n + (int)number;
    Job job = {n <= r.step ? n : 0, -1, end - n};
    if (number >= looks) job = make_insertion(a, r, news, number - looks);
    const u64 key = run_job(a, x, r, row, job, claim);
    best = key < best ? key : best;
  }
  __syncwarp();
  if (lane == 0) note_inserted(x, r, row);
  return warp_min(best);
}

// Whether every row may draft as much as there is room for: no R of ngram_draft.cuh is below 2.
// All CTAs say the same, since nobody writes the lengths of rows in prefill.
__device__ __forceinline__ bool is_unbound(const Args& a, u64 held, u64* sum) {
  for (int row = threadIdx.x + THREADS; row < a.rows; row += THREADS)
    if (a.encoder[row] > 0) held += max(0, a.lens[row]);
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  if (held) atomicAdd(sum, held);
  __syncthreads();
  const long long most = (long long)a.rows * (1 + a.draft_room) + (long long)*sum;
  return read_threshold(a) - most >= 2;
}

__device__ __forceinline__ void step(const Args& a, const Index& x, Shared& s, u64* sum) {
  int row = blockIdx.x * WARPS + threadIdx.x / 32;
  // All that the first row and the budget need is read at once.
  const int first = min(row, a.rows - 1), mine = min((int)threadIdx.x, a.rows - 1);
  const int encoder = a.encoder[mine], length = a.lens[mine];
  Share share = MatchRule::read(a, first);
  Row r = read_row(a, first);
  News news = find_news(x, r, first);
  const bool is_held = threadIdx.x < a.rows && encoder > 0 && length > 0;
  const bool unbound = is_unbound(a, is_held ? length : 0, sum);
  while (row < a.rows) {
    Claim claim;
    const u64 key = search_row(a, x, share, r, news, row, claim);
    if (unbound) write_row<MatchRule>(a, share, r, row, key);
    else if ((threadIdx.x & 31) == 0 && key != NONE) a.workspace[1 + row] = key;
    settle(x, r, claim);
    row += gridDim.x * WARPS;
    if (row >= a.rows) break;
    share = MatchRule::read(a, row);
    r = read_row(a, row);
    news = find_news(x, r, row);
  }
  if (!unbound && take_ticket(a, s)) finish<MatchRule>(a, s);
}

__device__ __forceinline__ void extend(const Args& a, const Index& x, Shared& s) {
  for (int item = blockIdx.x; item < a.rows * x.parts; item += gridDim.x) {
    const int row = item / x.parts, part = item % x.parts;
    if (!MatchRule::read(a, row).is_active) continue;
    const Row r = read_row(a, row);
    const News news = find_news(x, r, row);
    const unsigned jobs = news.num_windows * (a.max_n - a.min_n + 1);
    for (unsigned job = part * THREADS + threadIdx.x; job < jobs; job += x.parts * THREADS) {
      Claim claim;
      run_job(a, x, r, row, make_insertion(a, r, news, job), claim);
      settle(x, r, claim);
    }
  }
  if (!take_ticket(a, s)) return;
  for (int row = threadIdx.x; row < a.rows; row += THREADS)
    if (MatchRule::read(a, row).is_active) note_inserted(x, read_row(a, row), row);
  if (threadIdx.x == 0) a.workspace[0] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_index(const Args a,
                                                                       const Index x) {
  __shared__ Shared s;
  __shared__ u64 sum;
  if (x.parts == 0) step(a, x, s, &sum);
  else extend(a, x, s);
}
