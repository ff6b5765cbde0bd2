// The search of ngram_match with an index of first occurrences, so that a step costs as much as it
// has new tokens. Behind: ngram_draft.cuh. Host side: ngram_index.py.
//
// Per row and window size n: an open-addressing table of places. A place names a window by its
// follower e: e in the prompt, prompt_len + e in the generated text; so the smallest place is the
// prompt before the generated text, and there the leftmost. A window is inserted once its follower
// is there. Insertion: claim an empty slot, or lower a slot that holds the same tokens; stored
// places are compared by their tokens, so a collision of hashes changes nothing, and a claimed slot
// keeps its n-gram, so the order of insertions does not matter either.
//
// Step (parts == 0): a warp per row. Its lanes look the query up, a size each, and insert new
// windows, all in one pass, since each is the same chain of trips to memory: tokens, slot, tokens
// at the slot's place. A window that is on its way in may be missed in the table, so those are
// compared with the query directly. Where the budget cannot bind, whatever is found, each warp writes the
// drafts of its row, and no row waits for another; else the last CTA divides the budget. Extension
// (parts > 0): `parts` CTAs per row insert and nobody drafts.
#define EMPTY 0x7fffffff
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
  return {follower < n ? 0 : n, place, window_at(r, place, n)};
}

// Do a job; the key of its window if that equals the query.
__device__ __forceinline__ u64 run_job(const Args& a, const Index& x, const Row& r, int row,
                                       const Job& job) {
  if (job.n == 0) return NONE;
  int* table = table_of(a, x, row, job.n);
  const unsigned hash = hash_tokens(job.window, job.n);
  int stored = *(volatile int*)(table + (hash & x.capacity - 1));
  u64 key = NONE; // of a new window, while the slot is on its way
  const Token* query = r.generated + r.step + a.query_shift - job.n;
  if (job.place >= 0 && job.n <= r.step && equal_tokens(job.window, query, job.n))
    key = make_key(a, r, job.n, job.place);
  for (int probe = 0; probe < x.capacity; probe++) {
    int* slot = table + (hash + probe & x.capacity - 1);
    if (probe) stored = *(volatile int*)slot;
    if (stored == EMPTY) {
      if (job.place < 0) return NONE;
      stored = atomicCAS(slot, EMPTY, job.place);
      if (stored == EMPTY) return key;
    }
    if (holds(r, stored, job.window, job.n)) {
      if (job.place < 0) return make_key(a, r, job.n, stored);
      if (job.place < stored) atomicMin(slot, job.place);
      return key;
    }
  }
  return key;
}

__device__ __forceinline__ void note_inserted(const Index& x, const Row& r, int row) {
  x.inserted[2 * row] = max(x.inserted[2 * row], r.prompt_len);
  x.inserted[2 * row + 1] = max(x.inserted[2 * row + 1], r.step);
}

// Insert and look up; the best key of a row, in all lanes of its warp.
__device__ __forceinline__ u64 search_row(const Args& a, const Index& x, const Share& share,
                                          const Row& r, int row) {
  const unsigned lane = threadIdx.x & 31;
  const News news = find_news(x, r, row);
  const Token* end = r.generated + r.step + a.query_shift;
  // Unsigned: 64 sizes of 2**25 tokens pass 2**31.
  const unsigned sizes = a.max_n - a.min_n + 1;
  const unsigned looks = share.drafts && share.want > 0 ? sizes : 0;
  u64 best = NONE;
  for (unsigned number = lane; number < looks + news.num_windows * sizes; number += 32) {
    const int n = a.min_n + (int)number;
    Job job = {n <= r.step ? n : 0, -1, end - n};
    if (number >= looks) job = make_insertion(a, r, news, number - looks);
    const u64 key = run_job(a, x, r, row, job);
    best = key < best ? key : best;
  }
  __syncwarp();
  if (lane == 0) note_inserted(x, r, row);
  return warp_min(best);
}

// Length and drafts of a row whose room is not bound by the budget, by one warp.
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
  if ((threadIdx.x & 31) == 0) MatchRule::write(a, row, share, count);
}

// Whether every row may draft as much as there is room for: no R of ngram_draft.cuh is below 2.
// All CTAs say the same, since nobody writes the lengths of rows in prefill.
__device__ __forceinline__ bool is_unbound(const Args& a, u64* held) {
  if (threadIdx.x == 0) *held = 0;
  __syncthreads();
  u64 sum = 0;
  for (int row = threadIdx.x; row < a.rows; row += THREADS) {
    const int length = a.lens[row];
    if (a.encoder[row] > 0) sum += max(0, length);
  }
  if (sum) atomicAdd(held, sum);
  __syncthreads();
  const long long most = (long long)a.rows * (1 + a.draft_room) + (long long)*held;
  return read_threshold(a) - most >= 2;
}

// Start reading a row's numbers, a lane each, while the budget is looked at.
__device__ __forceinline__ void prefetch_row(const Args& a, const Index& x, int row) {
  if (row >= a.rows) return;
  const void* place = x.inserted + 2 * row;
  switch (threadIdx.x & 31) {
    case 0: place = a.prompt_lens + row; break;
    case 1: place = a.generated_start + row; break;
    case 2: place = a.steps + row; break;
    case 3: place = a.max_dec + row; break;
    case 4: place = a.draft_limit + row; break;
    case 5: place = a.decoder + row; break;
  }
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_index(const Args a,
                                                                       const Index x) {
  __shared__ Shared s;
  __shared__ u64 held;
  if (x.parts == 0) {
    const int first = blockIdx.x * WARPS + threadIdx.x / 32;
    prefetch_row(a, x, first);
    const bool unbound = is_unbound(a, &held);
    for (int row = first; row < a.rows; row += gridDim.x * WARPS) {
      const Share share = MatchRule::read(a, row);
      const Row r = read_row(a, row);
      const u64 key = share.is_active ? search_row(a, x, share, r, row) : NONE;
      if (unbound) write_row(a, share, r, row, key);
      else if ((threadIdx.x & 31) == 0 && key != NONE) a.workspace[1 + row] = key;
    }
    if (!unbound && take_ticket(a, s)) finish<MatchRule>(a, s);
    return;
  }
  for (int item = blockIdx.x; item < a.rows * x.parts; item += gridDim.x) {
    const int row = item / x.parts, part = item % x.parts;
    if (!MatchRule::read(a, row).is_active) continue;
    const Row r = read_row(a, row);
    const News news = find_news(x, r, row);
    const unsigned jobs = news.num_windows * (a.max_n - a.min_n + 1);
    for (unsigned job = part * THREADS + threadIdx.x; job < jobs; job += x.parts * THREADS)
      run_job(a, x, r, row, make_insertion(a, r, news, job));
  }
  if (take_ticket(a, s)) {
    for (int row = threadIdx.x; row < a.rows; row += THREADS)
      if (MatchRule::read(a, row).is_active) note_inserted(x, read_row(a, row), row);
    if (threadIdx.x == 0) a.workspace[0] = 0;
  }
}
