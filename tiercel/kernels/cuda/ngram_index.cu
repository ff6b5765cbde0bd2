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
// Step (parts == 0): a CTA per row. Its last warp looks the query up while the others insert; a
// window that is on its way in may be missed in the table, so those are compared with the query
// directly. Extension (parts > 0): `parts` CTAs per row insert and nobody drafts.
#define EMPTY 0x7fffffff
#define INSERTERS (THREADS - 32)

struct Index {
  int* slots;    // (rows, max_n - min_n + 1, capacity)
  int* inserted; // (rows, 2): followers below are done, in prompt and generated text
  int capacity;  // power of two
  int parts;
};

__device__ __forceinline__ unsigned hash_tokens(const Token* window, int n) {
  unsigned hash = 0x9e3779b9u * n;
  for (int k = 0; k < n; k++) hash = (hash ^ (unsigned)window[k]) * 0x85ebca6bu + (hash >> 15);
  hash ^= hash >> 16;
  hash *= 0xc2b2ae35u;
  return hash ^ hash >> 13;
}

__device__ __forceinline__ bool equal_tokens(const Token* a, const Token* b, int n) {
  bool same = true;
  for (int k = 0; k < n; k++) same &= a[k] == b[k];
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

__device__ __forceinline__ void insert(int* table, const Index& x, const Row& r, int place, int n,
                                       const Token* window, unsigned hash) {
  for (int probe = 0; probe < x.capacity; probe++) {
    int* slot = table + (hash + probe & x.capacity - 1);
    const int old = atomicCAS(slot, EMPTY, place);
    if (old == EMPTY || old == place) return;
    if (holds(r, old, window, n)) {
      if (place < old) atomicMin(slot, place);
      return;
    }
  }
}

__device__ __forceinline__ int look_up(const int* table, const Index& x, const Row& r, int n,
                                       const Token* query, unsigned hash) {
  for (int probe = 0; probe < x.capacity; probe++) {
    const int place = *(volatile const int*)(table + (hash + probe & x.capacity - 1));
    if (place == EMPTY || holds(r, place, query, n)) return place;
  }
  return EMPTY;
}

__device__ __forceinline__ u64 make_key(const Args& a, const Row& r, int n, int place) {
  const bool is_prompt = place < r.prompt_len;
  const u64 kind = is_prompt ? 0 : GENERATED;
  return (u64)(a.max_n - n) << 40 | kind | (u64)(is_prompt ? place : place - r.prompt_len);
}

// Insert the windows with followers from `from` to `stop` - 1 of one text; the key of the best one
// that equals the query. `lane` of `lanes` threads takes every lanes-th one.
__device__ __forceinline__ u64 insert_new(const Args& a, const Index& x, const Row& r, int row,
                                          int from, int stop, int offset, int lane, int lanes) {
  const unsigned sizes = a.max_n - a.min_n + 1;
  const Token* end = r.generated + r.step + a.query_shift;
  u64 best = NONE;
  // Unsigned: 64 sizes of 2**25 tokens pass 2**31.
  for (unsigned job = lane; job < (unsigned)max(0, stop - from) * sizes; job += lanes) {
    const int follower = from + (int)(job / sizes), n = a.min_n + (int)(job % sizes);
    if (follower < n) continue;
    const int place = offset + follower;
    const Token* window = window_at(r, place, n);
    if (n <= r.step && equal_tokens(window, end - n, n)) {
      const u64 key = make_key(a, r, n, place);
      best = key < best ? key : best;
    }
    insert(table_of(a, x, row, n), x, r, place, n, window, hash_tokens(window, n));
  }
  return best;
}

__device__ __forceinline__ void insert_row(const Args& a, const Index& x, const Row& r, int row,
                                           int lane, int lanes, u64& best) {
  const int* done = x.inserted + 2 * row;
  const u64 prompt = insert_new(a, x, r, row, max(1, done[0]), r.prompt_len, 0, lane, lanes);
  const u64 generated =
      insert_new(a, x, r, row, max(1, done[1]), r.step, r.prompt_len, lane, lanes);
  best = prompt < generated ? prompt : generated;
}

__device__ __forceinline__ void step_row(const Args& a, const Index& x, int row, u64* best) {
  const Share share = MatchRule::read(a, row);
  const Row r = read_row(a, row);
  if (threadIdx.x == 0) *best = NONE;
  __syncthreads();
  u64 key = NONE;
  if (share.is_active) {
    if (threadIdx.x < INSERTERS) {
      insert_row(a, x, r, row, threadIdx.x, INSERTERS, key);
    } else if (share.drafts && share.want > 0) {
      const Token* end = r.generated + r.step + a.query_shift;
      for (int n = a.max_n - ((int)threadIdx.x - INSERTERS); n >= a.min_n; n -= 32) {
        if (n > r.step) continue;
        const int place =
            look_up(table_of(a, x, row, n), x, r, n, end - n, hash_tokens(end - n, n));
        if (place != EMPTY) {
          const u64 found = make_key(a, r, n, place);
          key = found < key ? found : key;
        }
      }
    }
  }
  if (key != NONE) atomicMin(best, key);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (*best != NONE) a.workspace[1 + row] = *best;
    if (share.is_active) {
      x.inserted[2 * row] = max(x.inserted[2 * row], r.prompt_len);
      x.inserted[2 * row + 1] = max(x.inserted[2 * row + 1], r.step);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_index(const Args a,
                                                                       const Index x) {
  __shared__ Shared s;
  __shared__ u64 best;
  if (x.parts == 0) {
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) step_row(a, x, row, &best);
    if (take_ticket(a, s)) finish<MatchRule>(a, s);
    return;
  }
  for (int item = blockIdx.x; item < a.rows * x.parts; item += gridDim.x) {
    const int row = item / x.parts, part = item % x.parts;
    if (!MatchRule::read(a, row).is_active) continue;
    u64 unused;
    insert_row(a, x, read_row(a, row), row, part * THREADS + threadIdx.x, x.parts * THREADS,
               unused);
  }
  if (take_ticket(a, s)) {
    for (int row = threadIdx.x; row < a.rows; row += THREADS) {
      if (!MatchRule::read(a, row).is_active) continue;
      const Row r = read_row(a, row);
      x.inserted[2 * row] = max(x.inserted[2 * row], r.prompt_len);
      x.inserted[2 * row + 1] = max(x.inserted[2 * row + 1], r.step);
    }
    if (threadIdx.x == 0) a.workspace[0] = 0;
  }
}
