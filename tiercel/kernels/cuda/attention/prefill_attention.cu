// prefill_attention over a paged cache for Hopper (sm_90a), head_dim 128: plain causal, chunked and
// multi-item. Token i of a request sees key k iff k <= i and (k < P or k >= its item_start); i and
// k are indices in the sequence, P is its prefix (a plain request: its whole length). Keys below P
// are in pages, item keys in this step's projections. Layouts: at the parameters. Host side:
// prefill_attention.py.
//
// Persistent grid, one CTA per SM. Warpgroup 0 is the producer: one thread issues TMA boxes into a
// ring of K and V slots, in the order K0, K1 V0, K2 V1, ... over all tiles. Warpgroups 1 and 2 own
// 64 packed rows each (64 / GROUP_HEADS tokens x GROUP_HEADS heads) of a tile. They take turns on
// the tensor cores (named barriers), so that one does its softmax while the other multiplies. Q is
// double buffered; the last product of a tile is issued with the first score product of the next
// one. A tile runs item steps first (WN keys, always masked), then pages (BN keys, masked only
// where the diagonal or P cuts them): one online softmax over both.
//
// Slots after a tile's tokens, and rows after them in k_new and v_new, may hold anything, NaN of a
// failed request too: scores of theirs are replaced, and values of theirs are cleared.
//
// Macros: GROUP_HEADS query heads per KV head (1, 2, 4, 8), PAGE rows per page (16, 32, 64, 128),
// IS_BF16 (0: fp16), FAST_LOOP (1: exponentiate with the maxima of earlier steps), IS_PART (1:
// results are float32, with the base-2 logarithms of their sums beside them, to be merged). Shared
// memory, dynamic: QBUF * QBYTES + STAGES * KVBYTES + 1024 for alignment = 230,400 bytes.
#include "include/hopper.cuh"

#define D 128    // head_dim
#define NWG 2    // consumer warpgroups; 3 with BN 64: 489 TFLOP/s, not 537 (H200, 2048 x 128 x 32)
#define BN 128   // keys of a page step; 160 spills (515 TFLOP/s), 176 spills more
#define WN 64    // keys of an item step; 32: 489 TFLOP/s
#define STAGES 5 // ring slots
#define QBUF 2   // Q buffers
#define QBYTES (NWG * 64 * D * 2)
#define KVBYTES (BN * D * 2)
#define NTHR (128 * (NWG + 1))
#define TOKENS (64 / GROUP_HEADS)          // tokens of one warpgroup
#define PBOX (PAGE < BN ? PAGE : BN) // rows of one page box
#define NEG_INF (-__int_as_float(0x7f800000))
#define START_MAX (-1e30f) // finite, so that a row without visible keys ends with sum 0, not NaN

#if IS_PART
typedef float Result;
#else
typedef u16 Result;
#endif

// A ring slot holds BN keys of K or V as two 64-column halves, [half][key][128 bytes].
struct Ring { u32 full, empty, base; };
struct State { int slot; u32 phase; };
__device__ __forceinline__ void advance(State& s) {
  if (++s.slot == STAGES) { s.slot = 0; s.phase ^= 1; }
}
// a consumer warp gives a ring slot back to the producer
__device__ __forceinline__ void release(u32 bar) {
  if ((threadIdx.x & 31) == 0) mbar_arrive(bar);
}

// What a step needs and no step changes.
struct Consts {
  Ring ring;
  int wg;    // consumer warpgroup
  float sl2; // scale * log2(e)
  float thr; // growth of a maximum, in scores, below which sums keep their scale
  const Result* out;
  float* sums; // of parts
};

// Normalise and store one warpgroup's 64 x 128 tile; a quad transposes 4 x 4 words, so that every
// store is 16 bytes. A null destination stores nothing. Of parts, a quad's stores of 8 bytes fill a
// sector.
__device__ __forceinline__ void epilogue(float (&o)[64], const float (&m)[2], const float (&l)[2],
                                         const Consts& k, Result* dst0, Result* dst1) {
  const int lane = threadIdx.x & 31, q4 = lane & 3;
  float l0 = l[0], l1 = l[1];
  l0 += __shfl_xor_sync(~0u, l0, 1); l1 += __shfl_xor_sync(~0u, l1, 1);
  l0 += __shfl_xor_sync(~0u, l0, 2); l1 += __shfl_xor_sync(~0u, l1, 2);
  const float v0 = l0 > 0.f ? rcp_approx(l0) : 0.f, v1 = l1 > 0.f ? rcp_approx(l1) : 0.f;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float v = h ? v1 : v0;
    Result* dst = h ? dst1 : dst0;
#if IS_PART
    if (dst) {
#pragma unroll
      for (int j = 0; j < 16; j++)
        *(float2*)(dst + 8 * j + 2 * q4) = make_float2(o[4 * j + 2 * h] * v, o[4 * j + 2 * h + 1] * v);
      // log2(0) is -inf: a row that saw nothing has no weight
      if (q4 == 0) k.sums[(dst - k.out) / D] = m[h] * k.sl2 + log2_approx(h ? l1 : l0);
    }
#else
#pragma unroll
    for (int b = 0; b < 4; b++) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 4 * (4 * b + j) + 2 * h;
        x[j] = pack(o[at] * v, o[at + 1] * v);
      }
      u32 s0 = (lane & 1) ? x[0] : x[1], s1 = (lane & 1) ? x[2] : x[3];
      s0 = __shfl_xor_sync(~0u, s0, 1); s1 = __shfl_xor_sync(~0u, s1, 1);
      if (lane & 1) { x[0] = s0; x[2] = s1; } else { x[1] = s0; x[3] = s1; }
      s0 = (lane & 2) ? x[0] : x[2]; s1 = (lane & 2) ? x[1] : x[3];
      s0 = __shfl_xor_sync(~0u, s0, 2); s1 = __shfl_xor_sync(~0u, s1, 2);
      if (lane & 2) { x[0] = s0; x[1] = s1; } else { x[2] = s0; x[3] = s1; }
      if (dst) *(uint4*)(dst + (4 * b + q4) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
#endif
  }
}
__device__ __forceinline__ void clear(float (&o)[64], float (&m)[2], float (&l)[2]) {
#pragma unroll
  for (int i = 0; i < 64; i++) o[i] = 0.f;
  m[0] = m[1] = START_MAX;
  l[0] = l[1] = 0.f;
}
__device__ __forceinline__ void rescale(float (&o)[64], float a0, float a1) {
#pragma unroll
  for (int j = 0; j < 16; j++) {
    o[4 * j] *= a0; o[4 * j + 1] *= a0; o[4 * j + 2] *= a1; o[4 * j + 3] *= a1;
  }
}
// Maxima over a quad; a0, a1: factors of what was summed before. The running maximum follows only
// when it grew by more than 8 in the exponent: sums stay below 2^8 times their exact scale.
__device__ __forceinline__ void grow(float (&m)[2], float x0, float x1, float sl2, float thr,
                                     float& a0, float& a1) {
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
  if (x0 > m[0] + thr) { a0 = exp2_approx((m[0] - x0) * sl2); m[0] = x0; }
  if (x1 > m[1] + thr) { a1 = exp2_approx((m[1] - x1) * sl2); m[1] = x1; }
}

// Columns lo <= c < up of a masked step are visible, for the thread's two rows (8 apart).
struct Bounds { int lo0, up0, lo1, up1; };

// Zeros to the rows of V from `seen` on, of N: their weight is 0, and 0 * NaN is NaN. Both warpgroups
// write the same, each before its own products.
template <int N> __device__ __forceinline__ void clear_rows(u32 v, int seen, int wg) {
  for (int i = threadIdx.x & 127; i < 8 * (N - seen); i += 128)
    for (int half = 0; half < 2; half++)
      store_shared(v + half * N * 128 + seen * 128 + i * 16, make_uint4(0, 0, 0, 0));
  fence_shared_writes();
  bar_sync(4 + wg, 128);
}

// One step of one consumer: scores of N keys, the product of the P before it (NP keys; 0: none)
// with its V, softmax of the new scores to pn.
// EDGE: that P belongs to the previous tile, which is stored here. FAST: p and pn must differ.
// seen: rows of that V that its tile may see.
template <int N, int NP, bool EDGE, bool FAST>
__device__ __forceinline__ void step(float (&o)[64], u32 (&p)[BN / 4], u32 (&pn)[BN / 4],
                                     float (&m)[2], float (&l)[2], State& st, const Consts& k,
                                     u32 qd, bool masked, const Bounds& b, int seen,
                                     Result* dst0, Result* dst1) {
  float s[N / 2];
  const Ring& ring = k.ring;
  const int kslot = st.slot;
  mbar_wait(ring.full + 8 * kslot, st.phase);
  State sv = st;
  advance(sv);
  const int vslot = sv.slot;
  if (NP > 0) {
    mbar_wait(ring.full + 8 * vslot, sv.phase);
    if (seen < NP) clear_rows<NP>(ring.base + vslot * KVBYTES, seen, k.wg);
  }
  const u32 kd = uniform(mdesc(ring.base + kslot * KVBYTES, 16));
  const u32 vd = uniform(mdesc(ring.base + vslot * KVBYTES, (NP > 0 ? NP : 16) * 128));
  bar_sync(1 + k.wg, 256);
  wg_fence();
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    const u32 a = qd + (((i >> 2) * 8192 + (i & 3) * 32) >> 4);
    const u32 c = kd + (((i >> 2) * (N * 128) + (i & 3) * 32) >> 4);
    if (i == 0) wgmma_ss<0>(s, a, DESC_HI, c, DESC_HI);
    else wgmma_ss<1>(s, a, DESC_HI, c, DESC_HI);
  }
  wg_commit();
  st = sv;
  if (NP > 0) {
#pragma unroll
    for (int i = 0; i < NP / 16; i++)
      wgmma_rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], vd + i * (2048 >> 4),
               DESC_HI);
    wg_commit();
    advance(st);
  }
  bar_arrive(1 + (k.wg + 1 == NWG ? 0 : k.wg + 1), 256);
  wg_wait<(NP > 0 && !EDGE) ? 1 : 0>();
  pin(s);
  release(ring.empty + 8 * kslot);
  if (EDGE) { // the product just finished belongs to the previous tile: store it, start afresh
    pin(o);
    release(ring.empty + 8 * vslot);
    epilogue(o, m, l, k, dst0, dst1);
    clear(o, m, l);
  }
  if (masked) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int c = 8 * j + e;
        if (c < b.lo0 || c >= b.up0) s[4 * j + e] = NEG_INF;
        if (c < b.lo1 || c >= b.up1) s[4 * j + 2 + e] = NEG_INF;
      }
    }
  }
  float x0 = s[0], x1 = s[2], s0 = 0.f, s1 = 0.f, a0 = 1.f, a1 = 1.f;
  if (FAST) {
    // Maxima of earlier steps almost always still serve: exponentiate first, look for growth
    // beside it, and redo the step's exponentials if there was any.
    float c0 = -m[0] * k.sl2, c1 = -m[1] * k.sl2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1]));
      x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
      const float e0 = exp2_approx(fmaf(s[4 * j], k.sl2, c0)),
                  e1 = exp2_approx(fmaf(s[4 * j + 1], k.sl2, c0));
      const float e2 = exp2_approx(fmaf(s[4 * j + 2], k.sl2, c1)),
                  e3 = exp2_approx(fmaf(s[4 * j + 3], k.sl2, c1));
      s0 += e0 + e1; s1 += e2 + e3;
      pn[2 * j] = pack(e0, e1); pn[2 * j + 1] = pack(e2, e3);
    }
    const bool has_grown = __any_sync(~0u, x0 > m[0] + k.thr || x1 > m[1] + k.thr);
    if (has_grown) {
      grow(m, x0, x1, k.sl2, k.thr, a0, a1);
      c0 = -m[0] * k.sl2; c1 = -m[1] * k.sl2; s0 = 0.f; s1 = 0.f;
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float e0 = exp2_approx(fmaf(s[4 * j], k.sl2, c0));
        const float e1 = exp2_approx(fmaf(s[4 * j + 1], k.sl2, c0));
        const float e2 = exp2_approx(fmaf(s[4 * j + 2], k.sl2, c1));
        const float e3 = exp2_approx(fmaf(s[4 * j + 3], k.sl2, c1));
        s0 += e0 + e1; s1 += e2 + e3;
        pn[2 * j] = pack(e0, e1); pn[2 * j + 1] = pack(e2, e3);
      }
    }
    l[0] = l[0] * a0 + s0; l[1] = l[1] * a1 + s1;
    wg_wait<0>();
    pin(o);
    release(ring.empty + 8 * vslot);
    if (has_grown) rescale(o, a0, a1);
    return;
  }
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    x0 = fmaxf(x0, fmaxf(s[4 * j], s[4 * j + 1]));
    x1 = fmaxf(x1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  grow(m, x0, x1, k.sl2, k.thr, a0, a1);
  const bool has_grown = __any_sync(~0u, a0 != 1.f || a1 != 1.f);
  const float c0 = -m[0] * k.sl2, c1 = -m[1] * k.sl2;
#pragma unroll
  for (int j = 0; j < N / 8; j++) { // in place: p may still feed the running product
    s[4 * j] = exp2_approx(fmaf(s[4 * j], k.sl2, c0));
    s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], k.sl2, c0));
    s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], k.sl2, c1));
    s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], k.sl2, c1));
    s0 += s[4 * j] + s[4 * j + 1]; s1 += s[4 * j + 2] + s[4 * j + 3];
  }
  l[0] = l[0] * a0 + s0; l[1] = l[1] * a1 + s1;
  if (NP > 0 && !EDGE) {
    wg_wait<0>();
    pin(o);
    release(ring.empty + 8 * vslot);
  }
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    pn[2 * j] = pack(s[4 * j], s[4 * j + 1]);
    pn[2 * j + 1] = pack(s[4 * j + 2], s[4 * j + 3]);
  }
  if (NP > 0 && !EDGE && has_grown) rescale(o, a0, a1);
}

// the very last product of a CTA, or of a tile without page steps
template <int NP>
__device__ __forceinline__ void last(float (&o)[64], u32 (&p)[BN / 4], const Consts& k, State& st,
                                     int seen) {
  const Ring& ring = k.ring;
  const int vslot = st.slot;
  mbar_wait(ring.full + 8 * vslot, st.phase);
  if (seen < NP) clear_rows<NP>(ring.base + vslot * KVBYTES, seen, k.wg);
  wg_fence();
  const u32 vd = uniform(mdesc(ring.base + vslot * KVBYTES, NP * 128));
#pragma unroll
  for (int i = 0; i < NP / 16; i++) {
    wgmma_rs(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], vd + i * (2048 >> 4), DESC_HI);
  }
  wg_commit();
  advance(st);
  wg_wait<0>();
  pin(o);
  release(ring.empty + 8 * vslot);
}

// One tile, 8 ints: first row of q, tokens, index of its first token, request, end of its page keys
// (P, or where its part ends), index of its first item key (the index after its tokens: none),
// first page key (a multiple of BN), row of its result.
struct Work { int q_row, tokens, i0, req, P, low, first, out_row; };
__device__ __forceinline__ Work load_work(const int* t) {
  const int4 a = *(const int4*)t, b = *(const int4*)(t + 4);
  return Work{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
// steps over items and over pages; every tile has at least one of both
__device__ __forceinline__ void counts(const Work& w, int& n_item, int& n_page) {
  const int hi = w.i0 + w.tokens;
  n_item = (hi - w.low + WN - 1) / WN;
  n_page = (min(w.P, hi) - w.first + BN - 1) / BN;
}
// tile and KV head of a work number; neighbours take a tile's heads, or a head's tiles
__device__ __forceinline__ void locate(int id, int n_tiles, int kv_heads, int heads_first,
                                       int& tile, int& head) {
  tile = heads_first ? id / kv_heads : id % n_tiles;
  head = heads_first ? id % kv_heads : id / n_tiles;
}

struct Load { bool is_page; int head, row[BN / PBOX]; };
__device__ __forceinline__ void issue(const Load& ld, const TMap* pages, const TMap* items,
                                      const Ring& ring, State& st) {
  mbar_wait(ring.empty + 8 * st.slot, st.phase ^ 1);
  const u32 bar = ring.full + 8 * st.slot, dst = ring.base + st.slot * KVBYTES;
  if (ld.is_page) {
    mbar_expect(bar, KVBYTES);
#pragma unroll
    for (int x = 0; x < BN / PBOX; x++)
      for (int c = 0; c < 2; c++)
        tma3(dst + c * BN * 128 + x * PBOX * 128, pages, bar, c * 64, ld.head, ld.row[x]);
  } else {
    mbar_expect(bar, WN * D * 2);
    for (int c = 0; c < 2; c++) tma3(dst + c * WN * 128, items, bar, c * 64, ld.head, ld.row[0]);
  }
  advance(st);
}

extern "C" __global__ void __launch_bounds__(NTHR, 1) prefill_attention(
    const __grid_constant__ TMap q_map,     // (tokens, heads, D), boxes of TOKENS x GROUP_HEADS x 64
    const __grid_constant__ TMap k_map,     // (slots, kv_heads, D), boxes of PBOX x 1 x 64
    const __grid_constant__ TMap v_map,     // like k_map
    const __grid_constant__ TMap k_new_map, // (tokens, kv_heads, D), boxes of WN x 1 x 64
    const __grid_constant__ TMap v_new_map, // like k_new_map
    Result* __restrict__ out,               // (rows, heads, D) contiguous
    float* __restrict__ sums,               // (rows, heads), where IS_PART
    const int* __restrict__ item_start,     // (tokens,), read where a tile has item steps
    const int* __restrict__ tiles,          // (n_tiles, 8), see Work
    const int* __restrict__ block_tables,   // (requests, table_stride)
    int* __restrict__ counter,              // (4,): next work and CTAs done, zeros before and after;
                                            // number of tiles, heads_first: see locate
    int kv_heads, int table_stride, float sl2, float thr) {
  DYNAMIC_SHARED(raw);
  __shared__ __align__(8) u64 bars[2 * STAGES + 2 * QBUF];
  __shared__ int2 work[QBUF]; // tile (-1: no more) and KV head
  // Rows that a tile sees of its last item or page step; in registers they would spill in FAST_LOOP.
  __shared__ int last_seen[NWG];
  const u32 smem = (shared_address(raw) + 1023) & ~1023u;
  const u32 b0 = shared_address(bars);
  const Ring ring{b0, b0 + 8 * STAGES, smem + QBUF * QBYTES};
  const u32 qfull = b0 + 16 * STAGES, qempty = qfull + 8 * QBUF;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbar_init(ring.full + 8 * i, 1);
      mbar_init(ring.empty + 8 * i, 4 * NWG);
    }
    for (int i = 0; i < QBUF; i++) {
      mbar_init(qfull + 8 * i, 1);
      mbar_init(qempty + 8 * i, 4 * NWG);
    }
    mbar_fence();
  }
  __syncthreads();
  const int grp = uni(threadIdx.x >> 7);
  if (grp == 0) {
    lower_registers<40>();
    if (threadIdx.x != 0) return;
    State st{0, 0};
    int qs = 0;
    u32 qph = 0;
    // In device memory, so that a graph serves any number of tiles.
    const int n_tiles = counter[2], heads_first = counter[3], total = n_tiles * kv_heads;
    int next = atomicAdd(counter, 1);
    Load pend;
    bool has_pend = false; // the V of the last K issued is still to be loaded
    while (true) {
      const int id = next;
      if (id < total) next = atomicAdd(counter, 1);
      mbar_wait(qempty + 8 * qs, qph ^ 1);
      if (id >= total) {
        work[qs] = make_int2(-1, 0);
        mbar_arrive(qfull + 8 * qs);
        break;
      }
      int ti, head;
      locate(id, n_tiles, kv_heads, heads_first, ti, head);
      work[qs] = make_int2(ti, head);
      const Work w = load_work(tiles + 8 * ti);
      mbar_expect(qfull + 8 * qs, QBYTES);
      for (int g = 0; g < NWG; g++)
        for (int c = 0; c < 2; c++)
          tma3(smem + qs * QBYTES + g * 16384 + c * 8192, &q_map, qfull + 8 * qs, c * 64,
               head * GROUP_HEADS, w.q_row + g * TOKENS);
      if (++qs == QBUF) { qs = 0; qph ^= 1; }
      int n_item, n_page;
      counts(w, n_item, n_page);
      const int* table = block_tables + (long long)w.req * table_stride;
      const int last_page = (min(w.P, w.i0 + w.tokens) - 1) / PAGE;
      for (int t = 0; t < n_item + n_page; t++) {
        // K of step t, then V of the step before it, which can belong to the previous tile
        Load ld;
        ld.head = head;
        ld.is_page = t >= n_item;
        if (ld.is_page) {
          const int k0 = w.first + (t - n_item) * BN;
#pragma unroll
          for (int x = 0; x < BN / PBOX; x++) {
            const int key = k0 + x * PBOX;
            ld.row[x] = table[min(key / PAGE, last_page)] * PAGE + (key & (PAGE - 1));
          }
        } else {
          ld.row[0] = w.q_row + w.low - w.i0 + t * WN;
        }
        issue(ld, &k_map, &k_new_map, ring, st);
        if (has_pend) issue(pend, &v_map, &v_new_map, ring, st);
        pend = ld;
        has_pend = true;
      }
      if (n_page == 0) {
        issue(pend, &v_map, &v_new_map, ring, st);
        has_pend = false;
      }
    }
    if (has_pend) issue(pend, &v_map, &v_new_map, ring, st);
    if (atomicAdd(counter + 1, 1) == (int)gridDim.x - 1) { counter[0] = 0; counter[1] = 0; }
  } else {
    raise_registers<232>();
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, q4 = lane & 3;
    const Consts k{ring, grp - 1, sl2, thr, out, sums};
    State st{0, 0};
    int number = 0; // of the CTA's tiles so far
    if (k.wg == NWG - 1) bar_arrive(1, 256);
    float o[64], m[2], l[2];
    u32 p[BN / 4];
#if FAST_LOOP
    u32 p2[BN / 4];
#endif
    Result *dst0 = 0, *dst1 = 0;
    bool has_pend = false; // a finished softmax waits for its product with V
    clear(o, m, l);
    while (true) {
      const int qs = number % QBUF;
      mbar_wait(qfull + 8 * qs, number / QBUF & 1);
      const int ti = uni(work[qs].x), head = uni(work[qs].y);
      if (ti < 0) break;
      Work w = load_work(tiles + 8 * ti);
      w.P = uni(w.P);
      w.i0 = uni(w.i0);
      int n_item, n_page;
      counts(w, n_item, n_page);
      n_item = uni(n_item);
      n_page = uni(n_page);
      // the thread's rows: tokens t0 and t1 of the tile
      const int r0 = k.wg * 64 + warp * 16 + (lane >> 2), r1 = r0 + 8;
      const int t0 = r0 / GROUP_HEADS, t1 = r1 / GROUP_HEADS;
      int i0 = w.i0 + t0, i1 = w.i0 + t1;
      const u32 qd = uniform(mdesc(smem + qs * QBYTES + k.wg * 16384, 16));
      const long long heads = (long long)kv_heads * GROUP_HEADS;
      Result* const base = out + (w.out_row * heads + head * GROUP_HEADS) * D;
      Result* const nd0 = t0 < w.tokens ? base + (t0 * heads + r0 % GROUP_HEADS) * D : 0;
      Result* const nd1 = t1 < w.tokens ? base + (t1 * heads + r1 % GROUP_HEADS) * D : 0;
      if (n_item > 0) {
        const int lo0 = item_start[w.q_row + min(t0, w.tokens - 1)];
        const int lo1 = item_start[w.q_row + min(t1, w.tokens - 1)];
        int off = w.low + 2 * q4;
        Bounds b{lo0 - off, i0 + 1 - off, lo1 - off, i1 + 1 - off};
        if (has_pend) step<WN, BN, true, false>(o, p, p, m, l, st, k, qd, true, b, last_seen[k.wg], dst0, dst1);
        else step<WN, 0, false, false>(o, p, p, m, l, st, k, qd, true, b, 0, 0, 0);
        last_seen[k.wg] = w.i0 + w.tokens - w.low - (n_item - 1) * WN;  // all threads the same
        for (int t = 1; t < n_item; t++) {
          off += WN;
          b = Bounds{lo0 - off, i0 + 1 - off, lo1 - off, i1 + 1 - off};
          step<WN, WN, false, false>(o, p, p, m, l, st, k, qd, true, b, WN, 0, 0);
        }
      }
      // from here on places count from the first page key: no register more in the loop
      w.P -= w.first; i0 -= w.first; i1 -= w.first;
      const int e1 = min(w.P, w.i0 - w.first + 1); // keys below e1 are visible to every row of the tile
#define PAGE_STEP(NP_, EDGE_, FAST_, in_, out_, j_, seen_)                                   \
  do {                                                                                       \
    const int k0 = (j_) * BN, off = k0 + 2 * q4;                                             \
    const Bounds b{-1000, min(w.P, i0 + 1) - off, -1000, min(w.P, i1 + 1) - off};            \
    step<BN, NP_, EDGE_, FAST_>(o, in_, out_, m, l, st, k, qd, k0 + BN > e1, b, seen_, dst0, \
                                dst1);                                                       \
  } while (0)
      if (n_page > 0) {
        if (n_item > 0) PAGE_STEP(WN, false, false, p, p, 0, last_seen[k.wg]);
        else if (has_pend) PAGE_STEP(BN, true, false, p, p, 0, last_seen[k.wg]);
        else PAGE_STEP(0, false, false, p, p, 0, 0);
      }
      if (n_page > 0) last_seen[k.wg] = min(w.P, w.i0 - w.first + w.tokens) - (n_page - 1) * BN;
#if FAST_LOOP
      int j = 1;
      for (; j + 1 < n_page; j += 2) { // two at a time: P alternates between two register sets
        PAGE_STEP(BN, false, true, p, p2, j, BN);
        PAGE_STEP(BN, false, true, p2, p, j + 1, BN);
      }
      if (j < n_page) PAGE_STEP(BN, false, false, p, p, j, BN);
#else
      for (int j = 1; j < n_page; j++) PAGE_STEP(BN, false, false, p, p, j, BN);
#endif
      dst0 = nd0;
      dst1 = nd1;
      if (lane == 0) mbar_arrive(qempty + 8 * (number % QBUF));
      number++;
      has_pend = n_page > 0;
      if (!has_pend) {
        last<WN>(o, p, k, st, last_seen[k.wg]);
        epilogue(o, m, l, k, dst0, dst1);
        clear(o, m, l);
      }
    }
    if (has_pend) {
      last<BN>(o, p, k, st, last_seen[k.wg]);
      epilogue(o, m, l, k, dst0, dst1);
    }
  }
}
