// All layers of a dense decoder for one new token, in one launch; hopper.cuh, decode_ptx.cuh and
// decode_units.cuh before it. Why each part is as it is: docs/notes/decode_step.md. Host side:
// ops/decode_step.py.
//
// Split: 128 CTAs x 16 consumer warps. A CTA owns 32 rows of q, 8 of k, 8 of v, 32 of o and down,
// 32 pairs of (gate, up) of each 4096; a warp takes two rows (a pair) at a time. So no CTA has more
// rows than another, and what one CTA gives to the next matrix is whole activation groups of 32.
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
#define RECORD_VECTORS (3 * CTAS)  // of 4096 inputs
#define RECORD_AT(kind) (RECORD_VECTORS * (kind))
#define HEADS_AT (RECORD_VECTORS * (3 + SLICES))
#define PARTIALS_AT (HEADS_AT + 12 * CTAS)
#define PARTIAL 9

// Shared memory, bytes; inputs of neighbouring matrices never share a buffer. The outputs of the
// warps' attention lie where inputs of qkv and down do, which nobody reads then.
struct Layout {
  static constexpr int INPUT = 8 * ACT_PITCH + 3 * 512;  // 4096 activations
  static constexpr int OUTPUTS_PITCH = 136 * 4, OUTPUTS = WARPS * HEADS * OUTPUTS_PITCH;
  static constexpr int SHARED = (1 + SLICES) * INPUT > OUTPUTS ? (1 + SLICES) * INPUT : OUTPUTS;
  static constexpr int IN_OUT = GROUPS * RING * SLOT, IN_QKV = IN_OUT + INPUT;
  static constexpr int IN_DOWN = IN_QKV + INPUT, WARP_OUTPUTS = IN_QKV;
  static constexpr int QUERY_PITCH = 272, QUERY = IN_QKV + SHARED;
  static constexpr int NEW_K = QUERY + HEADS * QUERY_PITCH, NEW_V = NEW_K + 256, ROPE = NEW_V + 256;
  static constexpr int HEAD_NORMS = ROPE + 512, WARP_SUMS = HEAD_NORMS + 1024;
  static constexpr int BLOCKS = WARP_SUMS + WARPS * HEADS * 8;
  static constexpr int SCRATCH = BLOCKS + GROUPS * MOST_TILES * 4, RESULTS = SCRATCH + 128;
  static constexpr int BARS = RESULTS + 128 * SLICES, NEW_SLOT = BARS + 16 * GROUPS * RING;
  static constexpr int COMPUTING = NEW_SLOT + 8, LOST = COMPUTING + 4, START = LOST + 4;
  static constexpr int NUM_KEYS = START + 4, TOTAL = NUM_KEYS + 4;
};
static_assert(Layout::TOTAL <= 232448 && Layout::BARS % 8 == 0, "shared memory of an SM");

// ---- exchange
struct Input { u32 act, scales, sums, squares; };  // in shared memory
DEV Input input_of(u32 smem, int kind, int slice) {
  const u32 act = smem + Layout::INPUT * slice +
                  (kind == DOWN  ? Layout::IN_DOWN
                   : kind == OUT ? Layout::IN_OUT
                                 : Layout::IN_QKV);
  const u32 scales = act + 8 * ACT_PITCH, sums = scales + 512;
  return {act, scales, sums, sums + 512};
}
// Whether a step takes so long that it will not end by waiting: then this CTA waits no more. Called
// after polls in vain. The upper half of the clock counts 2.2 s at 1.98 GHz.
DEV bool is_lost(u32 smem) {
  if (clock_high() - load_shared_word(smem + Layout::START) < MOST_TICKS) return false;
  store_shared(smem + Layout::LOST, 1);
  return true;
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
// Waits for the records of 4096 inputs of a matrix, a vector a thread, and spreads them over shared
// memory: codes[chunk][lane], scale, sums, squares by group. v: what a first look found there.
DEV void receive(uint4 v, const uint4* record, u32 tag, const Input& to, u32 smem) {
  const int at = unknown(threadIdx.x), group = at / 3, part = at - 3 * group;
  if (at >= RECORD_VECTORS) return;
  while ((v.w & 3) != tag && !is_lost(smem)) v = load_relaxed(record);
  const u32 row = to.act + (group & 3) * 2 * ACT_PITCH + (group >> 2) * 16;
  if (part == 0) {
    store_shared(row, v.x), store_shared(row + 4, v.y), store_shared(row + 8, v.z);
    store_shared(to.squares + 4 * group, v.w & ~3u);
  } else if (part == 1) {
    store_shared(row + 12, v.x), store_shared(row + ACT_PITCH, v.y);
    store_shared(row + ACT_PITCH + 4, v.z), store_shared(to.sums + 4 * group, v.w >> 2);
  } else {
    store_shared(row + ACT_PITCH + 8, v.x), store_shared(row + ACT_PITCH + 12, v.y);
    store_shared(to.scales + 4 * group, v.z);
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
// 1 / rms of the input, from the sums of squares of all CTAs in a fixed order.
DEV float make_rms(u32 squares, float eps, int lane) {
  const uint4 s = load_shared(squares + 16 * lane);
  float t = __uint_as_float(s.x) + __uint_as_float(s.y) + __uint_as_float(s.z) +
            __uint_as_float(s.w);
  for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
  return rsqrtf(t * (1.f / HIDDEN) + eps);
}
// This warp's rows of a matrix, two at a time. Rows of q, k, v are sent as they are done; each 32
// others make a record when the last warp has its own. A slice of down begins when its inputs are
// there: the first ones are, while slow CTAs still compute the last of gate and up. residual, norm:
// of warp 0; ahead: a look at the first record of down, taken before the last of gate and up.
DEV void multiply(const Args& g, Taker& taker, u32 smem, int layer, int kind, int warp, int lane,
                  float& residual, float norm, uint4& ahead) {
  const int group = warp / GROUP, pairs = pairs_of(kind, group), step = kind == DOWN ? 1 : pairs;
  const int six = g.six[layer];
  const bool adds = kind == OUT || kind == DOWN;
  const u32 data = taker.ring.data, mine = (warp % GROUP) * UNIT, tag = layer & 3;
  const int tid = 32 * warp + lane;
  const uint4* record = g.exchange + RECORD_AT(kind) + tid;
  if (kind != DOWN && tid < RECORD_VECTORS) ahead = load_relaxed(record);
  float acc0 = 0, acc1 = 0, rms = 1;
#pragma unroll 1
  for (int it = 0, slice = 0; it < pairs; ++slice) {
    const Input in = input_of(smem, kind, slice);
    receive(ahead, record, tag, in, smem);
    bar_sync(2, CONSUMERS);
    if (tid == 0) store_shared(smem + Layout::COMPUTING, phase_of(layer, kind));
    record += RECORD_VECTORS;
    if (kind == DOWN && slice < SLICES - 1 && tid < RECORD_VECTORS) ahead = load_relaxed(record);
    if (!adds) rms = make_rms(in.squares, g.eps, lane);
    const Act a = load_act(in.act, in.scales, in.sums, lane);
#pragma unroll 1
    for (const int end = it + step; it < end; ++it) {
      if (kind == GATEUP && it == pairs - 2 && tid < RECORD_VECTORS) ahead = load_relaxed(record);
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
      y *= rms;
      acc0 = acc1 = 0;
      const float other = __shfl_xor_sync(~0u, y, 16);
      if (kind == QKV) {  // pairs of rows: 16 of q, 4 of k, 4 of v
        if (lane == 0)
          store_relaxed(reinterpret_cast<u64*>(g.exchange + HEADS_AT + 12 * blockIdx.x) +
                            (it ? WARPS : 0) + warp,
                        __float_as_uint(y), (__float_as_uint(other) & ~3u) | (layer & 3));
        continue;
      }
      const u32 results = smem + Layout::RESULTS;
      if (kind == GATEUP) {
        const float h = y / (1.f + __expf(-y)) * other;
        if (lane == 0) store_shared(results + 4 * (16 * it + warp), __float_as_uint(h));
        if (!(it & 1)) continue;
      } else if ((lane & 15) == 0) {
        store_shared(results + 4 * (2 * warp + (lane >> 4)), __float_as_uint(y));
      }
      const int part = kind == GATEUP ? it >> 1 : 0;  // 32 results; that warp sends them
      if (warp != GROUP * part) {
        bar_arrive(4 + part, CONSUMERS);
        continue;
      }
      bar_sync(4 + part, CONSUMERS);
      float v = __uint_as_float(load_shared_word(results + 4 * (32 * part + lane)));
      if (adds) v = residual = residual + v;
      if (kind == DOWN && layer == LAYERS - 1) {
        const bool lost = load_shared_word(smem + Layout::LOST);
        g.x_out[32 * blockIdx.x + lane] = lost ? __int_as_float(0x7fffffff) : v;
      } else {
        publish(g.exchange + RECORD_AT((kind + 1) & 3) + 3 * (CTAS * part + blockIdx.x),
                smem + Layout::SCRATCH + 32 * part, v, norm, adds, (layer + (kind == DOWN)) & 3,
                lane);
      }
    }
  }
}

// ---- attention
// 64 threads bring the norms of q and k to shared memory.
DEV void load_head_norms(const Args& g, u32 smem, int layer, int i) {
#if HAS_QK_NORM
  const float4 w = reinterpret_cast<const float4*>(g.head_norms)[64 * layer + i];
  const u32 to = smem + Layout::HEAD_NORMS + 16 * i;
  store_shared(to, __float_as_uint(w.x)), store_shared(to + 4, __float_as_uint(w.y));
  store_shared(to + 8, __float_as_uint(w.z)), store_shared(to + 12, __float_as_uint(w.w));
#endif
}
// Rows of q, k, v of this CTA's head arrive as floats: warps 0 to 3 take a query head each, warp 4
// the new key, warp 5 the new value; lane l has elements 4 l .. 4 l + 3. They norm and rotate,
// leave fp16 in shared memory, and one CTA writes the new key and value to the cache.
DEV void receive_heads(const Args& g, const Caches& caches, u32 smem, int layer, int warp, int lane,
                       const Ends& ends) {
  const int part = warp < HEADS ? lane & 7 : 2 * warp + (lane & 1);
  const int source = warp < HEADS ? 4 * warp + (lane >> 3) : lane >> 1;
  u16* plane = nullptr;
  if (warp >= HEADS && ends.split == 0) {
    const long long slot = (long long)load_shared_long(smem + Layout::NEW_SLOT);
    // 64-bit: slots * 1024 elements pass 2^31.
    if (slot >= 0)
      plane = caches.planes[layer][warp - HEADS] + (slot * KV_HEADS + ends.head) * HEAD + 4 * lane;
  }
  const uint4* rows = g.exchange + HEADS_AT + 12 * (SPLITS * ends.head + source) + part;
  uint4 raw = load_relaxed(rows);
  const u32 tag = layer & 3;
  while (((raw.y & 3) != tag || (raw.w & 3) != tag) && !is_lost(smem)) raw = load_relaxed(rows);
  float v[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y & ~3u), __uint_as_float(raw.z),
                __uint_as_float(raw.w & ~3u)};
  if (warp <= HEADS) {
#if HAS_QK_NORM
    float t = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
    for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
    const float r = rsqrtf(t * (1.f / HEAD) + g.eps);
    const uint4 w = load_shared(smem + Layout::HEAD_NORMS + (warp == HEADS) * 4 * HEAD + 16 * lane);
    v[0] *= r * __uint_as_float(w.x), v[1] *= r * __uint_as_float(w.y);
    v[2] *= r * __uint_as_float(w.z), v[3] *= r * __uint_as_float(w.w);
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
  if (plane) *reinterpret_cast<uint2*>(plane) = make_uint2(lo, hi);
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
  const u32 at = smem + Layout::WARP_OUTPUTS + 4 * (row + (upper ? 8 : 0)) +
                 (warp * HEADS + (column & 2)) * Layout::OUTPUTS_PITCH;
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
#pragma unroll 1
  for (int w = 0; w < active; w += GROUP)
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const u32 from = mine + (w + i) * HEADS * Layout::OUTPUTS_PITCH;
      y += __shfl_sync(~0u, shares.factor, w + i) * __uint_as_float(load_shared_word(from));
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
// One warp merges the 16 partial outputs of this CTA's 32 elements: lane l has elements 4 (l % 8)
// and on of parts l / 8 + 4 j, and maximum and sum of part l % 16. Returns element l.
DEV float merge_partials(const Args& g, u32 smem, int layer, int lane) {
  const uint4* parts = g.exchange + PARTIALS_AT + blockIdx.x * SPLITS * PARTIAL;
  const uint4* from = parts + (lane >> 3) * PARTIAL + (lane & 7);
  const uint4* ends = parts + (lane & 15) * PARTIAL + PARTIAL - 1;
  const u32 tag = layer & 3;
  uint4 v[4], own;
  bool again;
  do {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = load_relaxed(from + 4 * j * PARTIAL);
    own = load_relaxed(ends);
    again = (own.w & 3) != tag;
#pragma unroll
    for (int j = 0; j < 4; ++j) again |= (v[j].w & 3) != tag;
  } while (__any_sync(~0u, again) && !is_lost(smem));
  const Shares shares = make_shares(__uint_as_float(own.x), __uint_as_float(own.y));
  float y[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float f = __shfl_sync(~0u, shares.factor, (lane >> 3) + 4 * j);
    y[0] += f * __uint_as_float(v[j].x), y[1] += f * __uint_as_float(v[j].y);
    y[2] += f * __uint_as_float(v[j].z), y[3] += f * __uint_as_float(v[j].w & ~3u);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] += __shfl_xor_sync(~0u, y[i], 8);
    y[i] += __shfl_xor_sync(~0u, y[i], 16);
    y[i] = __shfl_sync(~0u, y[i], lane >> 2);
  }
  const float pair = lane & 1 ? y[1] : y[0], next = lane & 1 ? y[3] : y[2];
  return (lane & 2 ? next : pair) / shares.sum;
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
  if (warp == 0) {
    const float y = merge_partials(g, smem, layer, lane);
    publish(g.exchange + RECORD_AT(OUT) + 3 * blockIdx.x, smem + Layout::SCRATCH, y, 0, false,
            layer & 3, lane);
  }
  // Warps without records of the next exchange fetch what the next layer's heads would wait for.
  if (warp >= WARPS - 2 && layer + 1 < LAYERS)
    load_head_norms(g, smem, layer + 1, 32 * warp + lane - CONSUMERS + 64);
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
  if (tid == 0) {
    const u32 now = clock_high();
    *computing = 0;
    store_shared(smem + Layout::LOST, 0), store_shared(smem + Layout::START, now);
    const u64 slot = *g.slot;
    store_shared(smem + Layout::NEW_SLOT, (u32)slot);
    store_shared(smem + Layout::NEW_SLOT + 4, (u32)(slot >> 32));
    store_shared(smem + Layout::NUM_KEYS, *g.seq_len - 1);
  }
  if (tid < HEAD) {
    const float turn = g.rope[(long long)*g.position * HEAD + tid];
    store_shared(smem + Layout::ROPE + 4 * tid, __float_as_uint(turn));
  }
  if (tid < 64) load_head_norms(g, smem, 0, tid);
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
  Taker taker = {ring, 0, 0};
  // Warp 0, lane l: element 32 cta + l of the residual stream, in a register for the whole step.
  float residual = 0;
  if (warp == 0) {
    residual = g.x_in[32 * cta + lane];
    publish(g.exchange + RECORD_AT(QKV) + 3 * cta, smem + Layout::SCRATCH, residual,
            g.norms[32 * cta + lane], true, 0, lane);
  }
  uint4 ahead = {};
#pragma unroll 1
  for (int phase = 0; phase < 4 * LAYERS; ++phase) {
    const int layer = phase >> 2, kind = phase & 3;
    float norm = 0;  // weight of the norm that follows, fetched long before it is needed
    if (warp == 0 && (kind == OUT || (kind == DOWN && layer < LAYERS - 1)))
      norm = __ldg(g.norms + (2 * layer + (kind == OUT ? 1 : 2)) * HIDDEN + 32 * cta + lane);
    multiply(g, taker, smem, layer, kind, warp, lane, residual, norm, ahead);
    if (kind != QKV) continue;
    attention(g, caches, unknown(smem), layer, unknown(warp), unknown(lane), taker);
  }
}
