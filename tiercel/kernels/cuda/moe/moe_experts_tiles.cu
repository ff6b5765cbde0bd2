// moe_experts_tiles: the routed experts of few tokens in one launch, at the speed of reading their
// weights. Layouts: of stacks quant_tiles.py, of activations moe_experts_units.cuh.
//
// Macros: GATE_TYPE, DOWN_TYPE (UnitOf), HIDDEN, INTER, EXPERTS, TOPK, COLUMNS (tokens of a chunk at
// most), WARPS, GATE_PARTS, DOWN_PARTS (warps that share an item), STAGES (units of a warp in
// flight), BUFFERS (of sums), FOLDS (pairs that each CTA sorts; 0: sorted ahead), GATE_TOTAL,
// DOWN_TOTAL (numbers of whole matrices: 0 none, 1 factors, 2 divisors), OUT (0 fp16, 1 bf16, 2
// float32), CTAS (an SM, for the registers), SINGLE (there is one token), GATE_WARPS, DOWN_WARPS (that
// share an item: as many as parts, or if SINGLE more), COUNTER (if SINGLE: one more warp counts what
// the others have written).
//
// Pairs (token, slot) of one expert are cut into chunks. An item is 16 rows of gate and up of a
// chunk, then 32 rows of down. CTAs own equal ranges of all items; the groups of a CTA take turns,
// and the warps of a group each own a range of an item's columns, in units that they stream
// through a ring of their own. Copies run ahead over items and from gate and up to down: weights
// depend on nothing but the ids. So a warp waits for others at the sums of an item alone, and down
// of a chunk waits until all CTAs have counted their items of its gate and up: all CTAs must run
// at once (a cooperative launch).
//
// Order of a row's sum, the same for every number of tokens and launch: columns of a unit in the
// tensor core, units of a part, parts, slots of a token. The slots are added when all CTAs have
// finished, an equal share by each.
//
// The pairs of a single token are not sorted, each is a chunk, and a CTA owns output columns in down,
// with all their slots: no CTA waits for others a second time.
#include "moe/moe_experts_groups.cuh"

#define THREADS_OF_CTA (32 * WARPS)  // that multiply
// All warps that multiply.
DEV void meet_all() {
  if (COUNTER)
    bar_sync(15, THREADS_OF_CTA);
  else
    __syncthreads();
}
constexpr u32 PART_STEP = (COLUMNS + 1) / 2 * 128;  // bytes of a part's sums of 16 rows

template <int PHASE> struct Phase;
template <> struct Phase<0> : UnitOf<GATE_TYPE> {
  static constexpr int SUMMED = GATE_PARTS, PARTS = GATE_WARPS, GROUPS = WARPS / PARTS;
  static constexpr int TOTAL = GATE_TOTAL;
  static constexpr int COLS = HIDDEN, UNITS = (HIDDEN + 255) / 256;
  static constexpr int SLOTS = PARTS == SUMMED ? PARTS : UNITS;  // of an item's sums: parts or units
  static constexpr int TILES_OF_ROWS = (INTER + 15) / 16, ITEMS = TILES_OF_ROWS;
};
template <> struct Phase<1> : UnitOf<DOWN_TYPE> {
  static constexpr int SUMMED = DOWN_PARTS, PARTS = DOWN_WARPS, GROUPS = WARPS / PARTS;
  static constexpr int TOTAL = DOWN_TOTAL;
  static constexpr int COLS = INTER, UNITS = (INTER + 255) / 256;
  static constexpr int SLOTS = PARTS == SUMMED ? PARTS : UNITS;
  static constexpr int TILES_OF_ROWS = (HIDDEN + 15) / 16, ITEMS = (TILES_OF_ROWS + 1) / 2;
};
DEV constexpr int most(int a, int b) { return a > b ? a : b; }
template <class P> DEV constexpr int unit_tokens() { return COLUMNS * (512 + P::MEANS); }
typedef Phase<0> Gate;
typedef Phase<1> Down;
constexpr int SLOT = most(Gate::CODES + Gate::SCALES, Down::CODES + Down::SCALES);
constexpr int RING = WARPS * STAGES * 2 * SLOT;
constexpr int SUMS = most(Gate::GROUPS * Gate::SLOTS, Down::GROUPS * Down::SLOTS) * BUFFERS * 2 * PART_STEP;
constexpr int HELD = SINGLE ? TOPK : COLUMNS;  // pairs at hand
constexpr int ROWS = most(Gate::UNITS * unit_tokens<Gate>(),
                          Down::UNITS * unit_tokens<Down>() * (SINGLE ? TOPK : 1));
constexpr int COUNTED = 2;  // tickets ahead of the chunks': CTAs that have finished, and that have left
// Of a single token: places in the order of a CTA's groups, of 32 output columns each.
constexpr int PLACES = (TOPK + Down::GROUPS - 1) / Down::GROUPS * Down::GROUPS;
static_assert(Gate::PARTS <= Gate::UNITS && Down::PARTS <= Down::UNITS, "parts");
static_assert(!COUNTER || (SINGLE && WARPS <= 16), "counter");
static_assert(!SINGLE || (COLUMNS == 1 && 32 * TOPK <= FOLDS), "one token");

struct Stack {
  const u8 *codes, *scales;
  const float* total;
};
struct Work {
  Stack gate, up, down;
  const u8* x;             // (num_tokens, HIDDEN) bf16
  const i64* ids;          // (num_pairs,)
  const float* weights;    // (num_pairs,)
  const i64* of_chunks;    // (num_chunks,) experts, FOLDS == 0
  const i64* pairs;        // (num_chunks, COLUMNS), num_pairs where nothing is, FOLDS == 0
  u8* h;                   // (num_pairs, INTER) bf16
  float* y;                // (num_pairs, HIDDEN)
  void* out;               // (num_tokens, HIDDEN)
  const float* addend;     // (num_tokens, HIDDEN), added to the sum of the slots; or null
  u32* tickets;            // COUNTED, then one a chunk: zeros, and zeros again at the end
  float limit;
  int num_tokens, num_chunks;
  unsigned short grid[256];  // quant_types.IQ2_XXS_GRID
};

constexpr bool HAS_GRID = GATE_TYPE == 12 || DOWN_TYPE == 12;  // IQ2_XXS

// The chunks, in shared memory; sorted ahead they stay in global memory.
struct Chunks {
  u32 *counts, *order, *ranks, *flags, *grid;
  u32* written;    // items of a group of warps whose h is written, if COUNTER
  u32* own;        // 2 a chunk: expert | size << 16, place of its first pair in `order`
  u32* pairs;      // of the chunk at hand, or of a single token
  float* weights;  // of those
  float* sums;     // of a single token: 32 output columns of its slots, of two places
  int num, own_expert;  // of a single token's pair of this lane
  DEV explicit Chunks(u8* at) {
    u32* words = (u32*)at;
    pairs = words, weights = (float*)(words + HELD), flags = words + 2 * HELD;
    written = flags + 4, grid = flags + 20, counts = grid + (HAS_GRID ? 256 : 0), order = counts + EXPERTS;
    ranks = order + FOLDS, own = ranks + FOLDS, sums = (float*)order;  // which one token does not need
  }
  DEV int expert(const Work& w, int chunk) const {
    if (SINGLE) return __shfl_sync(~0u, own_expert, chunk);
    return FOLDS ? own[2 * chunk] & 0xffff : (int)w.of_chunks[chunk];
  }
  DEV int size(const Work& w, int chunk) const {
    if (FOLDS) return own[2 * chunk] >> 16;
    int n = 0;
    while (n < COLUMNS && w.pairs[(i64)chunk * COLUMNS + n] < w.num_tokens * TOPK) ++n;
    return n;
  }
  DEV u32 pair(const Work& w, int chunk, int n) const {
    return FOLDS ? order[own[2 * chunk + 1] + n] : (u32)w.pairs[(i64)chunk * COLUMNS + n];
  }
  // Sort the pairs by expert, in their order within an expert: all CTAs agree on it.
  DEV void sort(const Work& w, int tid) {
    const int num_pairs = w.num_tokens * TOPK, lane = tid & 31;
#if SINGLE
    own_expert = lane < TOPK ? (int)w.ids[lane] : 0;
    if (tid < TOPK) pairs[tid] = tid, weights[tid] = w.weights[tid];
    num = TOPK;
#elif FOLDS
    for (int e = tid; e < EXPERTS; e += THREADS_OF_CTA) counts[e] = 0;
    for (int i = tid; i < num_pairs; i += THREADS_OF_CTA) ranks[i] = (u32)w.ids[i];
    meet_all();
    if (tid < 32) {
      for (int i = lane; i - lane < num_pairs; i += 32) {
        const bool is_pair = i < num_pairs && (int)ranks[i] >= 0;  // -1: another rank's
        const u32 e = is_pair ? ranks[i] : EXPERTS + lane;
        const u32 same = __match_any_sync(~0u, e), before = __popc(same & ((1u << lane) - 1));
        const u32 count = is_pair ? counts[e] : 0;
        __syncwarp();
        if (is_pair && before == 0) counts[e] = count + __popc(same);
        if (is_pair) ranks[i] = e | (count + before) << 16;
        __syncwarp();
      }
      constexpr int EACH = (EXPERTS + 31) / 32;
      const int first = lane * EACH, last = min(first + EACH, EXPERTS);
      u32 found = 0;  // chunks << 16 | pairs
      for (int e = first; e < last; ++e)
        found += counts[e] + ((counts[e] + COLUMNS - 1) / COLUMNS << 16);
      u32 before = found;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
      }
      if (lane == 31) flags[0] = before >> 16;
      before -= found;
      for (int e = first; e < last; ++e) {
        const u32 count = counts[e], start = before & 0xffff;
        u32* to = own + 2 * (before >> 16);
        for (u32 n = 0; n < count; n += COLUMNS, to += 2)
          to[0] = e | min(count - n, (u32)COLUMNS) << 16, to[1] = start + n;
        counts[e] = start;
        before += count + ((count + COLUMNS - 1) / COLUMNS << 16);
      }
    }
    meet_all();
    for (int i = tid; i < num_pairs; i += THREADS_OF_CTA)
      if ((int)ranks[i] >= 0) order[counts[ranks[i] & 0xffff] + (ranks[i] >> 16)] = i;
#else
    if (tid == 0) flags[0] = 0;
    meet_all();
    u32 used = 0;  // chunks that nothing fills are the last ones
    for (int i = tid; i < w.num_chunks; i += THREADS_OF_CTA)
      used += w.pairs[(i64)i * COLUMNS] < num_pairs;
    if (used) atomicAdd(flags, used);
#endif
#if !SINGLE
    meet_all();
    num = flags[0];
#endif
  }
};

struct Range { int first, last; };  // items of a CTA
template <class P> DEV Range own_items(int chunks) {
  const u32 cta = blockIdx.y, ctas = gridDim.y, items = chunks * P::ITEMS;
  const u32 each = items / ctas, more = items - each * ctas;  // a division of 64 bits takes long
  return {(int)(each * cta + min(cta, more)), (int)(each * (cta + 1) + min(cta + 1, more))};
}
template <int PHASE> struct Item { int chunk, place; };
template <int PHASE> DEV Item<PHASE> find_item(int item) {
  typedef Phase<PHASE> P;
  constexpr int EACH = SINGLE && PHASE ? PLACES : P::ITEMS;
  if (SINGLE && PHASE == 0) item = item * gridDim.y + blockIdx.y;  // chunk after chunk is finished
  const int high = item / EACH, low = item - high * EACH;
  return SINGLE && PHASE ? Item<PHASE>{low, high} : Item<PHASE>{high, low};
}

// A warp's copies: of the units of its part, item after item, then those of the other phase.
struct Fetcher {
  const u8 *codes[2], *scales[2];
  Range ranges[2];
  int phase, item, left, warp, lane, slot;
  u32 ring;

  template <int PHASE> DEV void aim(const Work& w, const Chunks& chunks) {
    typedef Phase<PHASE> P;
    const Item<PHASE> at = find_item<PHASE>(item);
    const int part = warp % P::PARTS, first = P::UNITS * part / P::PARTS;
    left = P::UNITS * (part + 1) / P::PARTS - first;
    const i64 of_expert = (i64)chunks.expert(w, at.chunk) * P::TILES_OF_ROWS;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const Stack& stack = PHASE ? w.down : s ? w.up : w.gate;
      const int tile = PHASE ? min(2 * at.place + s, P::TILES_OF_ROWS - 1) : at.place;
      const i64 unit = (of_expert + tile) * P::UNITS + first;
      codes[s] = stack.codes + unit * P::CODES, scales[s] = stack.scales + unit * P::SCALES;
    }
  }
  template <int PHASE> DEV bool reach(const Work& w, const Chunks& chunks) {  // an item, if one is left
    if (SINGLE && PHASE && PLACES > TOPK)
      while (item < ranges[PHASE].last && item % PLACES >= TOPK) item += Phase<PHASE>::GROUPS;
    if (item >= ranges[PHASE].last) return false;
    aim<PHASE>(w, chunks);
    return true;
  }
  template <int PHASE> DEV bool enter(const Work& w, const Chunks& chunks) {
    typedef Phase<PHASE> P;
    phase = PHASE, item = ranges[PHASE].first + warp / P::PARTS;
    return warp / P::PARTS < P::GROUPS && reach<PHASE>(w, chunks);
  }
  DEV void start(const Work& w, const Chunks& chunks) {
    if (!enter<0>(w, chunks) && !enter<1>(w, chunks)) phase = 2;
  }
  template <class P> DEV void copy(int s) {
    const u32 to = ring + (2 * slot + s) * SLOT + 16 * lane;
#pragma unroll
    for (int i = 0; i < P::CODES; i += 512)
      if (P::CODES - i >= 512 || 16 * lane < P::CODES - i) copy16(to + i, codes[s] + i + 16 * lane);
    if (16 * lane < P::SCALES) copy16(to + P::CODES, scales[s] + 16 * lane);
    codes[s] += P::CODES, scales[s] += P::SCALES;
  }
  template <int PHASE> DEV void take(const Work& w, const Chunks& chunks) {
    typedef Phase<PHASE> P;
    copy<P>(0), copy<P>(1);
    if (--left) return;
    item += P::GROUPS;
    if (!reach<PHASE>(w, chunks) && (PHASE || !enter<1>(w, chunks))) phase = 2;
  }
  DEV void next(const Work& w, const Chunks& chunks) {
    if (phase == 0)
      take<0>(w, chunks);
    else if (phase == 1)
      take<1>(w, chunks);
    copy_commit();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
};

DEV void store(void* out, i64 at, float y) {
#if OUT == 0
  ((u16*)out)[at] = float_to_half(y);
#elif OUT == 1
  ((u16*)out)[at] = float_to_bf16(y);
#else
  ((float*)out)[at] = y;
#endif
}
DEV float addend_at(const Work& w, i64 at) { return w.addend ? __ldcg(w.addend + at) : 0.f; }
template <int TOTAL> DEV float raised(float sum, const float* total, int expert) {
  return TOTAL == 0 ? sum : TOTAL == 1 ? sum * total[expert] : sum / total[expert];
}
// Of a row, from its place in the first part.
template <class P> DEV float sum_parts(u32 at) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < P::SUMMED; ++p) {
    if (P::SLOTS == P::SUMMED) {
      sum += load_shared<float>(at + p * PART_STEP);
      continue;
    }
    float part = 0;
#pragma unroll
    for (int u = P::UNITS * p / P::SUMMED; u < P::UNITS * (p + 1) / P::SUMMED; ++u)
      part += load_shared<float>(at + u * PART_STEP);
    sum += part;
  }
  return sum;
}
// Of row i of 16, token n.
DEV u32 place_of(int i, int n) { return (n >> 1) * 128 + 16 * (i & 7) + (i & 8) + 4 * (n & 1); }

DEV u32 peak_of(const uint4 (&v)[4]) {  // the bits of the largest magnitude, or more
  u32 peak = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 both = word(v[i / 4], i & 3);
    peak = max_or_nan(peak, max_or_nan(both & 0x7fffffffu, both << 16 & 0x7fffffffu));
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) peak = max_or_nan(peak, __shfl_xor_sync(~0u, peak, step));
  return peak;
}
// m tokens of a chunk, or their h: their way into shared memory. A single token's pairs are chunks.
template <int PHASE> struct Staging {
  typedef Phase<PHASE> P;
  uint4 v[4];  // 32 columns
  DEV void load(const Work& w, const u32* pairs, int m, int i) {
    const u8* from = PHASE ? w.h : w.x;
    const int n = i / (P::UNITS * 8), j = i - n * (P::UNITS * 8);
    const bool is_token = n < m;
    const i64 row = SINGLE ? n : !is_token ? 0 : PHASE ? pairs[n] : pairs[n] / TOPK;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      v[q] = is_token && 32 * j + 8 * q < P::COLS
                 ? load_fresh(from + 2 * (row * P::COLS + 32 * j + 8 * q))
                 : make_uint4(0, 0, 0, 0);
  }
  DEV void store(u32 rows, int m, int i) const {
    const int n = i / (P::UNITS * 8), j = i - n * (P::UNITS * 8);
    const u32 peak = P::TILE_TOKENS == 4 ? peak_of(v) : 0;
    const int unit = (j >> 3) + (SINGLE ? n * P::UNITS : 0);
    if (n < m) P::stage(rows + unit * unit_tokens<P>(), v, j & 7, SINGLE ? 0 : n, peak);
  }
  // Those from `first` on.
  static DEV void run(const Work& w, const u32* pairs, u32 rows, int first, int m, int tid) {
    Staging own;
    const int lane = tid & 31;  // whole warps: they find peaks together
    for (int i = P::UNITS * 8 * first + tid; i - lane < P::UNITS * 8 * m; i += THREADS_OF_CTA)
      own.load(w, pairs, m, i), own.store(rows, m, i);
  }
};
template <class P> DEV void meet(int group) {
  if (P::PARTS > 1)
    bar_sync(1 + group, 32 * P::PARTS);
  else
    __syncwarp();
}
// A warp's sums into one of an item's slots.
template <class P, int N>
DEV void put_sums(float (&sum)[2][N][P::LANE_SUMS], u32 at, int m, int lane) {
#pragma unroll
  for (int s = 0; s < 2; ++s, at += P::SLOTS * PART_STEP)
#pragma unroll
    for (int nt = 0; nt < N; ++nt) {
      float(&own)[P::LANE_SUMS] = sum[s][nt];
      if constexpr (P::LANE_SUMS == 4) {
        const int pair = 4 * nt + (lane & 3);
        if (2 * pair < m)
          store_shared(at + 128 * pair + 16 * (lane >> 2),
                       make_uint4(__float_as_uint(own[0]), __float_as_uint(own[1]),
                                  __float_as_uint(own[2]), __float_as_uint(own[3])));
      } else {
        const int n = 4 * nt + (lane & 3);
        if (n < m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            store_shared<u32>(at + place_of(8 * r + (lane >> 2), n), __float_as_uint(own[r]));
      }
#pragma unroll
      for (int i = 0; i < P::LANE_SUMS; ++i) own[i] = 0;
    }
}
// An item, this warp's units, of as many tiles as m tokens need: the sums are in `here` when its
// group has met.
template <int PHASE, int N = Phase<PHASE>::TILES>
DEV void multiply_item(const Chunks& c, const Work& w, Fetcher& f, u32 here, u32 rows, int m, int& slot) {
  typedef Phase<PHASE> P;
  if constexpr (N > 1) {
    if (m <= N / 2 * P::TILE_TOKENS) return multiply_item<PHASE, N / 2>(c, w, f, here, rows, m, slot);
  }
  const int group = f.warp / P::PARTS, part = f.warp % P::PARTS;
  float sum[2][N][P::LANE_SUMS] = {};
  for (int u = P::UNITS * part / P::PARTS; u < P::UNITS * (part + 1) / P::PARTS; ++u) {
    copy_wait<STAGES - 1>();
    __syncwarp();
    P::template multiply<SLOT, N>(sum, f.ring + 2 * slot * SLOT, rows + u * unit_tokens<P>(), m, f.lane,
                                  shared_address(c.grid));
    __syncwarp();
    f.next(w, c);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (P::SLOTS != P::SUMMED) put_sums<P>(sum, here + u * PART_STEP, m, f.lane);
  }
  if (P::SLOTS == P::SUMMED) put_sums<P>(sum, here + part * PART_STEP, m, f.lane);
  meet<P>(group);
}
// Of an item. Warps take turns at the outputs: else those of one scheduler would do all of them.
template <class P> DEV void leave_sums(int group, int& buffer, int& turn) {
  turn = turn + 1 == P::PARTS ? 0 : turn + 1;
  if (BUFFERS == 1)
    meet<P>(group);
  else
    buffer ^= 1;
}

// Gate and up of m tokens, `held` and up of the pairs.
DEV void write_h(const Work& w, const Chunks& c, u32 here, int expert, int place, int held, int m, int i) {
  for (; i < 16 * m; i += 32 * Gate::PARTS) {
    const int n = i >> 4, row = place * 16 + (i & 15);
    const u32 at = here + place_of(i & 15, n);
    float gate = sum_parts<Gate>(at), up = sum_parts<Gate>(at + Gate::SLOTS * PART_STEP);
    gate = raised<Gate::TOTAL>(gate, w.gate.total, expert);
    up = raised<Gate::TOTAL>(up, w.up.total, expert);
    gate = gate > w.limit ? w.limit : gate;  // NaN stays
    up = up > w.limit ? w.limit : up < -w.limit ? -w.limit : up;
    const float h = gate / (1.f + __expf(-gate)) * up * c.weights[held + n];
    if (row < INTER) ((u16*)w.h)[(i64)c.pairs[held + n] * INTER + row] = float_to_bf16(h);
  }
}
DEV float sum_of_down(const Work& w, u32 here, int expert, int i) {  // of value i of 32 columns x tokens
  const u32 at = here + (i >> 4 & 1) * (Down::SLOTS * PART_STEP) + place_of(i & 15, i >> 5);
  return raised<Down::TOTAL>(sum_parts<Down>(at), w.down.total, expert);
}

DEV void count_item(u32* done, int& chunk, int lane) {
  if (chunk < 0) return;
  __syncwarp();
  if (lane == 0) add_release(done + chunk, 1);
  chunk = -1;
}
// The warp that counts: a lane has the items of a group. Its fences wait for no copies, and no warp
// waits for it.
DEV void count_items(const Work& w, const Chunks& c, int num, int lane) {
  u32 count = 0;
  for (int item = lane; lane < Gate::GROUPS && item < num; item += Gate::GROUPS) {
    wait_for_shared(shared_address(c.written + lane), ++count);
    add_release(w.tickets + COUNTED + find_item<0>(item).chunk, 1);
  }
}
// What a CTA owns of a phase, chunk after chunk; a single token's pairs have the same x.
template <int PHASE>
DEV void run_phase(const Work& w, const Chunks& c, Fetcher& f, u32 sums, u32 rows, int& slot) {
  typedef Phase<PHASE> P;
  const int tid = threadIdx.x, group = f.warp / P::PARTS;
  const Range own = f.ranges[PHASE];
  const u32 mine = sums + group * (BUFFERS * 2 * P::SLOTS * PART_STEP);
  u32* done = w.tickets + COUNTED;
  int item = group < P::GROUPS ? own.first + group : own.last, buffer = 0, turn = f.warp % P::PARTS;
  u32 items = 0;
  int written = -1;  // chunk of an item of a single token, which this warp has not counted yet
  for (int low = own.first; low < own.last;) {
    const int chunk = low / P::ITEMS, high = SINGLE ? own.last : min(own.last, (chunk + 1) * P::ITEMS);
    const int m = SINGLE ? 1 : c.size(w, chunk);
    if (!SINGLE && tid < m) {
      const int pair = c.pair(w, chunk, tid);
      c.pairs[tid] = pair, c.weights[tid] = w.weights[pair];
    }
    if (PHASE && tid == 0) wait_for_count(done + chunk, Gate::ITEMS);
    meet_all();
    if (!SINGLE || PHASE) Staging<PHASE>::run(w, c.pairs, rows, 0, m, tid);
    meet_all();
    for (; item < high; item += P::GROUPS) {
      const Item<PHASE> at = find_item<PHASE>(item);
      const int expert = c.expert(w, at.chunk);
      const u32 here = mine + buffer * (2 * P::SLOTS * PART_STEP);
      multiply_item<PHASE>(c, w, f, here, rows, m, slot);
      const int first = 32 * turn + f.lane;
      if (PHASE == 0)
        write_h(w, c, here, expert, at.place, SINGLE ? at.chunk : 0, m, first);
      else
        for (int i = first; i < 32 * m; i += 32 * P::PARTS) {
          const int row = at.place * 32 + (i & 31);
          const float y = sum_of_down(w, here, expert, i);
          if (row < HIDDEN) __stcg(w.y + (i64)c.pairs[i >> 5] * HIDDEN + row, y);
        }
      ++items;
      if (COUNTER) {
        __syncwarp();
        if (turn == 0 && f.lane == 0) publish_shared(shared_address(c.written + group), items);
      } else if (SINGLE) {  // later: it waits until what was written is there
        count_item(done, written, f.lane);
        if (turn == 0) written = at.chunk;
      }
      leave_sums<P>(group, buffer, turn);
    }
    if (SINGLE) {
      count_item(done, written, f.lane);
      break;
    }
    meet_all();
    if (PHASE == 0 && tid == 0) {
      __threadfence();
      add_release(done + chunk, high - low);
    }
    low = high;
  }
}

// Down of a single token: all slots of 32 output columns, then their sum. The last turn's slots are
// finished late, so h of the others is staged before.
DEV void run_down_of_token(const Work& w, const Chunks& c, Fetcher& f, u32 sums, u32 rows, int& slot) {
  const int tid = threadIdx.x, group = f.warp / Down::PARTS;
  const u32 mine = sums + group * (BUFFERS * 2 * Down::SLOTS * PART_STEP);
  const Range own = f.ranges[1];
  int buffer = 0, turn = f.warp % Down::PARTS;
  meet_all();
  for (int item = own.first; item < own.last; item += PLACES) {
    const int place = item / PLACES;
    float* slots = c.sums + (place & 1) * (32 * TOPK);
#pragma unroll 1
    for (int late = 0; late < 2; ++late) {
      const int first = late ? PLACES - Down::GROUPS : 0, last = late ? TOPK : PLACES - Down::GROUPS;
      if (item == own.first) {
        if (first + tid < last) wait_for_count(w.tickets + COUNTED + first + tid, Gate::ITEMS);
        meet_all();
        Staging<1>::run(w, c.pairs, rows, first, last, tid);
        meet_all();
      }
      for (int k = first + group; group < Down::GROUPS && k < last; k += Down::GROUPS) {
        const u32 here = mine + buffer * (2 * Down::SLOTS * PART_STEP);
        multiply_item<1>(c, w, f, here, rows + k * (Down::UNITS * unit_tokens<Down>()), 1, slot);
        if (turn == 0) slots[32 * k + f.lane] = sum_of_down(w, here, c.expert(w, k), f.lane);
        leave_sums<Down>(group, buffer, turn);
      }
    }
    meet_all();
    const int column = 32 * place + tid;
    if (tid >= 32 || column >= HIDDEN) continue;
    float total = slots[tid];
    for (int k = 1; k < TOPK; ++k) total += slots[32 * k + tid];
    store(w.out, column, total + addend_at(w, column));
  }
}

// When all CTAs have finished, add the slots in their order, an equal share of the outputs.
DEV void sum_slots(const Work& w, int tid) {
  meet_all();
  if (tid == 0) {
    __threadfence();
    add_release(w.tickets, 1);
    wait_for_count(w.tickets, gridDim.y);
  }
  meet_all();
  const int num = w.num_tokens * (HIDDEN / 4), step = gridDim.y * THREADS_OF_CTA;
  for (int i = blockIdx.y * THREADS_OF_CTA + tid; i < num; i += step) {
    const int n = i / (HIDDEN / 4), column = 4 * (i - n * (HIDDEN / 4));
    const float* y = w.y + (i64)n * TOPK * HIDDEN + column;
    uint4 slots[TOPK];
#pragma unroll
    for (int k = 0; k < TOPK; ++k) slots[k] = load_fresh(y + (i64)k * HIDDEN);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float total = __uint_as_float(word(slots[0], q));
#pragma unroll
      for (int k = 1; k < TOPK; ++k) total += __uint_as_float(word(slots[k], q));
      const i64 at = (i64)n * HIDDEN + column + q;
      store(w.out, at, total + addend_at(w, at));
    }
  }
}
// The last CTA that leaves makes the tickets zeros again.
DEV void leave(const Work& w, const Chunks& c, int tid) {
  if (tid == 0) c.flags[1] = atomicInc(w.tickets + 1, gridDim.y - 1);
  meet_all();
  if (c.flags[1] == gridDim.y - 1)
    for (int i = tid; i < COUNTED + c.num; i += THREADS_OF_CTA) w.tickets[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS_OF_CTA + 32 * COUNTER, CTAS) moe_experts_tiles(Work w) {
  SHARED_MEMORY(memory);
  const u32 smem = shared_address(memory);
  const int tid = threadIdx.x, lane = tid & 31;
  Chunks chunks(memory + RING + SUMS + ROWS);
  if (HAS_GRID)
    for (int i = tid; i < 256; i += THREADS_OF_CTA) {
      u32 places = 0;  // 2 bits each to 4
#pragma unroll
      for (int k = 0; k < 8; ++k) places |= (w.grid[i] >> 2 * k & 3u) << 4 * k;
      chunks.grid[i] = places;
    }
  if (COUNTER) {
    if (tid < 16) chunks.written[tid] = 0;
    __syncthreads();
  }
  wait_for_inputs();
  launch_dependents();
  if (COUNTER && tid >= THREADS_OF_CTA) {
    const Range own = own_items<Gate>(TOPK);
    return count_items(w, chunks, own.last - own.first, lane);
  }
  // Ahead of the weights: behind them it would wait for as much as all rings hold.
  Staging<0> token;
  if (SINGLE) token.load(w, nullptr, 1, tid);
  chunks.sort(w, tid);

  Fetcher f;
  f.warp = __shfl_sync(~0u, tid >> 5, 0), f.lane = lane, f.slot = 0;
  f.ring = smem + f.warp * STAGES * 2 * SLOT;
  f.ranges[0] = own_items<Gate>(chunks.num), f.ranges[1] = own_items<Down>(SINGLE ? 1 : chunks.num);
  if (SINGLE) {
    f.ranges[0] = {0, f.ranges[0].last - f.ranges[0].first};
    f.ranges[1].first *= PLACES, f.ranges[1].last *= PLACES;
  }
  f.start(w, chunks);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) f.next(w, chunks);
  if (SINGLE) {
    token.store(smem + RING + SUMS, 1, tid);
    Staging<0>::run(w, nullptr, smem + RING + SUMS, 0, 1, tid + THREADS_OF_CTA);
  }
  int slot = 0;
  run_phase<0>(w, chunks, f, smem + RING, smem + RING + SUMS, slot);
#if SINGLE
  run_down_of_token(w, chunks, f, smem + RING, smem + RING + SUMS, slot);
#else
  run_phase<1>(w, chunks, f, smem + RING, smem + RING + SUMS, slot);
  sum_slots(w, tid);
#endif
  leave(w, chunks, tid);
}
