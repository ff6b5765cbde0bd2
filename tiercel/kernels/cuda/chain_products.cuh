// Sizes, shared memory and the warps that multiply, for decode_chain.cu, which says what they are;
// chain_six.cuh and q4k_units.cuh before it, which left namespace q6 open.
}  // namespace q6
#define CTAS 128
#define WARPS 16              // that multiply
#define FETCHER WARPS         // the warp that brings activations
#define REDUCER (WARPS + 2)   // the first of NT warps that add up and publish
#define THREADS 640
#define HIDDEN 4096
#define HEADS_WIDTH 6144      // rows of q, k, v
#define SIDE 8                // unit columns of a slice in a CTA
#define PUBLISHERS 8          // CTAs that own a unit column of x
#define SLOT (ANY_SIX ? 3360 : 2304)
// Units of a warp, two columns of each tile: of o, gate and up, down, q k v.
#define UNITS_O 2
#define UNITS_GU (4 * SLICES)
#define UNITS_DOWN (2 * SLICES)
#define UNITS_QKV (IS_LAST ? 0 : 3)
#define UNITS (UNITS_O + UNITS_GU + UNITS_DOWN + UNITS_QKV)
static_assert(UNITS <= 32, "a lane of a warp knows where a unit lies");
#define KINDS (SLICES + 2)    // of published x: of gate and up, slices of down, of q k v
#define MOST_TICKS 2          // of the clock's upper half, 2.2 s each; no launch takes as long
#define SCRATCH_PITCH 144     // 32 floats of a token, and 16 bytes
#define SHRINK (1.f / 16)     // keeps residual x norm weight within fp16
#define GROW (16.f * 16777216.f)

struct Args {
  Planes o, gate_up, down, qk, v;
  const uint4* attended;   // (m, HIDDEN) fp16
  float* x;                // (m, HIDDEN), in place
  u16* heads;              // (m, HEADS_WIDTH) fp16, not IS_LAST
  const float *mlp_norm, *next_norm;  // (HIDDEN)
  u8* exchange;            // (KINDS, 16, COLUMN)
  uint4* squares;          // (2, CTAS, 2, 2), of 8 tokens each; two lowest bits: the epoch's
  u32* launches;           // (2, CTAS), before this one, that had such tokens; a CTA's own
  u32* counters;           // (KINDS, 16, 2), of a column of 8 tokens: publications so far
  int m;
  float eps;
};

struct Layout {
  static constexpr int X = 0, SUM = 16 * NT * 512, SUMS = XSLOTS * COLUMN;
  static constexpr int RING = SUMS + BUFFERS * SUM, SCRATCH = RING + WARPS * STAGES * SLOT;
  static constexpr int X_FULL = SCRATCH + NT * 8 * SCRATCH_PITCH, X_EMPTY = X_FULL + 8 * XSLOTS;
  static constexpr int FULL = X_EMPTY + 8 * XSLOTS;      // by buffer, adder
  static constexpr int EMPTY = FULL + 8 * BUFFERS * NT;  // by owner, buffer
  static constexpr int LOST = EMPTY + 16 * BUFFERS, START = LOST + 4, TOTAL = START + 4;
};
// So a slot is always used by the same four warps: the parity of its barriers is unambiguous.
static_assert(XSLOTS % 4 == 0 && XSLOTS >= SIDE, "slots of activations");
static_assert(Layout::TOTAL <= 232448 && Layout::X_FULL % 8 == 0, "shared memory of an SM");

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

template <bool SIX> DEV void fetch_unit(const Planes& w, i64 unit, u32 slot, int lane) {
  if (SIX)
    q6::Source(w, unit, 0, 0, lane).fetch(slot);
  else
    q4::Source(w, unit, 0, 0, lane).fetch(slot);
}
template <bool SIX> DEV void multiply_unit(float (&sum)[NT][4], u32 slot, u32 column, int lane) {
  if (SIX)
    q6::multiply(sum, slot, q6::Tokens(column, lane), lane, [] {});
  else
    q4::multiply(sum, slot, q4::Tokens(column, lane), lane, [] {});
}
// What a warp multiplies: columns `column` and 4 further of tile `pick` of two (of gate, or of
// up) of the rows of CTA `owner`.
struct Share { int owner, pick, column; };
// Where unit `k` of a share in order of use lies: in its matrix, and 24 bits up which of Args'.
DEV u32 place_of(int k, const Share& w) {
  const int two = 2 * w.owner, column = w.column + 4 * (k & 1);
  if (k < UNITS_O) return (two + w.pick) * 16 + column;
  k -= UNITS_O;
  if (k < UNITS_GU) {
    const int i = k >> 1, tile = 256 * (i >> 1) + two + (i & 1) + w.pick * 256 * SLICES;
    return 1 << 24 | tile * 16 + column;
  }
  k -= UNITS_GU;
  if (k < UNITS_DOWN) return 2 << 24 | (two + w.pick) * (16 * SLICES) + 16 * (k >> 1) + column;
  k -= UNITS_DOWN;
  if (k < UNITS_QKV - 1) return 3 << 24 | (two + w.pick) * 16 + column;
  const int tile = 256 + w.owner, last = w.column + 4 * w.pick;
  if (SIX_V != SIX_QK && tile >= 320) return 4 << 24 | (tile - 320) * 16 + last;
  return 3 << 24 | tile * 16 + last;
}
DEV void fetch(const Args& g, u32 place, u32 slot, int lane) {
  constexpr u32 SIXES = SIX_O | SIX_GU << 1 | SIX_DOWN << 2 | SIX_QK << 3 | SIX_V << 4;
  const Planes& matrix = (&g.o)[place >> 24];
  if (ANY_SIX && (SIXES >> (place >> 24) & 1))
    fetch_unit<true>(matrix, place & 0xffffff, slot, lane);
  else
    fetch_unit<false>(matrix, place & 0xffffff, slot, lane);
}
// This CTA's half of the attention's outputs into the slots of the first matrix.
DEV void stage_attended(const Args& g, u32 smem, int rank, int tid) {
  uint4 v[NT][4];  // 32 columns each
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int n = (tid >> 6) + 8 * i, at = tid & 63;
    const uint4* from = g.attended + (min(n, g.m - 1) * HIDDEN + rank * 2048 + at * 32) / 8;
#pragma unroll
    for (int q = 0; q < 4; ++q) v[i][q] = from[q];
  }
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    const int n = (tid >> 6) + 8 * i, j = tid & 7;
    const u32 to = smem + Layout::X + (tid >> 3 & 7) * COLUMN;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4 r = reorder(v[i][q]);
      sts16(to + ((4 * (j & 1) + q) * TOKENS + n) * 64 + 16 * ((j >> 1) ^ (q >> 1)), r.x, r.y, r.z,
            r.w);
    }
    const float mean = mean32(v[i][0], v[i][1], v[i][2], v[i][3]);
    stage_mean(to, mean, n, j >> 1, j & 1, 2);
  }
}

DEV void multiply_all(const Args& g, u32 smem, int rank, int warp, int lane) {
  const int half = warp >> 3, c = warp & 3;
  const Share share = {((int)blockIdx.x & ~1) + half, warp >> 2 & 1, SIDE * rank + c};
  const u32 ring = smem + Layout::RING + warp * STAGES * SLOT;
  // Lane k knows where unit k lies: to find that out for each unit anew is a fifth of its
  // instructions, 1.0 to 2.4 us a layer (H200, results/decode_chain_polls_h200.json).
  const u32 places = place_of(min(lane, UNITS - 1), share);
  int fetched = 0, fetch_slot = 0, slot = 0;
  auto fetch_next = [&]() {
    if (fetched < UNITS)
      fetch(g, __shfl_sync(~0u, places, fetched), ring + fetch_slot * SLOT, lane);
    ++fetched;
    copy_commit();
    fetch_slot = fetch_slot + 1 == STAGES ? 0 : fetch_slot + 1;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) fetch_next();
  cluster_sync();
  wait_for_inputs();
  stage_attended(g, smem, rank, 32 * warp + lane);
  bar_sync(1, 32 * WARPS);
  if (warp == 0 && lane < SIDE) bar_arrive_here(smem + Layout::X_FULL + 8 * lane);

  // Parts of a tile meet in the order 4 rank + c, tile after tile.
  const u32 part = (8 * share.pick + 4 * rank + c) * NT * 512 + 16 * lane;
  const u32 sums = address_in(smem + Layout::SUMS + part, half);
  const u32 full = address_in(smem + Layout::FULL, half);
  const u32 empty = smem + Layout::EMPTY + 8 * BUFFERS * half;
  int step = 0;
  auto send = [&](const float (&sum)[NT][4]) {
    const int buffer = step % BUFFERS;
    bar_wait(empty + 8 * buffer, (step / BUFFERS & 1) ^ 1);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      send_there(sums + buffer * Layout::SUM + nt * 512, sum[nt], full + 8 * (NT * buffer + nt));
    ++step;
  };
  auto take = [&]() {
    copy_wait<STAGES - 1>();
    __syncwarp();
    return ring + slot * SLOT;
  };
  auto give_back = [&]() {
    __syncwarp();
    fetch_next();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  };
  // Column `at` of all columns of activations in order.
  auto place = [&](int at) { return smem + Layout::X + at % XSLOTS * COLUMN; };
  auto open = [&](int at) {
    bar_wait(smem + Layout::X_FULL + 8 * (at % XSLOTS), at / XSLOTS & 1);
    return place(at);
  };
  auto close = [&](int at) {
    __syncwarp();
    if (lane == 0) bar_arrive_here(smem + Layout::X_EMPTY + 8 * (at % XSLOTS));
  };

  int at = c;
  {
    float sum[NT][4] = {};
#pragma unroll 1
    for (int i = 0; i < 2; ++i, at += 4) {
      multiply_unit<SIX_O>(sum, take(), open(at), lane);
      give_back();
      close(at);
    }
    send(sum);
  }
  {
    open(at), open(at + 4);
#pragma unroll 1
    for (int i = 0; i < 2 * SLICES; ++i) {
      float sum[NT][4] = {};
#pragma unroll 1
      for (int k = 0; k < 2; ++k) {
        multiply_unit<SIX_GU>(sum, take(), place(at + 4 * k), lane);
        give_back();
      }
      send(sum);
    }
    close(at), close(at + 4);
    at += SIDE;
  }
  launch_next();
  {
    float sum[NT][4] = {};
#pragma unroll 1
    for (int i = 0; i < UNITS_DOWN; ++i, at += 4) {
      multiply_unit<SIX_DOWN>(sum, take(), open(at), lane);
      give_back();
      close(at);
    }
    send(sum);
  }
#if !IS_LAST
  float sum[NT][4] = {};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    multiply_unit<SIX_QK>(sum, take(), open(at + 4 * i), lane);
    give_back();
  }
  send(sum);
  float last[NT][4] = {};
  const u32 x = open(at + 4 * share.pick);
  if (SIX_V != SIX_QK && 256 + share.owner >= 320)
    multiply_unit<SIX_V>(last, take(), x, lane);
  else
    multiply_unit<SIX_QK>(last, take(), x, lane);
  send(last);
#endif
}
