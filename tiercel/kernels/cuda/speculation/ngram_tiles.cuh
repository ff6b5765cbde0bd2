// n-gram drafts, of ngram_match, hybrid_mtp_ngram and ngram_index: one launch searches, divides the
// budget and writes. The search is in this file, the steps after it in ngram_draft.cuh. Host side:
// ngram_launch.py; proofs of the rules: ops/ngram_match_torch.py.
//
// One pass: the window that ends at token i of a haystack matches n tokens iff the longest common
// suffix of hay[0..i] and the query is at least n. So the wanted window has the smallest
//   key = (max_n - matched) << 40 | kind << 39 | follower      kind 0: prompt, 1: generated
// over all i with a follower. Every token is compared with the query's last one; only equal ones
// are extended backwards, and only as far as they can still beat the best key.
//
// A row's text is its prompt's 16-byte vectors, then those of its generated text. Work item: (tile
// of vectors, row), tile 0 of all rows first; CTAs are persistent. Rows that the budget kills
// before any search are left out: R below, without drafts, never rises from row to row, so they
// are all rows from the first one on.
//
// Budget, rows in order: R_i = T - u0 - sum_{j<=i} weight_j - sum_{j<i} c_j, and a row drafts
// min(c_i, R_i) if R_i >= 2. The CTA that takes the last ticket does this scan and writes. Where
// the row table shows that every row is one tile, and that the budget cannot bind whatever is
// found, each CTA writes its rows itself: the scan would take a quarter of the time of 512 rows.
//
// Workspace: ticket (8 bytes, 0 between launches), then a key per row (~0 between launches).
//
// Macros: TOKEN_BYTES and LENGTH_BYTES (4 or 8), THREADS of a CTA, UNROLL 16-byte loads in flight
// of a thread, CTAS per multiprocessor.
#pragma once

#include "speculation/ngram_ptx.cuh"

#if TOKEN_BYTES == 8
typedef long long Token;
#else
typedef int Token;
#endif
#if LENGTH_BYTES == 8
typedef long long Length;
#else
typedef int Length;
#endif
#define LANES (16 / TOKEN_BYTES) // tokens of a load
#define MAX_N 64
#define FULL 0xffffffffu
#define NONE (~0ull)
#define PLACE_MASK ((1ull << 40) - 1) // kind and follower
#define GENERATED (1ull << 39)

struct __align__(16) Vector { Token token[LANES]; };

// A row vector holds one number per row; those of one op are null in the other.
struct Args {
  const Token* prompt;        // (rows, prompt_room)
  const Token* generated;     // (rows, generated_room); a row begins at generated_start
  Token* drafts;              // (rows, draft_room)
  const Length* prompt_lens;
  const Length* generated_start; // null: 0
  const Length* steps;
  const Length* max_dec;
  const int* draft_limit;     // ngram_match
  int* lens;
  const int* encoder;         // ngram_match
  const int* decoder;
  u64* workspace;             // (1 + rows)
  const int* device_threshold; // null: threshold
  long long prompt_stride, generated_stride, draft_stride; // tokens from row to row
  int rows, prompt_room, generated_room, draft_room;
  int max_n, min_n, max_drafts; // max_drafts: hybrid_mtp_ngram
  int query_shift;            // 1: the query ends with G[s], 0: with G[s-1]
  int threshold;
  int log2_tile;              // of the vectors of a tile, >= 3
  int max_tiles;              // of a row
  int is_pruning;             // look for rows that the budget kills, and for the most tiles
};

// What a rule says of a row before any draft.
struct Share {
  bool is_active; // counts in u0
  bool drafts;    // takes part
  int want;       // drafts at most, may be <= 0
  int base;       // tokens before the drafts
  int weight;     // lowers R from this row on, >= 0
};

// The two token sequences of a row, lengths within their rooms.
struct Row {
  const Token *prompt, *generated;
  int prompt_len, step;
};

__device__ __forceinline__ int clamp(long long value, int low, int high) {
  return value < low ? low : value > high ? high : (int)value;
}

__device__ __forceinline__ int read_step(const Args& a, int row, int& start) {
  start = a.generated_start ? clamp(a.generated_start[row], 0, a.generated_room) : 0;
  return clamp(a.steps[row], 0, max(0, a.generated_room - start - a.query_shift));
}

__device__ __forceinline__ Row read_row(const Args& a, int row) {
  int start;
  const int step = read_step(a, row, start);
  // 64-bit: rows * stride passes 2**31.
  return {a.prompt + row * a.prompt_stride, a.generated + row * a.generated_stride + start,
          clamp(a.prompt_lens[row], 0, a.prompt_room), step};
}

// Tokens of a haystack before its first one in the same vector of memory.
__device__ __forceinline__ int misalignment(const Token* hay) {
  return (int)((u64)hay / TOKEN_BYTES % LANES);
}

// Vectors of a haystack; its last token ends no window.
__device__ __forceinline__ int vectors_of(const Token* hay, int length) {
  return length > 1 ? (length - 1 + misalignment(hay) + LANES - 1) / LANES : 0;
}

// A remainder of up to an eighth joins the last tile: a short tile costs as much latency as a long
// one.
__device__ __forceinline__ int tiles_of(int vectors, int log2_tile) {
  const int tile = 1 << log2_tile;
  return vectors ? max(1, (vectors - tile / 8 + tile - 1) >> log2_tile) : 0;
}

// A row's text as vectors of memory: those of the prompt, then, from `split` on, of the generated
// text. The token k of vector j has index j * LANES + k - shift in its haystack.
struct Text {
  Row row;
  int split, vectors, prompt_shift, generated_shift;

  __device__ __forceinline__ explicit Text(const Row& r) : row(r) {
    split = vectors_of(r.prompt, r.prompt_len);
    vectors = split + vectors_of(r.generated, r.step);
    prompt_shift = misalignment(r.prompt);
    generated_shift = split * LANES + misalignment(r.generated);
  }
  __device__ __forceinline__ const Token* hay(int j) const {
    return j < split ? row.prompt : row.generated;
  }
  __device__ __forceinline__ int index(int j) const {
    return j * LANES - (j < split ? prompt_shift : generated_shift);
  }
  // Tokens that end a window with a follower.
  __device__ __forceinline__ int stop(int j) const {
    return (j < split ? row.prompt_len : row.step) - 1;
  }
  __device__ __forceinline__ u64 kind(int j) const { return j < split ? 0 : GENERATED; }
};

__device__ __forceinline__ u64 warp_min(u64 value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const u64 other = __shfl_xor_sync(FULL, value, step);
    value = other < value ? other : value;
  }
  return value;
}

// Inclusive sum over the CTA's threads.
__device__ __forceinline__ int block_scan(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(FULL, value, step);
    if (lane >= step) value += other;
  }
  __syncthreads(); // the sums of the scan before have been read
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) {
    const int sum = warp_sums[w];
    before += w < warp ? sum : 0;
    total += sum;
  }
  return before + value;
}

struct __align__(16) Copy {
  const Token* source;
  Token* target;
};

struct Shared {
  Token query[2][MAX_N]; // two items in turn: one barrier an item
  u64 bound[2];
  u64 best; // of a row that is written immediately
  int warp_sums[THREADS / 32];
  int active, weight, vectors, cutoff;
  int is_last, width;
  Copy copy[THREADS];
  int count[THREADS];
};

__device__ __forceinline__ int read_threshold(const Args& a) {
  return a.device_threshold ? *a.device_threshold : a.threshold;
}

// Rows to search, and the most tiles of one of them. Returns whether rows may be written
// immediately.
template <class Rule>
__device__ __forceinline__ bool prune(const Args& a, Shared& s, int& rows, int& tiles) {
  if (threadIdx.x == 0) { s.active = 0; s.weight = 0; s.vectors = 0; s.cutoff = a.rows; }
  __syncthreads();
  const int threshold = read_threshold(a);
  int active = 0, weight = 0, most = 0;
  for (int row = threadIdx.x; row < a.rows; row += THREADS) {
    const Share share = Rule::read(a, row);
    const Text text(read_row(a, row));
    active += share.is_active;
    weight += share.weight;
    if (share.drafts && share.want > 0 && text.row.step >= a.min_n)
      most = max(most, text.vectors);
  }
  active = __reduce_add_sync(FULL, active);
  weight = __reduce_add_sync(FULL, weight);
  most = __reduce_max_sync(FULL, most);
  if ((threadIdx.x & 31) == 0) {
    atomicAdd(&s.active, active);
    atomicAdd(&s.weight, weight);
    atomicMax(&s.vectors, most);
  }
  __syncthreads();
  const int room = threshold - s.active;
  tiles = tiles_of(s.vectors, a.log2_tile);
  rows = a.rows;
  if (room - s.weight >= 2)
    return Rule::IS_PRIVATE && tiles <= 1 &&
           (long long)room - s.weight - (long long)a.rows * a.draft_room >= 2;
  int carry = 0;
  for (int first = 0; first < a.rows && room - carry >= 2; first += THREADS) {
    const int row = first + threadIdx.x;
    int total;
    const int sum = carry + block_scan(row < a.rows ? Rule::read(a, row).weight : 0, s.warp_sums,
                                       total);
    if (row < a.rows && room - sum < 2) atomicMin(&s.cutoff, row);
    carry += total;
  }
  __syncthreads();
  rows = room < 2 ? 0 : s.cutoff;
  return false;
}

__device__ __forceinline__ Vector load_vector(const Token* source) {
  Vector v;
  load_constant((int(&)[4])v, source);
  return v;
}

// COUNT vectors of a thread: first, first + THREADS, ... below high. `first` - threadIdx.x is the
// same in all threads, and so is the way taken.
template <int COUNT>
__device__ __forceinline__ void load_vectors(const Text& text, int first, int high,
                                             Vector (&v)[COUNT]) {
  const int begin = first - (int)threadIdx.x, end = begin + COUNT * THREADS;
  const bool is_inner = end <= high && (begin >= text.split || end <= text.split) &&
                        text.index(begin) >= 0 && text.index(end - 1) + LANES <= text.stop(begin);
  if (is_inner) {
    const Token* source = text.hay(begin) + text.index(begin) + threadIdx.x * LANES;
#pragma unroll
    for (int u = 0; u < COUNT; u++) v[u] = load_vector(source + u * THREADS * LANES);
    return;
  }
#pragma unroll
  for (int u = 0; u < COUNT; u++) { // ends of a haystack: memory outside is never read
    const int j = first + u * THREADS;
    if (j >= high) continue; // match_vectors does not look at it
    const Token* hay = text.hay(j);
    const int idx = text.index(j), stop = text.stop(j);
    if (idx >= 0 && idx + LANES <= stop) {
      v[u] = load_vector(hay + idx);
    } else {
#pragma unroll
      for (int k = 0; k < LANES; k++)
        v[u].token[k] = idx + k >= 0 && idx + k < stop ? hay[idx + k] : 0;
    }
  }
}

// Lower `best` by the windows of COUNT vectors. `need`: matched tokens that would beat what is
// known.
template <int COUNT>
__device__ __forceinline__ void match_vectors(const Text& text, int first, int high,
                                              const Vector (&v)[COUNT], const Token* query, int nm,
                                              int max_n, int& need, u64& best) {
  const Token last = query[nm - 1], previous = query[max(nm - 2, 0)];
  unsigned hits = 0; // bit u * LANES + k
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    unsigned equal = 0;
#pragma unroll
    for (int k = 0; k < LANES; k++) equal |= (unsigned)(v[u].token[k] == last) << k;
    if (need >= 2) { // the token before is at hand but for the first lane
      unsigned both = 1;
#pragma unroll
      for (int k = 1; k < LANES; k++) both |= (unsigned)(v[u].token[k - 1] == previous) << k;
      equal &= both;
    }
    hits |= equal << u * LANES;
  }
  while (hits && need <= nm) {
    const int bit = __ffs(hits) - 1, j = first + bit / LANES * THREADS;
    hits &= hits - 1;
    const int i = text.index(j) + bit % LANES;
    if (j >= high || i < 0 || i >= text.stop(j)) continue;
    const Token* hay = text.hay(j);
    int matched = 1;
    while (matched < nm && i >= matched && hay[i - matched] == query[nm - 1 - matched]) matched++;
    if (matched >= need) { // later windows of this thread must be longer
      best = (u64)(max_n - matched) << 40 | text.kind(j) | (u64)(i + 1);
      need = matched + 1;
    }
  }
}

// One tile of one row into the row's key, or into `s.best`; `turn` is 0 and 1 in alternation.
// Returns whether there was one.
template <class Rule, bool IS_SHARED>
__device__ __forceinline__ bool search_tile(const Args& a, Shared& s, int row, int tile, int turn) {
  const Share share = Rule::read(a, row);
  const Text text(read_row(a, row));
  const int step = text.row.step, tiles = tiles_of(text.vectors, a.log2_tile);
  if (!share.drafts || share.want <= 0 || step < a.min_n || tile >= tiles) return false;
  const int low = tile << a.log2_tile;
  const int high = tile == tiles - 1 ? text.vectors : low + (1 << a.log2_tile);
  const int nm = min(a.max_n, step);
  // A short rest is loaded with the first vectors: alone at the end it would cost a trip to memory.
  const int rest = (high - low) % (UNROLL * THREADS), body = rest > THREADS ? high : high - rest;
  int first = low + (int)threadIdx.x;
  const int last = body + (int)threadIdx.x;
  Vector v[UNROLL] = {}, tail[1] = {};
  if (low < body) load_vectors(text, first, body, v);
  if (body < high) load_vectors(text, last, high, tail);
  if (threadIdx.x < nm)
    s.query[turn][threadIdx.x] = text.row.generated[step + a.query_shift - nm + threadIdx.x];
  u64* key = a.workspace + 1 + row;
  if (threadIdx.x == THREADS - 1) s.bound[turn] = read_key(key);
  __syncthreads();
  const Token* query = s.query[turn];
  const u64 bound = s.bound[turn];
  int need = a.min_n;
  if (bound != NONE) { // equal length beats the known window from an earlier place only
    const int known = a.max_n - (int)(bound >> 40);
    const u64 place = text.kind(low) | (u64)max(0, text.index(low));
    need = max(need, (bound & PLACE_MASK) <= place ? known + 1 : known);
  }
  u64 best = NONE;
  // Once a window of the whole query is found, later windows of this warp are farther right.
  while (first - (int)threadIdx.x < body && !__any_sync(FULL, need > nm)) {
    match_vectors(text, first, body, v, query, nm, a.max_n, need, best);
    first += UNROLL * THREADS;
    if (first - (int)threadIdx.x < body) load_vectors(text, first, body, v);
  }
  if (body < high) match_vectors(text, last, high, tail, query, nm, a.max_n, need, best);
  if (__any_sync(FULL, best != NONE)) {
    best = warp_min(best);
    if ((threadIdx.x & 31) == 0) atomicMin(IS_SHARED ? &s.best : key, best);
  }
  return true;
}
