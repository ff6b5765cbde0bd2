// sparse_attention_tiles: DeepSeek-V4's attention over listed encoded vectors by wgmma (sm_90a), 64
// heads x 64 keys x 512 channels a tile. Host side, floor: kernels/attention/sparse_attention_tiles.py.
//
// An item is a token and 64 heads; a tile is 64 keys of its list, which is the window and then the
// entries. Four warpgroups:
//
//   producer    gathers the keys of a tile and decodes them to bfloat16, once, into a ring
//   scores      S = Q K^T, online softmax, P and the factors of the sums before to shared memory
//   values (2)  O = O x factor + P V, 256 channels each, 128 registers a thread; V is K again
//
// The ring has slots of 64 keys x 128 channels, a pair of chunks, nine of them: two tiles and the start
// of a third. So while P V of a tile runs, S of the next one does, as far as it is decoded. Barriers:
// `full` and `empty` of a slot, `weighed` of P.
//
// Without a cluster CTAs are persistent. In a cluster of CLUSTER CTAs each takes an equal share of the
// item's tiles, and they add up their sums in order through each other's shared memory, each for its
// share of the result. Where shares end depends on the token's own keys alone.
//
//   q        8 x 64 rows x 128 bytes     chunks of 64 channels, 128-byte swizzle
//   keys     9 slots of two such chunks; sums of a CTA of a cluster, 64 x 512 floats
//   weights  2 x 64 rows x 128 bytes     P
//   notes    of each slot: 64 factors, 64 last factors, masks of keys, whether the tile is the last
//   tops     64 maxima and totals, of a CTA of a cluster
//
// Rows of no key are zeros with weight 0, and nothing else is read: NaN of a cache stays where it is.
//
// Macros: CLUSTER, KIND0, KIND1 (how keys are listed, see sparse_attention_keys.cuh), LONG0, LONG1
// (whether a list is int64), IS_BF16 (1).
#include "attention/sparse_attention_keys.cuh"
#include "attention/sparse_attention_tiles_ptx.cuh"

#define NTHR 512
#define D 512
#define HEADS 64
#define KEYS 64
#define CHUNK (64 * 128)
#define PAIR (2 * CHUNK)
#define PAIRS 9
#define Q_AT 0
#define KEYS_AT (8 * CHUNK)
#define WEIGHTS_AT (KEYS_AT + PAIRS * PAIR)
#define NOTES_AT (WEIGHTS_AT + 2 * CHUNK)
#define NOTE 544  // bytes: factors, last factors, masks, is_last
#define LAST_AT 256
#define MASK_AT 512
#define IS_LAST_AT 520
#define ENDS_AT 524  // the same, for those who add values
#define TOPS_AT (NOTES_AT + 2 * NOTE)
#define BARS_AT (TOPS_AT + 512)
#define Q_FULL BARS_AT
#define WEIGHED(slot) (BARS_AT + 8 + 8 * (slot))
#define FULL(pair) (BARS_AT + 24 + 8 * (pair))
#define EMPTY(pair) (FULL(PAIRS) + 8 * (pair))
#define LOG2_E 1.4426950408889634f
#define START_MAX (-1e30f)  // finite, so that rows without keys end with weights 0, not NaN
// Registers of a thread; with 128 of each at the start, 512 in all.
#define VALUE_REGISTERS 160
#define SCORE_REGISTERS 80
#define PRODUCER_REGISTERS 112

struct Work {
  u8* out;             // (tokens, heads, D) bfloat16
  const float* sinks;  // (heads,) or null
  Part part0, part1;
  int heads, groups, items;  // groups of 64 heads; tokens x groups
  float scale_log2, most_growth;  // of a maximum, in scores, below which sums keep their scale
};
struct Turn {  // of the slots of weights
  int slot = 0, phase = 0;
  DEV void next() { slot ^= 1, phase ^= slot == 0; }
};
struct Ring {  // of the slots of pairs of chunks
  int pair = 0, phase = 0;
  DEV void next() {
    pair = pair + 1 == PAIRS ? 0 : pair + 1;
    phase ^= pair == 0;
  }
};
DEV int first_item() { return blockIdx.x / CLUSTER; }
DEV int item_step() { return CLUSTER > 1 ? 1 << 30 : gridDim.x; }

// ---- producer
struct Cursor {  // a tile of the CTA's walk
  int item, tile, end;
  Keys keys0, keys1;
};
DEV void enter_item(Cursor& at, const Work& w, int item) {
  at.item = item;
  if (item >= w.items) return;
  const int token = item / w.groups;
  at.keys0 = keys_of<KIND0>(w.part0, token), at.keys1 = keys_of<KIND1>(w.part1, token);
  const int tiles = (at.keys0.count + at.keys1.count + KEYS - 1) / KEYS;
  const int share = (tiles + CLUSTER - 1) / CLUSTER, rank = blockIdx.x % CLUSTER;
  at.tile = rank * share;
  at.end = max(min(at.tile + share, tiles), at.tile + 1);  // without keys one tile of none
}
DEV void advance(Cursor& at, const Work& w) {
  if (at.item < w.items && ++at.tile == at.end) enter_item(at, w, at.item + item_step());
}
struct Listed { i64 entry; bool is_second; };
DEV Listed look_up(const Cursor& at, const Work& w, int key) {
  if (at.item >= w.items) return {-1, false};
  const int place = KEYS * at.tile + key, token = at.item / w.groups;
  if (place < at.keys0.count) return {entry_at<KIND0, LONG0>(w.part0, at.keys0, token, place), false};
  return {entry_at<KIND1, LONG1>(w.part1, at.keys1, token, place - at.keys0.count), true};
}
DEV Spot spot_in(const Cursor& at, const Work& w, const Listed& listed) {
  if (listed.entry < 0) return {0, 0};
  return listed.is_second && KIND1 != 3 ? spot_of<KIND1>(w.part1, at.keys1, listed.entry)
                                        : spot_of<KIND0>(w.part0, at.keys0, listed.entry);
}
__device__ uint4 no_key[(D + 64) / 16];  // zeros
// A lane takes 16 of each 64 channels of two keys, 8 apart: 18 loads of a tile, pair of chunks by
// pair, of which nine are in flight.
struct Gather {
  uint4 held[9];
  const u8* rows[2];
  u64 scales[2], next_scales[2];
  int quad;
  // Of load n: the key's half, the group of channels, and of the last chunk's two loads which.
  static constexpr DEV int half_of(int n) { return n < 12 ? n / 2 % 2 : (n - 12) / 3; }
  static constexpr DEV int group_of(int n) { return n < 12 ? n / 4 * 2 + n % 2 : n % 3 ? 7 : 6; }
  DEV void fetch(int n) {
    const int group = group_of(n);
    const u8* row = rows[half_of(n)] + (group == 7 ? 16 * quad : 0);
    held[n % 9] = load_no_allocate<uint4>(row + (group == 7 ? 448 + 16 * (n % 3 - 1) : 64 * group));
  }
  // To the row of a key: `at` is the first of the lane's two chunks of 16 bytes, the other is at ^ 16.
  template <bool IS_LARGE> DEV void decode(int n, u32 at) {
    const uint4 x = held[n % 9];
    const int group = group_of(n);
    const u32 to = half_of(n) * (8 * 128) + group % 2 * CHUNK;
    if (group == 7) {
      store_shared((n % 3 == 1 ? at : at ^ 16) + to, make_uint4(x.x, x.y, x.z, x.w));
      return;
    }
    const u32 scale = (u32)(scales[half_of(n)] >> 8 * group) & 255, factor = pair_of(scale + 120);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
    u32 y[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (IS_LARGE) {
        widen_e4m3(words[i], factor_of(scale), y[2 * i], y[2 * i + 1]);
        continue;
      }
      spread_e4m3(words[i], y[2 * i], y[2 * i + 1]);
      y[2 * i] = mul_bf16x2(y[2 * i], factor);
      y[2 * i + 1] = mul_bf16x2(y[2 * i + 1], factor);
    }
    store_shared(at + to, make_uint4(y[0], y[1], y[2], y[3]));
    store_shared((at ^ 16) + to, make_uint4(y[4], y[5], y[6], y[7]));
  }
  DEV void aim(int half, const Work& w, const Listed& listed, const Spot& spot) {
    const Part& part = listed.is_second ? w.part1 : w.part0;
    const bool has = listed.entry >= 0;
    rows[half] = (has ? (const u8*)row_of(part, spot) : (const u8*)no_key) + 16 * quad;
    next_scales[half] = has ? load_read_only<u64>((const u8*)scales_of(part, spot)) : 0;
  }
  // Whether a scale of this tile takes two factors.
  DEV bool has_large() const {
    const u64 low = 0x7f7f7f7f7f7f7f7full, limit = (127 - (LARGEST - 128)) * 0x0101010101010101ull;
    bool is_large = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      is_large |= (scales[h] & ((scales[h] & low) + limit) & ~low) != 0;
    return __any_sync(~0u, is_large);
  }
};
struct Producer {
  Cursor at;
  Gather gather;
  Listed listed[2];
  Turn turn;
  Ring ring;
  int key;
  u32 own;

  // Decodes a tile, and fetches from the next one, whose keys are found meanwhile.
  template <bool IS_LARGE> DEV void decode(const Work& w, u32 base, u32 has, bool is_last, int tid) {
    Spot spots[2];
#pragma unroll
    for (int n = 0; n < 18; ++n) {
      if (n == 4) spots[0] = spot_in(at, w, listed[0]), spots[1] = spot_in(at, w, listed[1]);
      if (n == 9) gather.aim(0, w, listed[0], spots[0]), gather.aim(1, w, listed[1], spots[1]);
      if (n % 4 == 0 && n < 16) mbar_wait(base + EMPTY(ring.pair), ring.phase ^ 1);
      gather.decode<IS_LARGE>(n, own + ring.pair * PAIR);
      gather.fetch(n < 9 ? n + 9 : n - 9);
      if (n == 17) {
        const u32 note = base + NOTES_AT + turn.slot * NOTE;
        if (tid % 32 == 0) store_shared<u16>(note + MASK_AT + tid / 16, has);
        if (tid == 0) store_shared<u32>(note + IS_LAST_AT, is_last);
      }
      if (n % 4 == 3 && n < 12 || n == 17) {
        // The fence is where they wait: here it would wait for the loads in flight too.
        mbar_arrive(base + FULL(ring.pair));
        ring.next();
      }
    }
  }
  DEV void run(const Work& w, u32 base, int tid) {
    const int lane = tid & 31;
    gather.quad = lane & 3;
    key = 16 * uni(tid >> 5) + (lane >> 2);
    own = base + KEYS_AT + 128 * key + (((2 * (lane & 3)) ^ (key & 7)) << 4);
    enter_item(at, w, first_item());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      listed[h] = look_up(at, w, key + 8 * h);
      gather.aim(h, w, listed[h], spot_in(at, w, listed[h]));
    }
#pragma unroll
    for (int n = 0; n < 9; ++n) gather.fetch(n);
    for (; uni(at.item < w.items); turn.next()) {
      const bool is_last = at.tile + 1 == at.end;
      // Of this tile's keys those that are there: a bit each of the warp's 16.
      const u32 low = __ballot_sync(~0u, listed[0].entry >= 0);
      const u32 high = __ballot_sync(~0u, listed[1].entry >= 0);
      const u32 has = __ballot_sync(~0u, lane < 16 && ((lane < 8 ? low : high) >> 4 * (lane & 7) & 1));
      gather.scales[0] = gather.next_scales[0], gather.scales[1] = gather.next_scales[1];
      advance(at, w);
      listed[0] = look_up(at, w, key), listed[1] = look_up(at, w, key + 8);
      if (gather.has_large()) decode<true>(w, base, has, is_last, tid);
      else decode<false>(w, base, has, is_last, tid);
    }
  }
};

// ---- scores
DEV void load_queries(const TMap* q, u32 base, const Work& w, int item) {
  mbar_expect(base + Q_FULL, 8 * CHUNK);
  for (int c = 0; c < 8; ++c)
    tma3(base + Q_AT + c * CHUNK, q, base + Q_FULL, 64 * c, item % w.groups * HEADS, item / w.groups);
}
// A thread has rows r and r + 8 of 64, r = 16 x warp + lane / 4, and of each 8 columns two.
DEV void weigh(const Work& w, const TMap* q, u32 base, int tid) {
  const int lane = tid & 31, quad = lane & 3, row = 16 * uni(tid >> 5) + (lane >> 2);
  int q_phase = 0;
  Turn turn;
  Ring ring;
  if (tid == 0 && first_item() < w.items) load_queries(q, base, w, first_item());
  for (int item = first_item(); item < w.items; item += item_step()) {
    float top[2] = {START_MAX, START_MAX}, total[2] = {0.f, 0.f};
    mbar_wait(base + Q_FULL, q_phase);
    q_phase ^= 1;
    bool is_last;
    do {
      const u32 note = base + NOTES_AT + turn.slot * NOTE;
      float s[32];
      const u32 qd = uniform(mdesc(base + Q_AT, 16));
#pragma unroll
      for (int p = 0; p < 4; ++p, ring.next()) {
        mbar_wait(base + FULL(ring.pair), ring.phase);
        fence_shared_writes();
        const u32 kd = uniform(mdesc(base + KEYS_AT + ring.pair * PAIR, 16));
        wg_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const u32 step = ((i >> 2) * CHUNK + (i & 3) * 32) >> 4;
          if (p == 0 && i == 0) wgmma_ss<0>(s, qd, DESC_HI, kd, DESC_HI);
          else wgmma_ss<1>(s, qd + (p * PAIR >> 4) + step, DESC_HI, kd + step, DESC_HI);
        }
        wg_commit();
      }
      const uint2 mask = load_shared<uint2>(note + MASK_AT);
      is_last = uni(load_shared<u32>(note + IS_LAST_AT));
      wg_wait<0>();
      pin(s);
      if (is_last && item + item_step() < w.items) {  // all products with these queries are done
        bar_sync(1, 128);
        if (tid == 0) load_queries(q, base, w, item + item_step());
      }
      if ((mask.x & mask.y) != ~0u) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const u32 bits = (j < 4 ? mask.x : mask.y) >> (8 * (j & 3) + 2 * quad + e);
            if (!(bits & 1)) s[4 * j + e] = s[4 * j + 2 + e] = __int_as_float(0xff800000);
          }
      }
      float factors[2] = {1.f, 1.f};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = s[2 * h];
#pragma unroll
        for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if (most > top[h] + w.most_growth)
          factors[h] = exp2_approx((top[h] - most) * w.scale_log2), top[h] = most;
        const float shift = -top[h] * w.scale_log2;
        float sum = 0.f;
        const u32 to = base + WEIGHTS_AT + turn.slot * CHUNK + 128 * (row + 8 * h) + 4 * quad;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float a = exp2_approx(fmaf(s[4 * j + 2 * h], w.scale_log2, shift));
          const float b = exp2_approx(fmaf(s[4 * j + 2 * h + 1], w.scale_log2, shift));
          sum += a + b;
          store_shared<u32>(to + ((j ^ (row & 7)) << 4), pack(a, b));
        }
        total[h] = total[h] * factors[h] + sum;
        if (quad == 0) store_shared<float>(note + 4 * (row + 8 * h), factors[h]);
      }
      if (is_last) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = total[h];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          const float log2_top = top[h] * w.scale_log2;
#if CLUSTER > 1
          if (quad == 0) {
            store_shared<float>(base + TOPS_AT + 4 * (row + 8 * h), log2_top);
            store_shared<float>(base + TOPS_AT + 4 * (HEADS + row + 8 * h), sum);
          }
#else
          const int head = item % w.groups * HEADS + row + 8 * h;
          if (w.sinks && head < w.heads) sum += exp2_approx(w.sinks[head] * LOG2_E - log2_top);
          if (quad == 0)
            store_shared<float>(note + LAST_AT + 4 * (row + 8 * h), sum > 0.f ? 1.f / sum : 0.f);
#endif
        }
      }
      if (tid == 0) store_shared<u32>(note + ENDS_AT, is_last);
      fence_shared_writes();
      mbar_arrive(base + WEIGHED(turn.slot));
      turn.next();
    } while (!is_last);
  }
}

// ---- values
// Normalise and store 64 x 256 sums; a quad transposes 4 x 4 words, so that every store is 16 bytes.
DEV void store_sums(const float (&o)[2][64], float last0, float last1, u8* to, int head_limit, int row,
                    int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float last = h ? last1 : last0;
    u8* const row_to = to + (i64)(row + 8 * h) * (2 * D) + 16 * (lane & 3);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 4 * (4 * (b & 3) + j) + 2 * h;
        x[j] = pack(o[b >> 2][at] * last, o[b >> 2][at + 1] * last);
      }
      u32 s0 = (lane & 1) ? x[0] : x[1], s1 = (lane & 1) ? x[2] : x[3];
      s0 = __shfl_xor_sync(~0u, s0, 1), s1 = __shfl_xor_sync(~0u, s1, 1);
      if (lane & 1) x[0] = s0, x[2] = s1;
      else x[1] = s0, x[3] = s1;
      s0 = (lane & 2) ? x[0] : x[2], s1 = (lane & 2) ? x[1] : x[3];
      s0 = __shfl_xor_sync(~0u, s0, 2), s1 = __shfl_xor_sync(~0u, s1, 2);
      if (lane & 2) x[0] = s0, x[1] = s1;
      else x[2] = s0, x[3] = s1;
      if (row + 8 * h < head_limit) *(uint4*)(row_to + 64 * b) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}
// Address of 4 sums of a CTA of a cluster; no bank conflicts where a warp writes 8 rows of pairs.
DEV u32 sums_at(u32 base, int row, int column) {
  return base + KEYS_AT + 2048 * row + ((column / 4 ^ 2 * (row & 3)) << 4);
}
DEV void add_values(const Work& w, u32 base, int wg, int tid) {
  const int lane = tid & 31, quad = lane & 3, row = 16 * uni(tid >> 5) + (lane >> 2);
  Turn turn;
  Ring ring;
  float o[2][64];
  for (int item = first_item(); item < w.items; item += item_step()) {
    bool is_first = true, is_last;
    float last0, last1;
    do {
      const u32 note = base + NOTES_AT + turn.slot * NOTE;
      mbar_wait(base + WEIGHED(turn.slot), turn.phase);
      const float a = load_shared<float>(note + 4 * row), b = load_shared<float>(note + 4 * (row + 8));
      is_last = uni(load_shared<u32>(note + ENDS_AT));
#if CLUSTER == 1
      last0 = load_shared<float>(note + LAST_AT + 4 * row),
      last1 = load_shared<float>(note + LAST_AT + 4 * (row + 8));
#endif
      if (!is_first && __any_sync(~0u, a != 1.f || b != 1.f)) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int j = 0; j < 64; j += 4)
            o[half][j] *= a, o[half][j + 1] *= a, o[half][j + 2] *= b, o[half][j + 3] *= b;
      }
      const u32 pd = uniform(mdesc(base + WEIGHTS_AT + turn.slot * CHUNK, 16));
      if (wg) ring.next(), ring.next();
      const Ring first = ring;
      ring.next();
      const Ring second = ring;
      ring.next();
      if (!wg) ring.next(), ring.next();
      const u32 vd[2] = {uniform(mdesc(base + KEYS_AT + first.pair * PAIR, CHUNK)),
                         uniform(mdesc(base + KEYS_AT + second.pair * PAIR, CHUNK))};
      pin(o[0]), pin(o[1]);
      wg_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
          wgmma_values(o[half], pd + 2 * i, vd[half] + (i * 2048 >> 4), i == 0 ? is_first : 0);
      wg_commit();
      wg_wait<0>();
      pin(o[0]), pin(o[1]);
      __syncwarp();
      if (lane == 0) mbar_arrive(base + EMPTY(first.pair)), mbar_arrive(base + EMPTY(second.pair));
      is_first = false;
      turn.next();
    } while (!is_last);
#if CLUSTER == 1
    const int first_head = item % w.groups * HEADS;
    u8* const to = w.out + ((i64)(item / w.groups) * w.heads + first_head) * (2 * D) + wg * 512;
    store_sums(o, last0, last1, to, w.heads - first_head, row, lane);
#endif
  }
#if CLUSTER > 1
  bar_sync(2, 256);  // both have read all keys
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < 32; ++j)
      store_shared(
          sums_at(base, row + 8 * h, 256 * wg + 8 * j + 2 * quad) + 8 * (quad & 1),
          make_float2(o[j >> 4][4 * (j & 15) + 2 * h], o[j >> 4][4 * (j & 15) + 2 * h + 1]));
#endif
}

#if CLUSTER > 1
// Each CTA adds up its share of the results of all.
DEV void merge(const Work& w, u32 base, int tid) {
  cluster_sync();
  const int rank = blockIdx.x % CLUSTER, item = first_item();
  const int first_head = item % w.groups * HEADS;
  const i64 token = item / w.groups;
#pragma unroll 1
  for (int i = tid; i < HEADS * D / 4 / CLUSTER; i += NTHR) {
    const int at = rank * (HEADS * D / 4 / CLUSTER) + i, row = at / (D / 4), column = at % (D / 4) * 4;
    const int head = first_head + row;
    float tops[CLUSTER], totals[CLUSTER];
    float4 parts[CLUSTER];
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      tops[r] = load_remote<float>(base + TOPS_AT + 4 * row, r);
      totals[r] = load_remote<float>(base + TOPS_AT + 4 * (HEADS + row), r);
      parts[r] = load_remote<float4>(sums_at(base, row, column), r);
    }
    float most = START_MAX, sum = 0.f;
    if (w.sinks && head < w.heads) most = w.sinks[head] * LOG2_E, sum = 1.f;
    const float sink = most;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) most = fmaxf(most, tops[r]);
    sum *= exp2_approx(sink - most);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float weight = exp2_approx(tops[r] - most);
      sum += weight * totals[r];
      x.x += weight * parts[r].x, x.y += weight * parts[r].y;
      x.z += weight * parts[r].z, x.w += weight * parts[r].w;
    }
    const float factor = sum > 0.f ? 1.f / sum : 0.f;
    if (head < w.heads)
      *(uint2*)(w.out + 2 * ((token * w.heads + head) * D + column)) =
          make_uint2(pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor));
  }
  cluster_sync();  // nobody leaves while its memory is read
}
#endif

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(NTHR, 1) sparse_attention_tiles(
    const __grid_constant__ TMap q,  // (tokens, heads, D), boxes of 64 heads x 64 channels
    const __grid_constant__ Work w) {
  launch_dependents();
  const u32 base = aligned_base();
  const int tid = threadIdx.x, wg = uni(tid >> 7);
  if (tid == 0) {
    mbar_init(base + Q_FULL, 1);
    mbar_init(base + WEIGHED(0), 128), mbar_init(base + WEIGHED(1), 128);
    for (int pair = 0; pair < PAIRS; ++pair)
      mbar_init(base + FULL(pair), 128), mbar_init(base + EMPTY(pair), 4);
    mbar_fence();
  }
  wait_for_inputs();
  __syncthreads();
  if (wg == 0) {
    lower_registers<PRODUCER_REGISTERS>();
    Producer producer;
    producer.run(w, base, tid);
#if CLUSTER > 1
    merge(w, base, tid);
#endif
  } else if (wg == 1) {
    lower_registers<SCORE_REGISTERS>();
    weigh(w, &q, base, tid - 128);
#if CLUSTER > 1
    merge(w, base, tid);
#endif
  } else {
    raise_registers<VALUE_REGISTERS>();
    add_values(w, base, wg - 2, tid & 127);
#if CLUSTER > 1
    merge(w, base, tid);
#endif
  }
}
