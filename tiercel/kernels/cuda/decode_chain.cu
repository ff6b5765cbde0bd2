// From one attention of a dense decoder to the next for m <= 8 NT tokens in one launch; behind
// the headers of kernels/decode_chain.py, of which the last one left namespace q6 open. Why
// each part is as it is: docs/notes/decode_chain.md. Host side: ops/decode_chain.py.
//
// Split: 128 CTAs in clusters of two. A CTA owns 32 rows of o and of down, 32 pairs of gate
// and up of each 4096, 48 rows of q, k, v. Both CTAs of a cluster multiply the rows of both,
// each with half of the columns of a slice of 4096: unit columns 8 rank to 8 rank + 7. Of its
// 16 warps, 8 multiply each CTA's rows; a warp takes columns c and c + 4 of the half, of every
// second tile.
//
// Weights: a warp streams its units through a ring of its own, in order of use over all
// matrices. Sums: st.async to shared memory of the rows' owner; its barrier counts bytes. A
// warp for each 8 tokens adds the parts in a fixed order, so a token's bits depend on nothing
// but itself.
//
// Exchange: what a CTA owns of the next x is a group of 32 columns, published in the order in
// which units take it, with a flag that holds the number of this launch: nothing is ever
// reset. One warp of each CTA polls the flags and fetches x by bulk copies, a column of 256 at
// a time. Waiting for others is bounded: after MOST_TICKS a CTA waits no more, and its results
// become NaN.
//
// Macros: NT, SLICES (of 4096 columns in a row of down), IS_LAST (no next q, k, v), SIX_*
// (matrices of Q6_K), ANY_SIX, STAGES (units of a warp in flight), XSLOTS (columns of x in
// shared memory), BUFFERS (of sums).
}  // namespace q6
#define CTAS 128
#define WARPS 16              // that multiply
#define FETCHER WARPS         // the warp that brings activations
#define REDUCER (WARPS + 2)   // the first of NT warps that add up and publish
#define THREADS 640
#define HIDDEN 4096
#define HEADS_WIDTH 6144      // rows of q, k, v
#define SIDE 8                // unit columns of a slice in a CTA
#define SLOT (ANY_SIX ? 3360 : 2304)
// Units of a warp, two columns of each tile: of o, gate and up, down, q k v.
#define UNITS_O 2
#define UNITS_GU (4 * SLICES)
#define UNITS_DOWN (2 * SLICES)
#define UNITS_QKV (IS_LAST ? 0 : 3)
#define UNITS (UNITS_O + UNITS_GU + UNITS_DOWN + UNITS_QKV)
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
  u32* flags;              // (KINDS, 2, CTAS)
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

// ---- warps that multiply
template <bool SIX> DEV void fetch_unit(const Planes& w, i64 unit, u32 slot, int lane) {
  if (SIX)
    q6::Source(w, unit, 0, 0, lane).fetch(slot);
  else
    q4::Source(w, unit, 0, 0, lane).fetch(slot);
}
template <bool SIX> DEV void multiply_unit(float (&sum)[NT][4], u32 slot, u32 column, int lane) {
  if (SIX)
    q6::multiply(sum, slot, q6::Tokens(column, lane), lane);
  else
    q4::multiply(sum, slot, q4::Tokens(column, lane), lane);
}
// What a warp multiplies: columns `column` and 4 further of tile `pick` of two (of gate, or of
// up) of the rows of CTA `owner`.
struct Share { int owner, pick, column; };
// Unit `k` of a share in order of use.
DEV void fetch(const Args& g, int k, const Share& w, u32 slot, int lane) {
  const int two = 2 * w.owner, column = w.column + 4 * (k & 1);
  if (k < UNITS_O) {
    fetch_unit<SIX_O>(g.o, (i64)(two + w.pick) * 16 + column, slot, lane);
  } else if (k < UNITS_O + UNITS_GU) {
    const int i = (k - UNITS_O) >> 1;
    const int tile = 256 * (i >> 1) + two + (i & 1) + w.pick * 256 * SLICES;
    fetch_unit<SIX_GU>(g.gate_up, (i64)tile * 16 + column, slot, lane);
  } else if (k < UNITS_O + UNITS_GU + UNITS_DOWN) {
    const int slice = (k - UNITS_O - UNITS_GU) >> 1;
    const i64 unit = (i64)(two + w.pick) * (16 * SLICES) + 16 * slice + column;
    fetch_unit<SIX_DOWN>(g.down, unit, slot, lane);
  } else if (k < UNITS - 1) {
    fetch_unit<SIX_QK>(g.qk, (i64)(two + w.pick) * 16 + column, slot, lane);
  } else if (k < UNITS) {
    const int tile = 256 + w.owner, last = w.column + 4 * w.pick;
    if (SIX_V != SIX_QK && tile >= 320)
      fetch_unit<SIX_V>(g.v, (i64)(tile - 320) * 16 + last, slot, lane);
    else
      fetch_unit<SIX_QK>(g.qk, (i64)tile * 16 + last, slot, lane);
  }
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
  int fetched = 0, fetch_slot = 0, slot = 0;
  auto fetch_next = [&]() {
    fetch(g, fetched++, share, ring + fetch_slot * SLOT, lane);
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

// ---- the warp that brings activations: a lane those that the same warps use, in their order
DEV void bring(const Args& g, u8* memory, u32 smem, int rank, int lane) {
  cluster_sync();
  wait_for_inputs();
  u32 epoch[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) epoch[nt] = 1 + __ldcg(g.flags + nt * CTAS + blockIdx.x);
  // This CTA's flags are not raised before all of its warps have looked.
  bar_sync(2, 32 * (1 + NT));
  // CTAs begin at different columns: all want the same few lines of the L2 at once.
  const int c = (lane + (blockIdx.x >> 1)) & 3, end = 2 * (KINDS - IS_LAST);
  int next = lane < 4 ? 0 : end;
#pragma unroll 1
  while (__any_sync(~0u, next < end)) {
    if (next == end) continue;
    const int kind = next >> 1;
    bool there[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      there[i] = true;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const u32* flags = g.flags + (2 * kind + nt) * CTAS + 8 * (SIDE * rank + c + 4 * i);
        const uint4 a = load_relaxed(flags), b = load_relaxed(flags + 4);
        there[i] &= a.x == epoch[nt] && a.y == epoch[nt] && a.z == epoch[nt] && a.w == epoch[nt];
        there[i] &= b.x == epoch[nt] && b.y == epoch[nt] && b.z == epoch[nt] && b.w == epoch[nt];
      }
    }
    const bool lost = !(there[0] && there[1]) && is_lost(memory);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((next & 1) != i || !(there[i] || lost)) continue;
      const int column = c + 4 * i, at = SIDE * (kind + 1) + column, slot = at % XSLOTS;
      const int round = at / XSLOTS;
      if (round > 0 && !bar_has_passed(smem + Layout::X_EMPTY + 8 * slot, (round - 1) & 1))
        continue;
      copy_fence();
      const u32 bar = smem + Layout::X_FULL + 8 * slot;
      const u8* from = g.exchange + (i64)(16 * kind + SIDE * rank + column) * COLUMN;
      bar_expect(bar, COLUMN);
      bulk_copy(smem + Layout::X + slot * COLUMN, from, COLUMN, bar);
      ++next;
    }
  }
}

// ---- warps that add up: `nt` of tokens 8 nt and on
struct Adder {
  const Args& g;
  u8* memory;
  u32 smem, scratch, epoch;
  int rank, nt, lane, step;

  // What results are multiplied by: NaN where others were waited for in vain.
  DEV float one_or_nan() const {
    return *(volatile u32*)(memory + Layout::LOST) ? __int_as_float(0x7fffffff) : 1.f;
  }
  // Sums of this CTA's next two tiles, in units of 2^-24: lane 4 g + t has rows g and g + 8 of
  // tokens 2 t and 2 t + 1.
  DEV void reduce(float (&first)[4], float (&second)[4]) {
    const int buffer = step % BUFFERS;
    const u32 full = smem + Layout::FULL + 8 * (NT * buffer + nt);
    if (lane == 0) bar_expect(full, 16 * 512);
    bar_wait(full, step / BUFFERS & 1);
    const u32 from = smem + Layout::SUMS + buffer * Layout::SUM + nt * 512 + 16 * lane;
    add_parts(first, from), add_parts(second, from + 8 * NT * 512);
    __syncwarp();
    const u32 empty = smem + Layout::EMPTY + 8 * (BUFFERS * rank + buffer);
    if (lane < 2) bar_arrive_there(address_in(empty, lane));
    ++step;
  }
  DEV void add_parts(float (&y)[4], u32 from) {
    y[0] = y[1] = y[2] = y[3] = 0;
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const uint4 v = lds16(from + part * NT * 512);
      y[0] += __uint_as_float(v.x), y[1] += __uint_as_float(v.y);
      y[2] += __uint_as_float(v.z), y[3] += __uint_as_float(v.w);
    }
  }
  // Tile u of two to where `rows` finds it.
  DEV void lay(const float (&y)[4], int u) {
    float* to = (float*)(memory + scratch) + 2 * (lane & 3) * (SCRATCH_PITCH / 4) + 16 * u;
    const int row = lane >> 2;
    to[row] = y[0], to[row + SCRATCH_PITCH / 4] = y[1];
    to[row + 8] = y[2], to[row + 8 + SCRATCH_PITCH / 4] = y[3];
  }
  // Of token lane / 4 rows 8 (lane % 4) and on of both tiles.
  DEV void rows(float (&v)[8]) {
    __syncwarp();
    const u32 at = smem + scratch + (lane >> 2) * SCRATCH_PITCH + 32 * (lane & 3);
    const uint4 a = lds16(at), b = lds16(at + 16);
    v[0] = __uint_as_float(a.x), v[1] = __uint_as_float(a.y), v[2] = __uint_as_float(a.z);
    v[3] = __uint_as_float(a.w), v[4] = __uint_as_float(b.x), v[5] = __uint_as_float(b.y);
    v[6] = __uint_as_float(b.z), v[7] = __uint_as_float(b.w);
    __syncwarp();
  }
  DEV u32 pack(float lo, float hi) {
    return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16;
  }
  // What `rows` gave, as activations of the matrix that takes `kind`.
  DEV void publish(const float (&v)[8], int kind) {
    const int q = lane & 3, n = 8 * nt + (lane >> 2), j = blockIdx.x & 7;
    u8* to = g.exchange + (i64)(16 * kind + blockIdx.x / 8) * COLUMN;
    const uint4 x = make_uint4(pack(v[0], v[2]), pack(v[1], v[3]), pack(v[4], v[6]),
                               pack(v[5], v[7]));
    *(uint4*)(to + ((4 * (j & 1) + q) * TOKENS + n) * 64 + 16 * ((j >> 1) ^ (q >> 1))) = x;
    float mean = sum8(x);
    mean += __shfl_xor_sync(~0u, mean, 1);
    mean += __shfl_xor_sync(~0u, mean, 2);
    mean *= 1.f / 32;
    if (q == 0) {
      const u16 near = float_to_half(mean);
      u16* means = (u16*)(to + 4096 * NT + 32 * n + 8 * (j >> 1)) + (j & 1);
      means[0] = near, means[2] = float_to_half(mean - half_to_float(near));
    }
    copy_fence();
    __syncwarp();
    if (lane == 0) store_release(g.flags + (2 * kind + nt) * CTAS + blockIdx.x, epoch);
  }
  // Adds to the residual and publishes x times the norm's weight.
  DEV void publish_normed(float (&residual)[8], const float (&w)[8], int kind) {
    float v[8], squares = 0;
    rows(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      residual[i] += v[i] * 16777216.f;
      squares += residual[i] * residual[i];
      v[i] = residual[i] * w[i] * SHRINK;
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    // They validate themselves, so that nobody waits for them behind x. All lose two bits, whatever
    // place a token has.
    squares = __uint_as_float(__float_as_uint(squares) & ~3u);
    uint4 own;
    own.x = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane));
    own.y = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 4));
    own.z = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 8));
    own.w = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 12));
    own.w |= epoch & 3;
    if (lane < 2) store_relaxed(squares_of(kind, blockIdx.x) + lane, own);
    publish(v, kind);
  }
  DEV uint4* squares_of(int kind, int cta) const {
    return g.squares + (((kind ? CTAS : 0) + cta) * 2 + nt) * 2;
  }
  // 1 / rms of tokens 2 t and 2 t + 1 and what the sums lack, from all CTAs' squares.
  DEV void norms(float (&scale)[2], int kind) {
    uint4 v[4][2];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i >> 1][i & 1] = load_relaxed(squares_of(kind, 32 * (i >> 1) + lane) + (i & 1));
#pragma unroll
      for (int i = 0; i < 8; ++i) there &= (v[i >> 1][i & 1].w & 3) == (epoch & 3);
    } while (!__all_sync(~0u, there) && !is_lost(memory));
    float s[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& own = v[i >> 1][i & 1];
      const int first = 4 * (i & 1);
      s[first] += __uint_as_float(own.x), s[first + 1] += __uint_as_float(own.y);
      s[first + 2] += __uint_as_float(own.z), s[first + 3] += __uint_as_float(own.w & ~3u);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      for (int o = 16; o; o >>= 1) s[i] += __shfl_xor_sync(~0u, s[i], o);
    const int t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = t < 2 ? (t == 0 ? s[i] : s[2 + i]) : (t == 2 ? s[4 + i] : s[6 + i]);
      scale[i] = rsqrtf(mine * (1.f / HIDDEN) + g.eps) * GROW;
    }
  }
};

DEV void add_all(const Args& g, u8* memory, u32 smem, int rank, int nt, int lane) {
  const int first = 32 * blockIdx.x + 8 * (lane & 3), n = 8 * nt + (lane >> 2);
  float norm[8];  // of the next norm: from cold memory, so long before it is needed
  load8(norm, g.mlp_norm + first);
  cluster_sync();
  wait_for_inputs();
  const u32 epoch = 1 + __ldcg(g.flags + nt * CTAS + blockIdx.x);
  bar_sync(2, 32 * (1 + NT));
  Adder adder = {g, memory, smem, (u32)(Layout::SCRATCH + nt * 8 * SCRATCH_PITCH), epoch,
                 rank, nt, lane, 0};
  float* x = g.x + (i64)n * HIDDEN + first;
  float residual[8] = {}, y[4], z[4], scale[2];
  if (n < g.m) load8(residual, x);
  adder.reduce(y, z), adder.lay(y, 0), adder.lay(z, 1);
  adder.publish_normed(residual, norm, 0);
  load8(norm, g.next_norm + first);
  adder.norms(scale, 0);
#pragma unroll 1
  for (int s = 0; s < SLICES; ++s) {
#pragma unroll 1
    for (int u = 0; u < 2; ++u) {
      adder.reduce(y, z);  // gate, up
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gate = y[i] * scale[i & 1];
        y[i] = gate / (1.f + __expf(-gate)) * (z[i] * scale[i & 1]);
      }
      adder.lay(y, u);
    }
    float h[8];
    adder.rows(h);
    adder.publish(h, 1 + s);
  }
  adder.reduce(y, z), adder.lay(y, 0), adder.lay(z, 1);
  adder.publish_normed(residual, norm, KINDS - 1);
  const float factor = adder.one_or_nan();
  if (n < g.m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) residual[i] *= factor;
    *(float4*)x = make_float4(residual[0], residual[1], residual[2], residual[3]);
    *(float4*)(x + 4) = make_float4(residual[4], residual[5], residual[6], residual[7]);
  }
#if !IS_LAST
  adder.norms(scale, KINDS - 1);
  auto store = [&](const float (&y)[4], int tile) {
    const float factor = adder.one_or_nan();
    u16* to = g.heads + 16 * tile + (lane >> 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int token = 8 * nt + 2 * (lane & 3) + (k & 1);
      if (token < g.m)
        to[(i64)token * HEADS_WIDTH + 8 * (k >> 1)] = float_to_half(y[k] * scale[k & 1] * factor);
    }
  };
  adder.reduce(y, z);
  store(y, 2 * blockIdx.x), store(z, 2 * blockIdx.x + 1);
  adder.reduce(y, z);
#pragma unroll
  for (int k = 0; k < 4; ++k) y[k] += z[k];
  store(y, 256 + blockIdx.x);
#endif
}

// ---- the kernel
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    decode_chain(const __grid_constant__ Args g) {
  SHARED_MEMORY(memory);
  const int tid = threadIdx.x, lane = tid & 31, rank = blockIdx.x & 1;
  const int warp = __shfl_sync(~0u, tid >> 5, 0);
  const u32 smem = shared_address(memory);
  if (tid == 0) {
    for (int i = 0; i < XSLOTS; ++i)
      bar_init(smem + Layout::X_FULL + 8 * i, 1), bar_init(smem + Layout::X_EMPTY + 8 * i, 4);
    for (int i = 0; i < BUFFERS * NT; ++i) bar_init(smem + Layout::FULL + 8 * i, 1);
    for (int i = 0; i < 2 * BUFFERS; ++i) bar_init(smem + Layout::EMPTY + 8 * i, NT);
    *(u32*)(memory + Layout::LOST) = 0;
    *(u32*)(memory + Layout::START) = clock_high();
    bar_init_fence();
  }
  __syncthreads();
  if (warp < WARPS)
    take_registers();
  else
    drop_registers();
  if (warp < WARPS) {
    multiply_all(g, smem, rank, warp, lane);
  } else if (warp == FETCHER) {
    bring(g, memory, smem, rank, lane);
  } else if (warp >= REDUCER && warp < REDUCER + NT) {
    add_all(g, memory, smem, rank, warp - REDUCER, lane);
  } else {
    cluster_sync();
    wait_for_inputs();
  }
  __syncwarp();
  cluster_sync();  // no CTA ends while the other one still writes to its memory
}
