// All layers of a dense decoder for one new token, in one launch; hopper.cuh, decode_ptx.cuh and
// decode_units.cuh before it. Why each part is as it is: docs/notes/decode_step.md. Host side: ops/decode_step.py.
//
// Split: 128 CTAs x 16 consumer warps. A CTA owns 32 rows of q, 8 of k, 8 of v, 32 of o and down,
// 32 SLICES pairs of (gate, up); a warp takes two rows (a pair) at a time. So no CTA has more rows
// than another, and what one CTA gives to the next matrix is whole activation groups of 32.
// Attention: the 16 CTAs that own the rows of a key/value head and of its 4 query heads attend for
// that head, each over every 16th tile of 32 keys, and merge: CTA c ends with outputs 32 c and on.
//
// Stream: a group is 4 warps with a ring of their own, filled by a producer thread in the order of
// use: weights of a slot (a unit for each of the 4 warps) lie end to end in memory for the whole
// step, so the producer only counts on; tiles of K and V come through the same ring by TMA. It
// never waits for activations, only for a free slot and for its copies in flight to fall below a
// limit.
//
// Exchange: vectors of 16 bytes that validate themselves. The two lowest bits of the last word are
// the layer number mod 4; readers poll the data itself. Before a launch all are filled with 0xff. A
// buffer is written again one layer later, after every CTA has passed exchanges that need all CTAs.
// Waiting is bounded: after MOST_TICKS a CTA waits no more in this step, and its results become
// NaN. So a step ends even if CTAs do not run side by side.
//
// Macros: LAYERS, SLICES (of 4096 columns in a row of down), HAS_QK_NORM.
#define CTAS 128
#define WARPS 16
#define GROUP 4   // warps
#define GROUPS 4
#define CONSUMERS (32 * WARPS)
#define THREADS (CONSUMERS + 32 * GROUPS)  // one producer warp a group
#define HIDDEN 4096
#define HEAD 128
#define KV_HEADS 8
#define HEADS 4          // query heads of a key/value head
#define SPLITS 16        // CTAs of a key/value head
#define UNIT 2304
#define SLOT (GROUP * UNIT)
#define PAIR_C 2112
#define SLOT_C (GROUP * PAIR_C)
#define TILE 32          // keys of a slot of K or V, 8 for each warp of a group
#define PAGE 64          // tokens of a cache block
#define MOST_TILES 64    // of a group
#define RING 5           // slots of a group; 4 cost 3%, 3 cost 10%
#define IN_FLIGHT_NOW 2  // copies in flight of a group while fetching what is being computed
#define IN_FLIGHT_AHEAD 1  // ... while running ahead: longer queues delay the exchange
#define MOST_TICKS 2     // of the clock's upper half, 2.2 s each; no step takes as long
#define START_MAX (-1e30f)  // finite, so that a warp without keys ends with sum 0, not NaN

enum Kind { QKV, OUT, GATEUP, DOWN };

struct Args {
  const u8* stream;         // (CTAS, stream_bytes): groups end to end, at group_at
  u64 stream_bytes;
  u64 group_at[GROUPS];
  const float* norms;       // (2 LAYERS, HIDDEN): attention, mlp
  const float* head_norms;  // (LAYERS, 2, HEAD): q, k
  const float* rope;        // (positions, 2, HEAD / 2): cos, sin
  const float* x_in;        // (HIDDEN)
  float* x_out;             // (HIDDEN)
  uint4* exchange;          // EXCHANGE_VECTORS, all 0xff
  const int* position;
  const int* seq_len;       // with the new token
  const int* row;
  const int* block_tables;  // (rows, max_blocks)
  const long long* slot;    // of the new token; negative: keep nothing
  int max_blocks;
  float eps, score_scale;   // scale * log2(e)
  u8 six[LAYERS];           // bits q, k, v, o, gate and up, down: Q6_K
};
struct Caches {
  TMap maps[LAYERS][2];     // K, V: (tokens, KV_HEADS, HEAD) in boxes of (TILE, 1, 64)
  u16* planes[LAYERS][2];
};

// Records of 32 activations by receiving matrix (128, 128, 128, 128 SLICES of 3 vectors), then
// rows of q, k, v (12 vectors a CTA), then partial attention outputs (for a CTA 16 x 9 vectors).
#define RECORD_AT(kind) (3 * CTAS * (kind))
#define HEADS_AT (3 * CTAS * (3 + SLICES))
#define PARTIALS_AT (HEADS_AT + 12 * CTAS)
#define PARTIAL 9

// Shared memory, bytes; inputs of neighbouring matrices never share a buffer. The outputs of the
// warps' attention lie where inputs of qkv and down do, which nobody reads then.
struct Layout {
  static constexpr int SMALL = 8 * ACT_PITCH + 3 * 512, LARGE = SLICES * (8 * ACT_PITCH + 1024);
  static constexpr int OUTPUTS_PITCH = 136 * 4, OUTPUTS = WARPS * HEADS * OUTPUTS_PITCH;
  static constexpr int SHARED = SMALL + LARGE > OUTPUTS ? SMALL + LARGE : OUTPUTS;
  static constexpr int IN_OUT = GROUPS * RING * SLOT, IN_QKV = IN_OUT + SMALL;
  static constexpr int IN_DOWN = IN_QKV + SMALL, WARP_OUTPUTS = IN_QKV;
  static constexpr int QUERY_PITCH = 272, QUERY = IN_QKV + SHARED;
  static constexpr int NEW_K = QUERY + HEADS * QUERY_PITCH, NEW_V = NEW_K + 256, ROPE = NEW_V + 256;
  static constexpr int PARTIALS = ROPE + 512, WARP_SUMS = PARTIALS + SPLITS * PARTIAL * 16;
  static constexpr int BLOCKS = WARP_SUMS + WARPS * HEADS * 8;
  static constexpr int SCRATCH = BLOCKS + GROUPS * MOST_TILES * 4, RESULTS = SCRATCH + 128;
  static constexpr int BARS = RESULTS + (SLICES > 1 ? 128 * SLICES : 192);  // 48 of q, k, v
  static constexpr int COMPUTING = BARS + 16 * GROUPS * RING;
  static constexpr int LOST = COMPUTING + 4, START = LOST + 4, NUM_KEYS = START + 4;
  static constexpr int TOTAL = NUM_KEYS + 4;
};
static_assert(Layout::TOTAL <= 232448 && Layout::BARS % 8 == 0, "shared memory of an SM");

// ---- exchange
// Whether a step takes so long that it will not end by waiting: then this CTA waits no more. Called
// after polls in vain. The upper half of the clock counts 2.2 s at 1.98 GHz.
DEV bool is_lost(u32 smem) {
  if (clock_high() - load_shared_word(smem + Layout::START) < MOST_TICKS) return false;
  store_shared(smem + Layout::LOST, 1);
  return true;
}
DEV uint4 poll(const uint4* at, u32 tag, u32 smem) {
  uint4 v = load_relaxed(at);
  while ((v.w & 3) != tag && !is_lost(smem)) v = load_relaxed(at);
  v.w &= ~3u;
  return v;
}
// One warp turns 32 values into a record. v0 = codes 0-11 | sum of squares; v1 = codes 12-23 | sums
// of 16; v2 = codes 24-31, scale | nothing; each | tag.
DEV void publish(uint4* record, u32 scratch, float value, float norm, bool normed, u32 tag,
                 int lane) {
  const float x = normed ? value * norm : value;
  const float amax = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(x))));
  const int code = __float2int_rn(x * (amax > 0 ? __fdividef(127.f, amax) : 0.f));
  store_shared_byte(scratch + lane, code);
  const int both = __reduce_add_sync(~0u, lane < 16 ? code : code << 16);
  const int lo = (short)both, hi = (both - lo) >> 16;
  float squares = value * value;
  if (normed)
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  __syncwarp();
  if (lane < 3) {
    uint4 v;
    v.x = load_shared_word(scratch + 12 * lane), v.y = load_shared_word(scratch + 12 * lane + 4);
    v.z = lane < 2 ? load_shared_word(scratch + 12 * lane + 8)
                   : __float_as_uint(amax * (1.f / 127.f));
    v.w = tag | (lane == 0   ? __float_as_uint(squares) & ~3u
                 : lane == 1 ? ((u32)(lo & 0x1fff) | (u32)(hi & 0x1fff) << 13) << 2
                             : 0);
    store_relaxed(record + lane, v);
  }
}
// Waits for all records of a matrix's input and spreads them over shared memory:
// codes[chunk][lane], scale, sums, squares by group.
DEV void receive(const uint4* records, int kind, u32 tag, u32 act, u32 scales, u32 sums,
                 u32 squares, u32 smem) {
  constexpr int MOST = (3 * CTAS * SLICES + CONSUMERS - 1) / CONSUMERS;
  const int tid = unknown(threadIdx.x), total = kind == DOWN ? 3 * CTAS * SLICES : 3 * CTAS;
  uint4 in[MOST] = {};  // else ptxas keeps them across phases
#pragma unroll
  for (int i = 0; i < MOST; ++i)
    if (tid + i * CONSUMERS < total) in[i] = load_relaxed(records + tid + i * CONSUMERS);
  while (true) {  // ask again for all that is missing at once: one round trip, not three
    bool again = false;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (tid + i * CONSUMERS < total && (in[i].w & 3) != tag) again = true;
    if (!again || is_lost(smem)) break;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (tid + i * CONSUMERS < total && (in[i].w & 3) != tag)
        in[i] = load_relaxed(records + tid + i * CONSUMERS);
  }
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int at = tid + i * CONSUMERS, group = at / 3, part = at - 3 * group;
    if (at >= total) continue;
    const u32 row =
        act + ((group >> 7) * 8 + (group & 3) * 2) * ACT_PITCH + ((group >> 2) & 31) * 16;
    const uint4 v = in[i];
    if (part == 0) {
      store_shared(row, v.x), store_shared(row + 4, v.y), store_shared(row + 8, v.z);
      if (kind != DOWN) store_shared(squares + 4 * group, v.w & ~3u);
    } else if (part == 1) {
      store_shared(row + 12, v.x), store_shared(row + ACT_PITCH, v.y);
      store_shared(row + ACT_PITCH + 4, v.z), store_shared(sums + 4 * group, v.w >> 2);
    } else {
      store_shared(row + ACT_PITCH + 8, v.x), store_shared(row + ACT_PITCH + 12, v.y);
      store_shared(scales + 4 * group, v.z);
    }
  }
}

// ---- the stream
DEV int pairs_of(int kind, int group) {  // of a warp; those of QKV: q, then k (group 0) or v (1)
  return kind == QKV ? (group < 2 ? 2 : 1) : kind == OUT ? 1 : kind == GATEUP ? 2 * SLICES : SLICES;
}
DEV bool is_q6(int six, int kind, int group, int it) {
  return (six >> (kind == QKV ? (it ? 1 + group : 0) : kind + 2)) & 1;
}
// Attention is a phase of its own behind QKV.
DEV int phase_of(int layer, int kind) { return 5 * layer + kind + (kind > QKV); }
// Tiles of `split`: t = split + SPLITS * (group + GROUPS * it).
DEV int tiles_of(int num_keys, int split, int group) {
  const int tiles = (num_keys + TILE - 1) / TILE, first = split + SPLITS * group;
  return tiles > first ? (tiles - first - 1) / (SPLITS * GROUPS) + 1 : 0;
}
struct Ring { u32 data, full, empty; };  // of one group
struct Ends { int split, head, num_keys; };  // of this CTA's attention
DEV Ends make_ends(u32 smem) {
  const int num_keys = (int)load_shared_word(smem + Layout::NUM_KEYS);
  return {(int)blockIdx.x % SPLITS, (int)blockIdx.x / SPLITS, num_keys};
}

// One thread feeds a group's ring. Copies in flight matter more than the depth of the ring: beyond
// latency x bandwidth (about 28 KB an SM) they lengthen the queues in which the exchange waits too.
DEV void produce(const Args& g, const Caches& caches, const Ring& ring, int group, const Ends& ends,
                 const int* blocks, const volatile int* computing) {
  int slot = 0, oldest = 0, in_flight = 0;
  u32 empty_parity = 1, full_parity = 0;
  auto open = [&](u32 bytes, int phase) {
    slot_wait(ring.empty + 8 * slot, empty_parity);
    while (in_flight >= (phase <= *computing ? IN_FLIGHT_NOW : IN_FLIGHT_AHEAD)) {
      slot_wait(ring.full + 8 * oldest, full_parity);
      if (++oldest == RING) oldest = 0, full_parity ^= 1;
      --in_flight;
    }
    mbar_expect(ring.full + 8 * slot, bytes);
    ++in_flight;
  };
  auto advance = [&]() {
    if (++slot == RING) slot = 0, empty_parity ^= 1;
  };
  const u8* src = g.stream + blockIdx.x * g.stream_bytes + g.group_at[group];
  auto put = [&](u32 bytes, int phase) {
    open(bytes, phase);
    bulk_load(ring.data + slot * SLOT, src, bytes, ring.full + 8 * slot);
    src += bytes;
    advance();
  };
  const int tiles = tiles_of(ends.num_keys, ends.split, group);
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const int six = g.six[layer];
#pragma unroll 1
    for (int kind = QKV; kind <= DOWN; ++kind) {
      const int phase = phase_of(layer, kind);
      for (int it = 0; it < pairs_of(kind, group); ++it) {
        put(SLOT, phase), put(SLOT, phase);
        if (is_q6(six, kind, group, it)) put(SLOT_C, phase);
      }
      if (kind != QKV) continue;
      for (int it = 0; it < tiles; ++it) {
        const int token = blocks[it] * PAGE + (ends.split & 1) * TILE;
#pragma unroll 1
        for (int plane = 0; plane < 2; ++plane) {
          open(TILE * 2 * HEAD, phase + 1);
          const u32 bar = ring.full + 8 * slot, to = ring.data + slot * SLOT;
          tma3(to, &caches.maps[layer][plane], bar, 0, ends.head, token);
          tma3(to + TILE * HEAD, &caches.maps[layer][plane], bar, 64, ends.head, token);
          advance();
        }
      }
    }
  }
}
// What a consumer warp takes from its group's ring.
struct Taker {
  Ring ring;
  int next;
  u32 parity;
  DEV int take() {
    const int slot = next;
    slot_wait(ring.full + 8 * slot, parity);
    if (++next == RING) next = 0, parity ^= 1;
    return slot;
  }
  DEV void give_back(int slot, int lane) {
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.empty + 8 * slot);
  }
};

// ---- matrices
struct Input { u32 act, scales, sums; };  // in shared memory
// This warp's rows of a matrix, two at a time, into results.
DEV void multiply(Taker& taker, int kind, int six, int warp, int lane, float rms,
                  const Input& in, float* results) {
  const int group = warp / GROUP, pairs = pairs_of(kind, group), step = kind == DOWN ? 1 : pairs;
  const u32 data = taker.ring.data, mine = (warp % GROUP) * UNIT;
  float acc0 = 0, acc1 = 0;
#pragma unroll 1
  for (int it = 0, slice = 0; it < pairs; ++slice) {
    const Act a = load_act(in.act, in.scales, in.sums, slice, lane, rms);
#pragma unroll 1
    for (const int end = it + step; it < end; ++it) {
      if (!is_q6(six, kind, group, it)) {
        Q4 w;
        const int s0 = taker.take();
        load_q4(w, data + s0 * SLOT + mine, lane);
        taker.give_back(s0, lane);
        acc0 += dot_q4(w, a, lane);
        const int s1 = taker.take();
        load_q4(w, data + s1 * SLOT + mine, lane);
        taker.give_back(s1, lane);
        acc1 += dot_q4(w, a, lane);
      } else {
        Q6 w;
        const int s0 = taker.take(), s1 = taker.take(), s2 = taker.take();
        const u32 c = data + s2 * SLOT + (warp % GROUP) * PAIR_C;
        load_q6(w, data + s0 * SLOT + mine, c, c + 2048, lane);
        acc0 += dot_q6(w, a);
        load_q6(w, data + s1 * SLOT + mine, c + 1024, c + 2080, lane);
        taker.give_back(s0, lane), taker.give_back(s1, lane), taker.give_back(s2, lane);
        acc1 += dot_q6(w, a);
      }
      if (kind == DOWN && it < SLICES - 1) continue;
      // Both rows in five shuffles: lanes 0-15 end with row 0, lanes 16-31 with row 1.
      float y = (lane < 16 ? acc0 : acc1) + __shfl_xor_sync(~0u, lane < 16 ? acc1 : acc0, 16);
#pragma unroll
      for (int o = 8; o; o >>= 1) y += __shfl_xor_sync(~0u, y, o);
      acc0 = acc1 = 0;
      if (kind == GATEUP) {
        const float up = __shfl_xor_sync(~0u, y, 16);
        if (lane == 0) results[16 * it + warp] = y / (1.f + __expf(-y)) * up;
      } else if ((lane & 15) == 0) {  // of QKV: 32 rows of q, 8 of k, 8 of v
        const int row = it == 1 && kind == QKV ? 32 + 2 * warp : 2 * warp;
        results[row + (lane >> 4)] = y;
      }
    }
  }
}

// ---- attention
// Rows of q, k, v of this CTA's head arrive as floats: warps 0 to 3 take a query head each, warp 4
// the new key, warp 5 the new value; lane l has elements 4 l .. 4 l + 3. They norm and rotate,
// leave fp16 in shared memory, and one CTA writes the new key and value to the cache.
DEV void receive_heads(const Args& g, const Caches& caches, u32 smem, int layer, int warp, int lane,
                       const Ends& ends) {
  const int part = warp < HEADS ? lane & 7 : 2 * warp + (lane & 1);
  const int source = warp < HEADS ? 4 * warp + (lane >> 3) : lane >> 1;
  float4 weight = make_float4(1, 1, 1, 1);
#if HAS_QK_NORM
  if (warp <= HEADS) {
    const float* weights = g.head_norms + (2 * layer + (warp == HEADS)) * HEAD;
    weight = *reinterpret_cast<const float4*>(weights + 4 * lane);
  }
#endif
  const uint4* rows = g.exchange + HEADS_AT + 12 * (SPLITS * ends.head + source) + part;
  const uint4 raw = poll(rows, layer & 3, smem);
  float v[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                __uint_as_float(raw.w)};
  if (warp <= HEADS) {
#if HAS_QK_NORM
    float t = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
    for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
    const float r = rsqrtf(t * (1.f / HEAD) + g.eps);
    v[0] *= r * weight.x, v[1] *= r * weight.y, v[2] *= r * weight.z, v[3] *= r * weight.w;
#endif
    const uint4 c = load_shared(smem + Layout::ROPE + 16 * (lane & 15));
    const uint4 s = load_shared(smem + Layout::ROPE + 256 + 16 * (lane & 15));
    const u32 cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // pairs (i, i + 64)
      const float other = __shfl_xor_sync(~0u, v[i], 16);
      const float turned = other * __uint_as_float(sine[i]);
      v[i] = v[i] * __uint_as_float(cosine[i]) + (lane < 16 ? -turned : turned);
    }
  }
  const u32 lo = pack(v[0], v[1]), hi = pack(v[2], v[3]);
  const u32 to = smem + 8 * lane + (warp < HEADS    ? Layout::QUERY + warp * Layout::QUERY_PITCH
                                    : warp == HEADS ? Layout::NEW_K
                                                    : Layout::NEW_V);
  store_shared(to, lo), store_shared(to + 4, hi);
  const long long slot = *g.slot;
  if (warp >= HEADS && ends.split == 0 && slot >= 0) {
    u16* plane = caches.planes[layer][warp - HEADS];
    // 64-bit: slots * 1024 elements pass 2^31.
    *reinterpret_cast<uint2*>(plane + (slot * KV_HEADS + ends.head) * HEAD + 4 * lane) =
        make_uint2(lo, hi);
  }
}

// This warp's share of the tiles, 8 keys of each: scores as q K^T (query heads in rows 0 to 3,
// again in rows 4 to 7), outputs as V^T P^T, whose columns are heads; so P needs no transposition.
// Leaves outputs (head, dimension) and (maximum, sum) of each head in shared memory.
DEV void attend(const Args& g, u32 smem, Taker& taker, int group, int warp, int lane,
                const Ends& ends) {
  const int row = lane >> 2, column = 2 * (lane & 3), chunk = lane >> 3;
  u32 q[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    load_matrices<false>(q[j], smem + Layout::QUERY + (lane & 3) * Layout::QUERY_PITCH +
                                   (4 * j + chunk) * 16);
  float o[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  float most = START_MAX, sum = 0;
  const int tiles = tiles_of(ends.num_keys, ends.split, group);
  // The new token is a tile of one key, of one warp.
#pragma unroll 1
  for (int it = warp == 0 && ends.split == 0 ? -1 : 0; it < tiles; ++it) {
    const bool is_new = it < 0;
    // A slot is two halves of 64 dimensions, [key][128 bytes], 16-byte chunks swizzled by TMA.
    const u32 half = is_new ? HEAD : TILE * HEAD, swizzle = is_new ? 0 : lane & 7;
    const u32 offset = is_new ? 0 : (8 * (warp % GROUP) + (lane & 7)) * HEAD;
    const int first = ((ends.split + SPLITS * (group + GROUPS * it)) * TILE) + 8 * (warp % GROUP);
    const int valid = is_new ? 1 : ends.num_keys - first;
    auto matrix = [&](u32 base, int j) {
      return base + offset + (j >> 1) * half + (((4 * (j & 1) + chunk) ^ swizzle) << 4);
    };
    const int k_slot = is_new ? 0 : taker.take();
    const u32 k_at = is_new ? smem + Layout::NEW_K : taker.ring.data + k_slot * SLOT;
    float s[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = s[1][i] = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 k[4];
      load_matrices<false>(k, matrix(k_at, j));
      mma_k16(s[0], q[j][0], q[j][1], k[0], k[1]);
      mma_k16(s[1], q[j][2], q[j][3], k[2], k[3]);
    }
    if (!is_new) taker.give_back(k_slot, lane);
    const float s0 = column < valid ? (s[0][0] + s[1][0]) * g.score_scale : START_MAX;
    const float s1 = column + 1 < valid ? (s[0][1] + s[1][1]) * g.score_scale : START_MAX;
    float high = fmaxf(s0, s1);
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    // The maximum follows only when it grew by more than 8 in the exponent.
    float factor = 1;
    if (high > most + 8.f) factor = ex2(most - high), most = high;
    if (__any_sync(~0u, factor != 1.f)) {
      sum *= factor;
      const float f0 = __shfl_sync(~0u, factor, 8 * (lane & 3));
      const float f1 = __shfl_sync(~0u, factor, 8 * (lane & 3) + 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i][0] *= f0, o[i][1] *= f1, o[i][2] *= f0, o[i][3] *= f1;
    }
    const float p0 = column < valid ? ex2(s0 - most) : 0;
    const float p1 = column + 1 < valid ? ex2(s1 - most) : 0;
    sum += p0 + p1;
    const u32 p = pack(p0, p1);
    // Behind the last key lies anything: 0 * NaN would be NaN.
    const u32 keep = (column < valid ? 0xffffu : 0u) | (column + 1 < valid ? 0xffff0000u : 0u);
    const int v_slot = is_new ? 0 : taker.take();
    const u32 v_at = is_new ? smem + Layout::NEW_V : taker.ring.data + v_slot * SLOT;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 v[4];
      load_matrices<true>(v, matrix(v_at, j));
      mma_k8(o[2 * j], v[0] & keep, v[1] & keep, p);
      mma_k8(o[2 * j + 1], v[2] & keep, v[3] & keep, p);
    }
    if (!is_new) taker.give_back(v_slot, lane);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (lane < 16 && (lane & 3) == 0) {
    const u32 at = smem + Layout::WARP_SUMS + (warp * HEADS + row) * 8;
    store_shared(at, __float_as_uint(most)), store_shared(at + 4, __float_as_uint(sum));
  }
  // Columns 4 to 7 repeat 0 to 3: their lanes store the upper 8 dimensions of each 16.
  const bool upper = lane & 2;
  const u32 at = smem + Layout::WARP_OUTPUTS +
                 (warp * HEADS + (column & 2)) * Layout::OUTPUTS_PITCH +
                 4 * (row + (upper ? 8 : 0));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    store_shared(at + 64 * i, __float_as_uint(upper ? o[i][2] : o[i][0]));
    store_shared(at + 64 * i + Layout::OUTPUTS_PITCH, __float_as_uint(upper ? o[i][3] : o[i][1]));
  }
}

// Weights of 16 parts under their common maximum; lanes l and l + 16 hold part l.
struct Shares { float most, factor, sum; };
DEV Shares make_shares(float most, float sum) {
  float high = most;
  for (int o = 8; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
  const float factor = ex2(most - high);
  float total = factor * sum;
  for (int o = 8; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  return {high, factor, total};
}
// Thread t adds element t of the outputs (4 heads x 128) over the warps; warp w sends its 32, with
// maximum and sum, to the CTA of outputs 32 w of this head.
DEV void send_partials(const Args& g, u32 smem, int layer, int warp, int lane, const Ends& ends,
                       int active) {
  const int head = warp / GROUP, part = lane & 15;
  const u32 at = smem + Layout::WARP_SUMS + ((part < active ? part : 0) * HEADS + head) * 8;
  const float most = __uint_as_float(load_shared_word(at));
  const float own = __uint_as_float(load_shared_word(at + 4));
  const Shares shares = make_shares(most, part < active ? own : 0.f);
  const u32 mine = smem + Layout::WARP_OUTPUTS + head * Layout::OUTPUTS_PITCH +
                   4 * ((warp % GROUP) * 32 + lane);
  float y = 0;
  for (int w = 0; w < active; ++w) {
    const u32 from = mine + w * HEADS * Layout::OUTPUTS_PITCH;
    y += __shfl_sync(~0u, shares.factor, w) * __uint_as_float(load_shared_word(from));
  }
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __shfl_sync(~0u, y, (4 * lane + i) & 31);
  if (lane == PARTIAL - 1) v[0] = shares.most, v[1] = shares.sum, v[3] = 0;
  if (lane < PARTIAL) {
    uint4 out = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                           (__float_as_uint(v[3]) & ~3u) | (layer & 3));
    const int to = (SPLITS * ends.head + warp) * SPLITS + ends.split;
    store_relaxed(g.exchange + PARTIALS_AT + PARTIAL * to + lane, out);
  }
}
// Warps 0 to 4 collect the 16 partial outputs of this CTA's 32 elements; warp 0 merges them.
DEV float merge_partials(const Args& g, u32 smem, int layer, int warp, int lane) {
  const int tid = 32 * warp + lane;
  if (tid < SPLITS * PARTIAL) {
    const uint4* from = g.exchange + PARTIALS_AT + blockIdx.x * SPLITS * PARTIAL + tid;
    const uint4 v = poll(from, layer & 3, smem);
    const u32 at = smem + Layout::PARTIALS + 16 * tid;
    store_shared(at, v.x), store_shared(at + 4, v.y);
    store_shared(at + 8, v.z), store_shared(at + 12, v.w);
  }
  if (warp) {
    bar_arrive(4, 160);
    return 0;
  }
  bar_sync(4, 160);
  const u32 own = smem + Layout::PARTIALS + 16 * (PARTIAL * (lane & 15) + PARTIAL - 1);
  const Shares shares = make_shares(__uint_as_float(load_shared_word(own)),
                                    __uint_as_float(load_shared_word(own + 4)));
  float y = 0;
#pragma unroll
  for (int i = 0; i < SPLITS; ++i) {
    const u32 from = smem + Layout::PARTIALS + 16 * PARTIAL * i + 4 * lane;
    y += __shfl_sync(~0u, shares.factor, i) * __uint_as_float(load_shared_word(from));
  }
  return y / shares.sum;
}

DEV void attention(const Args& g, const Caches& caches, u32 smem, int layer, int warp, int lane,
                   Taker& taker) {
  const Ends ends = make_ends(smem);
  if (warp <= HEADS + 1) receive_heads(g, caches, smem, layer, warp, lane, ends);
  bar_sync(2, CONSUMERS);
  if (warp == 0 && lane == 0) store_shared(smem + Layout::COMPUTING, phase_of(layer, QKV) + 1);
  attend(g, smem, taker, warp / GROUP, warp, lane, ends);
  bar_sync(3, CONSUMERS);
  int busy = 1;  // groups; those without a tile have added nothing
  while (busy < GROUPS && tiles_of(ends.num_keys, ends.split, busy)) ++busy;
  send_partials(g, smem, layer, warp, lane, ends, GROUP * busy);
  if (warp > 4) return;
  const float y = merge_partials(g, smem, layer, warp, lane);
  if (warp == 0)
    publish(g.exchange + RECORD_AT(OUT) + 3 * blockIdx.x, smem + Layout::SCRATCH, y, 0, false,
            layer & 3, lane);
}

// ---- the kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_step(const __grid_constant__ Args g, const __grid_constant__ Caches caches) {
  SHARED_MEMORY(memory);
  const int tid = threadIdx.x, lane = tid & 31, cta = blockIdx.x;
  const int warp = __shfl_sync(~0u, tid >> 5, 0);
  const int group = warp < WARPS ? warp / GROUP : warp - WARPS;
  const u32 smem = smem_u32(memory), bars = smem + Layout::BARS + 16 * group * RING;
  const Ring ring = {smem + group * RING * SLOT, bars, bars + 8 * RING};
  volatile int* computing = reinterpret_cast<volatile int*>(memory + Layout::COMPUTING);
  volatile int* lost = reinterpret_cast<volatile int*>(memory + Layout::LOST);
  float* results = reinterpret_cast<float*>(memory + Layout::RESULTS);
  if (tid == 0) {
    const u32 now = clock_high();
    *computing = 0, *lost = 0;
    store_shared(smem + Layout::START, now);
    store_shared(smem + Layout::NUM_KEYS, *g.seq_len - 1);
  }
  if (tid < HEAD) {
    const float turn = g.rope[(long long)*g.position * HEAD + tid];
    store_shared(smem + Layout::ROPE + 4 * tid, __float_as_uint(turn));
  }
  __syncthreads();
  if (warp >= WARPS) {
    const Ends ends = make_ends(smem);
    int* blocks = reinterpret_cast<int*>(memory + Layout::BLOCKS) + group * MOST_TILES;
    const int* table = g.block_tables + (long long)*g.row * g.max_blocks;
    for (int it = lane; it < tiles_of(ends.num_keys, ends.split, group); it += 32)
      blocks[it] = table[(ends.split + SPLITS * (group + GROUPS * it)) * TILE / PAGE];
    if (lane < RING) {
      mbar_init(ring.full + 8 * lane, 1), mbar_init(ring.empty + 8 * lane, GROUP);
      mbar_fence();
    }
  }
  __syncthreads();
  if (warp >= WARPS) {
    const int* blocks = reinterpret_cast<int*>(memory + Layout::BLOCKS) + group * MOST_TILES;
    drop_registers();
    const Ends ends = make_ends(smem);
    if (lane == 0) produce(g, caches, ring, group, ends, blocks, computing);
    return;
  }
  take_registers();
  const u32 scratch = smem + Layout::SCRATCH + (warp & 3) * 32;
  Taker taker = {ring, 0, 0};
  // Warp 0, lane l: element 32 cta + l of the residual stream, in a register for the whole step.
  float residual = 0;
  if (warp == 0) {
    residual = g.x_in[32 * cta + lane];
    publish(g.exchange + RECORD_AT(QKV) + 3 * cta, scratch, residual, g.norms[32 * cta + lane],
            true, 0, lane);
  }
#pragma unroll 1
  for (int phase = 0; phase < 4 * LAYERS; ++phase) {
    const int layer = phase >> 2, kind = phase & 3, six = g.six[layer];
    const bool adds = kind == OUT || kind == DOWN;
    const bool is_end = kind == DOWN && layer == LAYERS - 1;
    const u32 tag = layer & 3;
    float norm = 0;  // weight of the norm that follows, fetched long before it is needed
    if (warp == 0 && adds && !is_end)
      norm = __ldg(g.norms + (2 * layer + (kind == OUT ? 1 : 2)) * HIDDEN + 32 * cta + lane);
    const u32 act = smem + (kind == DOWN  ? Layout::IN_DOWN
                            : kind == OUT ? Layout::IN_OUT
                                          : Layout::IN_QKV);
    const u32 scales = act + ACT_PITCH * (kind == DOWN ? 8 * SLICES : 8);
    const u32 sums = scales + 512 * (kind == DOWN ? SLICES : 1), squares = sums + 512;
    receive(g.exchange + RECORD_AT(kind), kind, tag, act, scales, sums, squares, smem);
    bar_sync(2, CONSUMERS);
    if (tid == 0) *computing = phase_of(layer, kind);
    float rms = 1;
    if (!adds) {
      const uint4 s = load_shared(squares + 16 * lane);
      float t = __uint_as_float(s.x) + __uint_as_float(s.y) + __uint_as_float(s.z) +
                __uint_as_float(s.w);
      for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
      rms = rsqrtf(t * (1.f / HIDDEN) + g.eps);
    }
    multiply(taker, kind, six, warp, lane, rms, {act, scales, sums}, results);
    const int publishers = kind == GATEUP ? SLICES : 1;  // warps; the others go on to poll
    if (warp >= publishers) {
      bar_arrive(1, CONSUMERS);
    } else {
      bar_sync(1, CONSUMERS);
      if (kind == QKV) {
        if (lane < 12) {
          uint4 v = load_shared(smem + Layout::RESULTS + 16 * lane);
          v.w = (v.w & ~3u) | tag;
          store_relaxed(g.exchange + HEADS_AT + 12 * cta + lane, v);
        }
      } else {
        float v = results[32 * warp + lane];
        if (adds) v = residual = residual + v;
        if (is_end)
          g.x_out[32 * cta + lane] = *lost ? __int_as_float(0x7fffffff) : v;
        else
          publish(g.exchange + RECORD_AT((kind + 1) & 3) + 3 * (publishers * cta + warp), scratch,
                  v, norm, adds, kind == DOWN ? (tag + 1) & 3 : tag, lane);
      }
    }
    if (kind != QKV) continue;
    attention(g, caches, unknown(smem), layer, unknown(warp), unknown(lane), taker);
  }
}
