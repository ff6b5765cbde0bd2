// fused_layer_tail and fused_batch_step: arguments, sizes, shared memory and the warps that multiply.
// fused_layer_tail.cu says how they are used. IS_STEP: all layers are in one launch.
#pragma once

#include "fused/fused_layer_tail_ptx.cuh"
#include "fused/fused_layer_tail_tokens.cuh"
#include "include/exchange_ptx.cuh"
#include "packed/packed_ptx.cuh"
#include "packed/packed_tokens.cuh"
#include "packed/packed_units.cuh"

#define WARPS 16              // that multiply
#define FETCHER WARPS         // the warp that brings activations
#define REDUCER (WARPS + 2)   // the first of NT warps that add up and publish
#define THREADS 640
#define PUBLISHERS 8          // groups of 32 columns in a unit column of x
#define SLOT (!ANY_SIX ? 2304 : IN_STEP ? 3408 : 3360)
// Unit columns of 256 of what o, gate and up, down multiply; every second is of one CTA of a
// cluster.
#define COLUMNS_O (ATTENDED / 256)
#define COLUMNS_X (HIDDEN / 256)
#define COLUMNS_H (INNER / 256)
// Groups of 32 columns of x and of down's input, dealt over all CTAs in rounds.
#define GROUPS_X (HIDDEN / 32)
#define GROUPS_H (INNER / 32)
#define ROUNDS_X ((GROUPS_X + CTAS - 1) / CTAS)
#define ROUNDS_H ((GROUPS_H + CTAS - 1) / CTAS)
// Tiles of q, k, v: pairs of them in rounds; one a CTA in the end where so few are left.
#define REST_TILES (QKV_TILES % (2 * CTAS))
#define HAS_SINGLES (REST_TILES > 0 && REST_TILES <= CTAS)
#define ROUNDS_QKV (QKV_TILES / (2 * CTAS) + (REST_TILES > CTAS))
#define IS_LAST (QKV_TILES == 0)
#define CLASS_SLOTS (XSLOTS / 4)
#define MOST_OF(columns) (((columns) / 2 + 3) / 4)  // unit columns of a class
// Units of a warp at most: of o, gate and up, down, q k v.
#define UNITS_O (ROUNDS_X * MOST_OF(COLUMNS_O))
#define UNITS_GU (2 * ROUNDS_H * MOST_OF(COLUMNS_X))
#define UNITS_DOWN (ROUNDS_X * MOST_OF(COLUMNS_H))
#define UNITS_SINGLES (HAS_SINGLES ? (MOST_OF(COLUMNS_X) + 1) / 2 : 0)
#define UNITS (UNITS_O + UNITS_GU + UNITS_DOWN + ROUNDS_QKV * MOST_OF(COLUMNS_X) + UNITS_SINGLES)
#define PLACES ((UNITS + 31) / 32)  // that a lane knows
#define NO_UNIT 0xffffffffu
// Where published columns begin: x of gate and up, then down's input, then x of q, k, v.
#define FIRST_H COLUMNS_X
#define FIRST_QKV (COLUMNS_X + COLUMNS_H)
#define FIRST_O (2 * COLUMNS_X + COLUMNS_H)  // IS_STEP: outputs of the attention
#define OUTPUTS (8 * PUBLISHERS)  // of a column: each of its groups is published token by token
// Of the clock's upper half, 2.2 s each: no launch takes as long, but another GPU may be late.
#define MOST_TICKS (RANKS > 1 ? 256 : 2)
#define SCRATCH_PITCH 144     // 32 floats of a token, and 16 bytes
#define SHRINK (1.f / 16)     // keeps residual x norm weight within fp16
#define GROW (16.f * 16777216.f)

#if IS_STEP
#include "fused/fused_batch_step_args.cuh"
#else
#define V_IS_APART (SIX_V != SIX_QK)  // in planes of its own
#define SIXES (SIX_O | SIX_GU << 1 | SIX_DOWN << 2 | SIX_QK << 3 | SIX_V << 4)
#define MAYBE_SIXES 0
struct Args {
  Planes o, gate_up, down, qk, v;
  const uint4* attended;   // (m, ATTENDED) fp16
  float* x;                // (m, HIDDEN), in place
  u16* heads;              // (m, 16 QKV_TILES) fp16, not IS_LAST
  const float *mlp_norm, *next_norm;  // (HIDDEN)
  u8* exchange;            // (2 COLUMNS_X + COLUMNS_H, COLUMN)
  uint4* squares;          // (2, GROUPS_X, 2, 2), of 8 tokens each; two lowest bits: the epoch's
  u32* launches;           // (2, CTAS), before this one, with tokens of these 8; a CTA's own
  u32* counters;           // (2 COLUMNS_X + COLUMNS_H, 2), of 8 tokens: publications so far
  int m;
  float eps;
#if RANKS > 1
  int tp_rank;
  u8* peers[RANKS];        // memory of each rank: fused_layer_tail_ranks.cuh
#endif
};
#endif

struct Layout {
  static constexpr int X = 0, SUM = 16 * NT * 512, SUMS = XSLOTS * COLUMN;
  static constexpr int RING = SUMS + BUFFERS * SUM, SCRATCH = RING + WARPS * STAGES * SLOT;
  static constexpr int X_FULL = SCRATCH + NT * 8 * SCRATCH_PITCH, X_EMPTY = X_FULL + 8 * XSLOTS;
  static constexpr int FULL = X_EMPTY + 8 * XSLOTS;      // by buffer, adder
  static constexpr int EMPTY = FULL + 8 * BUFFERS * NT;  // by owner, buffer
  static constexpr int LOST = EMPTY + 16 * BUFFERS, START = LOST + 4;
#if IS_STEP
  static constexpr int MET = START + 4;            // by parity, head of the attention
  static constexpr int READY = MET + 16 * GROUP;   // the other CTA attends, too
  static constexpr int ROWS = (READY + 8 + 15) / 16 * 16, NEW = ROWS + 2 * sizeof(Layer);
  static constexpr int PLAN = NEW + 4 * D, TOTAL = PLAN + sizeof(Plan);  // NEW: key, value
#else
  static constexpr int TOTAL = START + 4;
#endif
};
// All columns of a class of o, and of x, are in shared memory together.
static_assert(XSLOTS % 4 == 0 && CLASS_SLOTS >= MOST_OF(COLUMNS_O) &&
                  CLASS_SLOTS >= MOST_OF(COLUMNS_X),
              "slots of activations");
static_assert(HIDDEN % 512 == 0 && ATTENDED % 512 == 0 && INNER % 512 == 0 && CTAS % 2 == 0,
              "halves of unit columns");
static_assert(QKV_TILES % 2 == 0 && QK_TILES % 2 == 0 && ROUNDS_X <= 2, "tiles in pairs");
static_assert(Layout::TOTAL <= 232448 && Layout::X_FULL % 8 == 0, "shared memory of an SM");

// By one thread: barriers, and the clock of `is_lost`.
DEV void start_barriers(u8* memory, u32 smem) {
  for (int i = 0; i < XSLOTS; ++i)
    mbar_init(smem + Layout::X_FULL + 8 * i, 1), mbar_init(smem + Layout::X_EMPTY + 8 * i, WARPS);
  for (int i = 0; i < BUFFERS * NT; ++i) mbar_init(smem + Layout::FULL + 8 * i, 1);
  for (int i = 0; i < 2 * BUFFERS; ++i) mbar_init(smem + Layout::EMPTY + 8 * i, NT);
#if IS_STEP
  for (int i = 0; i < 2 * GROUP + 1; ++i) mbar_init(smem + Layout::MET + 8 * i, 1);  // and READY
#endif
  *(u32*)(memory + Layout::LOST) = 0;
  *(u32*)(memory + Layout::START) = clock_high();
  mbar_fence();
}
DEV bool is_lost(u8* memory) {
  volatile u32* lost = (u32*)(memory + Layout::LOST);
  if (clock_high() - *(u32*)(memory + Layout::START) < MOST_TICKS) return false;
  *lost = 1;
  return true;
}
DEV void load8(float (&v)[8], const float* from) {
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

#if IN_STEP
// Places are 256 tile + column.
DEV u32 unit_of(int tile, int, int column) { return 256 * tile + column; }
DEV int rows_of(int matrix) {
  constexpr int QK_ROWS = 16 * (SIX_V == SIX_QK ? QKV_TILES : QK_TILES);
  return matrix == 1   ? 2 * INNER
         : matrix == 3 ? QK_ROWS
         : matrix == 4 ? 16 * (QKV_TILES - QK_TILES)
                       : HIDDEN;
}
template <bool SIX> DEV void fetch_unit(const Planes& w, int matrix, u32 unit, u32 slot, int lane) {
  const int columns = matrix == 0 ? COLUMNS_O : matrix == 2 ? COLUMNS_H : COLUMNS_X;
  copy_unit<SIX>(StepRows(w, rows_of(matrix), columns), unit >> 8, unit & 255, slot, lane);
}
#else
DEV u32 unit_of(int tile, int columns, int column) { return tile * columns + column; }
template <bool SIX> DEV void fetch_unit(const Planes& w, int, u32 unit, u32 slot, int lane) {
  if (SIX)
    q6::Source(w, unit, 0, 0, lane).fetch(slot);
  else
    q4::Source(w, unit, 0, 0, lane).fetch(slot);
}
#endif
template <bool SIX> DEV void multiply_unit(float (&sum)[NT][4], u32 slot, u32 column, int lane) {
  if (SIX)
    q6::multiply(sum, slot, TokensOfQ6(column, lane), lane, [] {});
  else
    q4::multiply(sum, slot, TokensOfQ4(column, lane), lane, [] {});
}
// ---- which warp multiplies which units
// The number of a CTA in every round. Both CTAs of a cluster multiply what either owns, so those
// that a last round leaves out are one of two clusters' CTAs first.
DEV int number_of(int cta) { return (cta & 1) * (CTAS / 2) + (cta >> 1); }
DEV bool owns(int number, int round, int count) { return CTAS * round + number < count; }
// Columns of a half, i = 0, 1, ..., are in classes i % 4. How many one class has.
DEV int columns_of(int columns, int four) {
  return columns % 8 ? (columns / 2 - four + 3) >> 2 : columns / 8;
}
// The class that a warp of class `four` takes in step `i` of gate and up: where classes have
// unequal numbers of columns, another one in each step.
DEV int turned(int four, int i) { return COLUMNS_X % 8 ? four + i & 3 : four; }
// What a warp multiplies: columns of class `four` of the half of CTA `rank`, tile `pick` of two (of
// gate, or of up) of the rows of CTA number `owner`.
struct Share { int owner, pick, four, rank; };
DEV u32 unit_at(int matrix, int tile, int columns, int i, int rank, bool is_there) {
  if (!is_there || i >= columns / 2) return NO_UNIT;
  return matrix << 24 | unit_of(tile, columns, 2 * i + rank);
}
// Unit `k` of a matrix whose rows are groups of the residual: all rounds of a column, then the
// next.
DEV u32 place_in_rows(int matrix, int columns, int k, const Share& w) {
  const int round = k % ROUNDS_X, i = w.four + 4 * (k / ROUNDS_X);
  const int tile = 2 * (CTAS * round + w.owner) + w.pick;
  return unit_at(matrix, tile, columns, i, w.rank, owns(w.owner, round, GROUPS_X));
}
// The place of unit `k` of a share in order of use: in its matrix, and 24 bits up the matrix of
// Args.
DEV u32 place_of(int k, const Share& w) {
  if (k < UNITS_O) return place_in_rows(0, COLUMNS_O, k, w);
  k -= UNITS_O;
  if (k < UNITS_GU) {
    const int step = k / MOST_OF(COLUMNS_X), round = step >> 1;
    const int i = turned(w.four, step) + 4 * (k % MOST_OF(COLUMNS_X));
    const int tile = 2 * (CTAS * round + w.owner) + (step & 1) + w.pick * (INNER / 16);
    return unit_at(1, tile, COLUMNS_X, i, w.rank, owns(w.owner, round, GROUPS_H));
  }
  k -= UNITS_GU;
  if (k < UNITS_DOWN) return place_in_rows(2, COLUMNS_H, k, w);
  k -= UNITS_DOWN;
  const int round = k / MOST_OF(COLUMNS_X);
  const bool is_single = round >= ROUNDS_QKV;
  if (is_single) k = 2 * (k - ROUNDS_QKV * MOST_OF(COLUMNS_X)) + w.pick;
  const int i = w.four + 4 * (is_single ? k : k % MOST_OF(COLUMNS_X));
  const int tile = is_single ? 2 * CTAS * ROUNDS_QKV + w.owner
                             : 2 * (CTAS * round + w.owner) + w.pick;
  const int first = V_IS_APART && tile >= QK_TILES ? QK_TILES : 0;
  return unit_at(first ? 4 : 3, tile - first, COLUMNS_X, i, w.rank, tile < QKV_TILES);
}
#if IS_STEP
// A layer's row in shared memory.
struct PlanesOfLayer {
  u32 row;
  DEV Planes operator[](u32 index) const {
    const u32 at = row + sizeof(Planes) * index;
    const uint4 a = load_shared<uint4>(at), b = load_shared<uint4>(at + 16);
    return {pointer(a.x, a.y), pointer(a.z, a.w), pointer(b.x, b.y), pointer(b.z, b.w)};
  }
  DEV static const u8* pointer(u32 low, u32 high) { return (const u8*)((u64)high << 32 | low); }
};
#else
typedef const Planes* PlanesOfLayer;
#endif
// From the matrices of a layer, o first; `sixes`: those of MAYBE_SIXES that are Q6_K.
DEV void fetch(PlanesOfLayer matrices, u32 sixes, u32 place, u32 slot, int lane) {
  constexpr u32 ALWAYS = SIXES;
  const Planes& matrix = matrices[place >> 24];
  const u32 is_six = MAYBE_SIXES ? (SIXES | sixes) >> (place >> 24) : ALWAYS >> (place >> 24);
  if (ANY_SIX && (is_six & 1))
    fetch_unit<true>(matrix, place >> 24, place & 0xffffff, slot, lane);
  else
    fetch_unit<false>(matrix, place >> 24, place & 0xffffff, slot, lane);
}
// Places of activations in shared memory: a class has slots of its own, and counts its columns.
DEV int slot_of(int four, int at) { return four * CLASS_SLOTS + at % CLASS_SLOTS; }

#if !IS_STEP
// This CTA's half of the attention's outputs into the slots of the first matrix.
DEV void stage_attended(const Args& g, u32 smem, int rank, int tid) {
  constexpr int PIECES = 8 * (COLUMNS_O / 2), ALL = PIECES * TOKENS;  // of 32 columns
#pragma unroll 1
  for (int first = tid; first < ALL; first += 32 * WARPS * NT) {
    uint4 v[NT][4];
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int item = min(first + 32 * WARPS * i, ALL - 1), n = item / PIECES, at = item % PIECES;
      const int column = 2 * (at >> 3) + rank, row = min(n, g.m - 1);
      const uint4* from = g.attended + (row * ATTENDED + column * 256 + (at & 7) * 32) / 8;
#pragma unroll
      for (int q = 0; q < 4; ++q) v[i][q] = from[q];
    }
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int item = first + 32 * WARPS * i, n = item / PIECES, at = item % PIECES, j = at & 7;
      if (item >= ALL) break;
      const u32 to = smem + Layout::X + slot_of(at >> 3 & 3, at >> 5) * COLUMN;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint4 r = reorder(v[i][q]);
        store_shared(to + ((4 * (j & 1) + q) * TOKENS + n) * 64 + 16 * ((j >> 1) ^ (q >> 1)),
                     make_uint4(r.x, r.y, r.z, r.w));
      }
      const float mean = mean32(v[i][0], v[i][1], v[i][2], v[i][3]);
      stage_mean(to, mean, n, j >> 1, j & 1, 2);
    }
  }
}
#endif

// ---- a warp that multiplies
struct Multiplier {
  const Args& g;
  Share share;
  u32 smem, ring;
  int lane;
  // Lane k knows the places of units k, k + 32, ...: to compute them for each unit anew is a fifth
  // of its instructions, 1.0 to 2.4 us a layer (H200, results/decode_chain_polls_h200.json).
  u32 places[PLACES], left[PLACES];
  int fetch_slot, slot;           // of the ring
  u32 sums, full, empty;          // of the rows' owner
  int step, at;                   // sums sent; columns of this warp's class
#if IS_STEP
  PlanesOfLayer layer;
  int number;  // of it
  DEV PlanesOfLayer matrices() const { return layer; }
  DEV u32 sixes() const { return MAYBE_SIXES ? load_shared<u32>(layer.row + Layer::SIXES_AT) : 0; }
  // Columns of a class in the layers before this one.
  DEV int before(int of) const {
    return number * (columns_of(COLUMNS_O, of) + 2 * columns_of(COLUMNS_X, of) +
                     columns_of(COLUMNS_H, of));
  }
#else
  DEV const Planes* matrices() const { return &g.o; }
  DEV u32 sixes() const { return 0; }
  DEV int before(int) const { return 0; }
#endif

  DEV void find_units() {
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      places[i] = 32 * i + lane < UNITS ? place_of(32 * i + lane, share) : NO_UNIT;
      left[i] = __ballot_sync(~0u, places[i] != NO_UNIT);
    }
  }
#if IS_STEP
  // All units of a layer; after the last one no q, k, v follow.
  DEV void find_left(bool is_last) {
#pragma unroll
    for (int i = 0; i < PLACES; ++i)
      left[i] = __ballot_sync(~0u, places[i] != NO_UNIT && !(is_last && places[i] >> 24 >= 3));
  }
#endif
  DEV void fetch_next() {
    u32 place = NO_UNIT;
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      if (place == NO_UNIT && left[i]) {
        place = __shfl_sync(~0u, places[i], __ffs(left[i]) - 1);
        left[i] &= left[i] - 1;
      }
    }
    if (place != NO_UNIT) fetch(matrices(), sixes(), place, ring + fetch_slot * SLOT, lane);
    copy_commit();
    fetch_slot = fetch_slot + 1 == STAGES ? 0 : fetch_slot + 1;
  }
  DEV u32 take() {
    copy_wait<STAGES - 1>();
    __syncwarp();
    return ring + slot * SLOT;
  }
  DEV void give_back() {
    __syncwarp();
    fetch_next();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  // Column `at` of class `of`.
  DEV u32 place(int of, int at) { return smem + Layout::X + slot_of(of, at) * COLUMN; }
  DEV void wait(int of, int at) {
    bar_wait(smem + Layout::X_FULL + 8 * slot_of(of, at), at / CLASS_SLOTS & 1);
  }
  DEV u32 open(int of, int at) {
    wait(of, at);
    return place(of, at);
  }
  // Sixteen arrivals give a column back: four of each warp of its class, or one of every warp.
  DEV void close() {
    __syncwarp();
    if (lane < 4) mbar_arrive(smem + Layout::X_EMPTY + 8 * slot_of(share.four, at));
  }
#if IS_STEP
  // Columns that this warp has perhaps not read; a column is given back once it is there.
  DEV void close_all(int count) {
    for (const int end = at + count; at < end; ++at) wait(share.four, at), close();
  }
#endif
  // Parts of a tile meet in the order 4 rank + class, tile after tile.
  DEV void send(const float (&sum)[NT][4], int of) {
    const int buffer = step % BUFFERS;
    bar_wait(empty + 8 * buffer, (step / BUFFERS & 1) ^ 1);
    const u32 to = sums + buffer * Layout::SUM + of * NT * 512;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      send_there(to + nt * 512, sum[nt], full + 8 * (NT * buffer + nt));
    ++step;
  }

  // A matrix whose rows are groups of the residual.
  template <bool SIX> DEV void multiply_rows(int count) {
    float sum[ROUNDS_X][NT][4] = {};
    const int end = at + count;
#pragma unroll 1
    for (; at < end; ++at) {
      const u32 x = open(share.four, at);
#pragma unroll
      for (int round = 0; round < ROUNDS_X; ++round) {
        if (!owns(share.owner, round, GROUPS_X)) continue;
        multiply_unit<SIX>(sum[round], take(), x, lane);
        give_back();
      }
      close();
    }
#pragma unroll
    for (int round = 0; round < ROUNDS_X; ++round)
      if (owns(share.owner, round, GROUPS_X)) send(sum[round], share.four);
  }
  template <bool SIX> DEV void multiply_gate_up() {
#pragma unroll 1
    for (int i = 0; i < 2 * ROUNDS_H && owns(share.owner, i >> 1, GROUPS_H); ++i) {
      const int of = turned(share.four, i), first = before(of) + columns_of(COLUMNS_O, of);
      const int count = columns_of(COLUMNS_X, of);
#if IS_STEP
      // Of another class: a wait tells a column from the one before it in its slot alone.
      if (COLUMNS_X % 8 && i > 0 && i < 4)
        for (int k = before(of); k < first; ++k) wait(of, k);
#endif
      float sum[NT][4] = {};
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        if (i < 4) wait(of, first + k);  // later steps multiply columns of earlier ones
        multiply_unit<SIX>(sum, take(), place(of, first + k), lane);
        give_back();
      }
      send(sum, of);
    }
    const int end = at + columns_of(COLUMNS_X, share.four);
    if (COLUMNS_X % 8 == 0) {  // no other class has read this one's columns
      for (; at < end; ++at) close();
    } else if (lane < COLUMNS_X / 2) {
      const int of = lane & 3, k = before(of) + columns_of(COLUMNS_O, of) + (lane >> 2);
      wait(of, k);
      mbar_arrive(smem + Layout::X_EMPTY + 8 * slot_of(of, k));
    }
    at = end;
  }
  template <bool QK, bool V> DEV void multiply_tile(int tile, int from, int by) {
    float sum[NT][4] = {};
#pragma unroll 1
    for (int i = from; i < columns_of(COLUMNS_X, share.four); i += by) {
      const u32 x = open(share.four, at + i), unit = take();
      if (V != QK && tile >= QK_TILES)
        multiply_unit<V>(sum, unit, x, lane);
      else
        multiply_unit<QK>(sum, unit, x, lane);
      give_back();
    }
    send(sum, share.four);
  }
  template <bool QK, bool V> DEV void multiply_qkv() {
#pragma unroll 1
    for (int i = 0; i < ROUNDS_QKV && owns(share.owner, i, QKV_TILES / 2); ++i)
      multiply_tile<QK, V>(2 * (CTAS * i + share.owner) + share.pick, 0, 1);
    const int single = 2 * CTAS * ROUNDS_QKV + share.owner;  // columns of both picks are added up
    if (HAS_SINGLES && single < QKV_TILES) multiply_tile<QK, V>(single, share.pick, 2);
  }
};

DEV Multiplier make_multiplier(const Args& g, u32 smem, int rank, int warp, int lane) {
  // Warps w % 4 share a quarter of the SM: each has all classes, and rows of both CTAs.
  const int four = warp >> 2, row = warp + four & 3, half = row >> 1, pick = row & 1;
  const u32 part = (8 * pick + 4 * rank) * NT * 512 + 16 * lane;
  Multiplier own = {g, {number_of(((int)blockIdx.x & ~1) + half), pick, four, rank}, smem,
                    smem + Layout::RING + warp * STAGES * SLOT, lane};
  own.sums = remote_address(smem + Layout::SUMS + part, half);
  own.full = remote_address(smem + Layout::FULL, half);
  own.empty = smem + Layout::EMPTY + 8 * BUFFERS * half;
  own.find_units();
  return own;
}

#if !IS_STEP
DEV void multiply_all(const Args& g, u32 smem, int rank, int warp, int lane) {
  Multiplier own = make_multiplier(g, smem, rank, warp, lane);
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) own.fetch_next();
  cluster_sync();
  wait_for_inputs();
  stage_attended(g, smem, rank, 32 * warp + lane);
  // Before the barrier of these warps, so that all of them find all of these slots in use.
  if (warp == 0 && lane < COLUMNS_O / 2)
    mbar_arrive(smem + Layout::X_FULL + 8 * slot_of(lane & 3, lane >> 2));
  bar_sync(1, 32 * WARPS);
  own.multiply_rows<SIX_O>(columns_of(COLUMNS_O, own.share.four));
  own.multiply_gate_up<SIX_GU>();
  launch_dependents();
  own.multiply_rows<SIX_DOWN>(columns_of(COLUMNS_H, own.share.four));
#if !IS_LAST
  own.multiply_qkv<SIX_QK, SIX_V>();
#endif
}
#endif
