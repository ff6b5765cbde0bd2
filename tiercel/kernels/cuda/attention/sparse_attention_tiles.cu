// sparse_attention_tiles: DeepSeek-V4's attention over listed encoded vectors by wgmma (sm_90a), 64
// heads x 64 keys x 512 channels a tile. Host side, floor: kernels/attention/sparse_attention_tiles.py.
//
// An item is a token and 64 heads; a tile is 64 keys of its list, which is the window and then the
// entries. Four warpgroups:
//
//   producer    gathers and decodes the keys of a tile to bfloat16, once, into one of two slots
//   scores      S = Q K^T, online softmax, P and the factors of the sums before to shared memory
//   values (2)  O = O x factor + P V, 256 channels each, 128 registers a thread; V is the slot again
//
// So while P V of a tile runs, S of the next one does, and the tile after it is decoded as soon as its
// slot is free. A slot's barriers: `full` (decoded), `weighed` (P is there), `empty` (P V is done).
//
// Without a cluster CTAs are persistent. In a cluster of CLUSTER CTAs each takes an equal share of the
// item's tiles, and they add up their sums in order through each other's shared memory, each for its
// share of the result. Where shares end depends on the token's own keys alone.
//
//   q        8 x 64 rows x 128 bytes     chunks of 64 channels, 128-byte swizzle
//   keys     2 slots of the same; sums of a CTA of a cluster, 64 x 512 floats
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
#define SLOT (8 * CHUNK)
#define Q_AT 0
#define KEYS_AT SLOT
#define WEIGHTS_AT (3 * SLOT)
#define NOTES_AT (WEIGHTS_AT + 2 * CHUNK)
#define NOTE 544  // bytes: factors, last factors, masks, is_last
#define LAST_AT 256
#define MASK_AT 512
#define IS_LAST_AT 520
#define TOPS_AT (NOTES_AT + 2 * NOTE)
#define BARS_AT (TOPS_AT + 512)
#define Q_FULL BARS_AT
#define FULL(slot) (BARS_AT + 8 + 8 * (slot))
#define WEIGHED(slot) (BARS_AT + 24 + 8 * (slot))
#define EMPTY(slot) (BARS_AT + 40 + 8 * (slot))
#define LOG2_E 1.4426950408889634f
#define START_MAX (-1e30f)  // finite, so that rows without keys end with weights 0, not NaN
// Registers of a thread; with 128 of each at the start, 512 in all.
#define VALUE_REGISTERS 160
#define SCORE_REGISTERS 88
#define PRODUCER_REGISTERS 104

struct Work {
  u8* out;             // (tokens, heads, D) bfloat16
  const float* sinks;  // (heads,) or null
  Part part0, part1;
  int heads, groups, items;  // groups of 64 heads; tokens x groups
  float scale_log2, most_growth;  // of a maximum, in scores, below which sums keep their scale
};
struct Turn {  // of the slots
  int slot = 0, phase = 0;
  DEV void next() { slot ^= 1, phase ^= slot == 0; }
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
DEV uint4 load_or_zero(const u8* from, bool has) {
  return has ? load_rows(from) : make_uint4(0, 0, 0, 0);
}
// A lane takes 16 of each 64 channels of two keys, 8 apart. They come in units of three loads: groups
// 0 to 2, 3 to 5, 6 with the bfloat16 channels; three units are in flight.
struct Gather {
  uint4 held[3][3];
  const u8* rows[2];
  u64 scales[2];
  int quad;
  DEV void fetch(int unit) {
    const int part = unit % 3;
    const u8* row = rows[unit / 3];
    const bool has = row != nullptr;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int at = part == 2 && i ? 448 + 32 * quad + 16 * (i - 1) : 64 * (3 * part + i) + 16 * quad;
      held[part][i] = load_or_zero(row + at, has);
    }
  }
  // To the row of a key: `at` is the first of the lane's two chunks of 16 bytes, the other is at ^ 16.
  DEV void decode(int unit, u32 at) {
    const int part = unit % 3;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint4 x = held[part][i];
      if (part == 2 && i) {
        const u32 to = at + 7 * CHUNK;
        store_row(i == 1 ? to : to ^ 16, x.x, x.y, x.z, x.w);
        continue;
      }
      const int group = 3 * part + i;
      const Factor factor = factor_of((u32)(scales[unit / 3] >> 8 * group) & 255);
      const u32 to = at + group * CHUNK;
      u32 y[4];
      widen_e4m3(x.x, factor, y[0], y[1]), widen_e4m3(x.y, factor, y[2], y[3]);
      store_row(to, y[0], y[1], y[2], y[3]);
      widen_e4m3(x.z, factor, y[0], y[1]), widen_e4m3(x.w, factor, y[2], y[3]);
      store_row(to ^ 16, y[0], y[1], y[2], y[3]);
    }
  }
  DEV void aim(int half, const Work& w, const Listed& listed, const Spot& spot) {
    const Part& part = listed.is_second ? w.part1 : w.part0;
    const bool has = listed.entry >= 0;
    rows[half] = has ? (const u8*)row_of(part, spot) : nullptr;
    scales[half] = has ? load_scales((const u8*)scales_of(part, spot)) : 0x7f7f7f7f7f7f7f7full;
  }
};

DEV void produce(const Work& w, u32 base, int tid) {
  const int lane = tid & 31, warp = uni(tid >> 5), key = 16 * warp + (lane >> 2);
  Gather gather;
  gather.quad = lane & 3;
  const u32 own = KEYS_AT + 128 * key + (((2 * (lane & 3)) ^ (key & 7)) << 4);
  Cursor at;
  enter_item(at, w, first_item());
  Listed listed[2] = {look_up(at, w, key), look_up(at, w, key + 8)};
#pragma unroll
  for (int h = 0; h < 2; ++h) gather.aim(h, w, listed[h], spot_in(at, w, listed[h]));
#pragma unroll
  for (int unit = 0; unit < 3; ++unit) gather.fetch(unit);
  for (Turn turn; uni(at.item < w.items); turn.next()) {
    const bool is_last = at.tile + 1 == at.end;
    // Of this tile's keys those that are there: a bit each of the warp's 16.
    const u32 low = __ballot_sync(~0u, listed[0].entry >= 0);
    const u32 high = __ballot_sync(~0u, listed[1].entry >= 0);
    const u32 has = __ballot_sync(~0u, lane < 16 && ((lane < 8 ? low : high) >> 4 * (lane & 7) & 1));
    advance(at, w);
    listed[0] = look_up(at, w, key), listed[1] = look_up(at, w, key + 8);
    const u32 note = base + NOTES_AT + turn.slot * NOTE, to = base + own + turn.slot * SLOT;
    mbar_wait(base + EMPTY(turn.slot), turn.phase ^ 1);
#pragma unroll
    for (int unit = 0; unit < 3; ++unit) gather.decode(unit, to), gather.fetch(unit + 3);
    const Spot spot0 = spot_in(at, w, listed[0]), spot1 = spot_in(at, w, listed[1]);
    gather.decode(3, to + 8 * 128);
    gather.aim(0, w, listed[0], spot0);
    gather.fetch(0);
    gather.decode(4, to + 8 * 128);
    gather.fetch(1);
    gather.decode(5, to + 8 * 128);
    gather.fetch(2);
    gather.aim(1, w, listed[1], spot1);
    if (lane == 0) store_short(note + MASK_AT + 2 * warp, has);
    if (tid == 0) store_word(note + IS_LAST_AT, is_last);
    fence_writes();
    mbar_arrive(base + FULL(turn.slot));
  }
}

// ---- scores
DEV void load_queries(const TMap* q, u32 base, const Work& w, int item) {
  mbar_expect(base + Q_FULL, SLOT);
  for (int c = 0; c < 8; ++c)
    tma3(base + Q_AT + c * CHUNK, q, base + Q_FULL, 64 * c, item % w.groups * HEADS, item / w.groups);
}
// A thread has rows r and r + 8 of 64, r = 16 x warp + lane / 4, and of each 8 columns two.
DEV void weigh(const Work& w, const TMap* q, u32 base, int tid) {
  const int lane = tid & 31, quad = lane & 3, row = 16 * uni(tid >> 5) + (lane >> 2);
  int q_phase = 0;
  Turn turn;
  if (tid == 0 && first_item() < w.items) load_queries(q, base, w, first_item());
  for (int item = first_item(); item < w.items; item += item_step()) {
    float top[2] = {START_MAX, START_MAX}, total[2] = {0.f, 0.f};
    mbar_wait(base + Q_FULL, q_phase);
    q_phase ^= 1;
    bool is_last;
    do {
      const u32 note = base + NOTES_AT + turn.slot * NOTE;
      mbar_wait(base + FULL(turn.slot), turn.phase);
      float s[32];
      const u32 qd = uniform(mdesc(base + Q_AT, 16));
      const u32 kd = uniform(mdesc(base + KEYS_AT + turn.slot * SLOT, 16));
      wg_fence();
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const u32 step = ((i >> 2) * CHUNK + (i & 3) * 32) >> 4;
        if (i == 0) wgmma_ss<0>(s, qd, DESC_HI, kd, DESC_HI);
        else wgmma_ss<1>(s, qd + step, DESC_HI, kd + step, DESC_HI);
      }
      wg_commit();
      const uint2 mask = load_words(note + MASK_AT);
      is_last = uni(load_word(note + IS_LAST_AT));
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
          factors[h] = ex2((top[h] - most) * w.scale_log2), top[h] = most;
        const float shift = -top[h] * w.scale_log2;
        float sum = 0.f;
        const u32 to = base + WEIGHTS_AT + turn.slot * CHUNK + 128 * (row + 8 * h) + 4 * quad;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float a = ex2(fmaf(s[4 * j + 2 * h], w.scale_log2, shift));
          const float b = ex2(fmaf(s[4 * j + 2 * h + 1], w.scale_log2, shift));
          sum += a + b;
          store_word(to + ((j ^ (row & 7)) << 4), pack(a, b));
        }
        total[h] = total[h] * factors[h] + sum;
        if (quad == 0) store_float(note + 4 * (row + 8 * h), factors[h]);
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
            store_float(base + TOPS_AT + 4 * (row + 8 * h), log2_top);
            store_float(base + TOPS_AT + 4 * (HEADS + row + 8 * h), sum);
          }
#else
          const int head = item % w.groups * HEADS + row + 8 * h;
          if (w.sinks && head < w.heads) sum += ex2(w.sinks[head] * LOG2_E - log2_top);
          if (quad == 0) store_float(note + LAST_AT + 4 * (row + 8 * h), sum > 0.f ? 1.f / sum : 0.f);
#endif
        }
      }
      fence_writes();
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
  float o[2][64];
  for (int item = first_item(); item < w.items; item += item_step()) {
    bool is_first = true, is_last;
    float last0, last1;
    do {
      const u32 note = base + NOTES_AT + turn.slot * NOTE;
      mbar_wait(base + WEIGHED(turn.slot), turn.phase);
      const float a = load_float(note + 4 * row), b = load_float(note + 4 * (row + 8));
      is_last = uni(load_word(note + IS_LAST_AT));
#if CLUSTER == 1
      last0 = load_float(note + LAST_AT + 4 * row), last1 = load_float(note + LAST_AT + 4 * (row + 8));
#endif
      if (!is_first && __any_sync(~0u, a != 1.f || b != 1.f)) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int j = 0; j < 64; j += 4)
            o[half][j] *= a, o[half][j + 1] *= a, o[half][j + 2] *= b, o[half][j + 3] *= b;
      }
      const u32 pd = uniform(mdesc(base + WEIGHTS_AT + turn.slot * CHUNK, 16));
      const u32 vd = uniform(mdesc(base + KEYS_AT + turn.slot * SLOT + wg * 4 * CHUNK, CHUNK));
      pin(o[0]), pin(o[1]);
      wg_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
          wgmma_values(o[half], pd + 2 * i, vd + (half * 2 * CHUNK + i * 2048 >> 4),
                       i == 0 ? is_first : 0);
      wg_commit();
      wg_wait<0>();
      pin(o[0]), pin(o[1]);
      __syncwarp();
      if (lane == 0) mbar_arrive(base + EMPTY(turn.slot));
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
      store_pair(sums_at(base, row + 8 * h, 256 * wg + 8 * j + 2 * quad) + 8 * (quad & 1),
                 o[j >> 4][4 * (j & 15) + 2 * h], o[j >> 4][4 * (j & 15) + 2 * h + 1]);
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
      tops[r] = load_remote_float(base + TOPS_AT + 4 * row, r);
      totals[r] = load_remote_float(base + TOPS_AT + 4 * (HEADS + row), r);
      parts[r] = load_remote_floats(sums_at(base, row, column), r);
    }
    float most = START_MAX, sum = 0.f;
    if (w.sinks && head < w.heads) most = w.sinks[head] * LOG2_E, sum = 1.f;
    const float sink = most;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) most = fmaxf(most, tops[r]);
    sum *= ex2(sink - most);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float weight = ex2(tops[r] - most);
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
  let_dependents_start();
  const u32 base = aligned_base();
  const int tid = threadIdx.x, wg = uni(tid >> 7);
  if (tid == 0) {
    mbar_init(base + Q_FULL, 1);
    for (int slot = 0; slot < 2; ++slot)
      mbar_init(base + FULL(slot), 128), mbar_init(base + WEIGHED(slot), 128),
          mbar_init(base + EMPTY(slot), 8);
    fence_mbar_init();
  }
  wait_for_predecessor();
  __syncthreads();
  if (wg == 0) {
    lower_registers<PRODUCER_REGISTERS>();
    produce(w, base, tid);
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
