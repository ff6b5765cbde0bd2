// fused_decode_step: arguments, sizes, shared memory and the exchange of activations between CTAs.
// fused_decode_step.cu says how they are used.
#pragma once

#include "fused/fused_decode_step_plan.cuh"
#include "fused/fused_decode_step_ptx.cuh"
#include "fused/fused_decode_step_units.cuh"
#include "include/exchange_ptx.cuh"
#include "include/hopper.cuh"

#define SLOT (GROUP_WARPS * 32 * 72)  // bytes: a unit of 32 lanes for each warp of a group
#define IN_FLIGHT_NOW 2    // copies in flight of a group while it fetches what is being computed
#define IN_FLIGHT_AHEAD 1  // ... while running ahead: longer queues delay the exchange
#define TILE_SLOTS (HEAD > 128 ? HEAD / 128 : 1)  // slots of a tile of K, and of V
// Of the clock's upper half, 2.2 s each: no step takes as long, but another GPU may be late.
#define MOST_TICKS (RANKS > 1 ? 256 : 2)
// What o and down add to the residual is known only when all CTAs, or other GPUs, have theirs.
#define FINISHES_LATER (HAS_UPDATE_NORMS || RANKS > 1)
#define START_MAX (-1e30f)  // finite, so that a warp without keys ends with sum 0, not NaN
#define HIDDEN_PARTS ((HIDDEN / 32 + CTAS - 1) / CTAS)  // most groups of 32 outputs of o of a CTA
static_assert(TOKENS == 1 || (TOKENS == 2 && RANKS == 1), "registers, and sums over GPUs");

struct Args {
  const u8* stream;
  const u64* starts;        // (CTAS, GROUPS): where each group's weights begin in `stream`
  const int* shares;        // (CTAS, 1 + GATEUP_PARTS): pairs of gate and up / 32, and which
  const float* norms;       // (NORMS LAYERS, HIDDEN): attention, mlp; of their updates
  const float* head_norms;  // (LAYERS, 2, HEAD): q, k
  const float* bias;        // (LAYERS, Q_ROWS + 2 KV_ROWS): q, k, v
  const float* rope;        // (positions, 2, HEAD / 2): cos, sin
  const float* rope_sliding;  // of sliding layers; unused without
  const float* x_in;        // (TOKENS, HIDDEN)
  float* x_out;             // (TOKENS, HIDDEN)
  uint4* exchange;          // (TOKENS, EXCHANGE_VECTORS), all 0xff
  const int* position;      // (TOKENS)
  const int* seq_len;       // of each request, with its new tokens
  const int* row;           // of each request
  const int* block_tables;  // (rows, max_blocks)
  const int* tables_sliding;
  const long long* slot;    // (TOKENS), of the new tokens; negative: keep nothing
  const long long* slot_sliding;
  int max_blocks;
  float eps, score_scale;   // scale * log2(e)
  // Of q, k, v, o, gate and up, down: lowest bits of `Type`, the next, the last; then whether it slides.
  u32 types[LAYERS];
#if TOKENS > 1
  int requests;             // 1: all tokens are neighbours of one; else each is one's
#endif
#if RANKS > 1
  int tp_rank;
  u8* peers[RANKS];         // memory of each rank: fused_decode_step_ranks.cuh
  u32* passed;              // (CTAS), layers before this launch; a CTA's own
#endif
};
struct Caches {
  TMap maps[LAYERS][2];     // K, V: (tokens, KV_HEADS, HEAD) in boxes of (TILE, 1, 64)
  u16* planes[LAYERS][2];
};

// Records of 3 vectors for 32 inputs of each kind of matrix, then rows of q, k, v as words, then
// partial attention outputs (SPLITS of 9 vectors for each 32 outputs), then sums of squares of updates
// that pass a norm, a word for each 32 outputs of o, then of down.
#define RECORD_VECTORS(columns) (3 * (columns) / 32)
#define ROWS_AT (2 * RECORD_VECTORS(HIDDEN) + RECORD_VECTORS(Q_ROWS) + RECORD_VECTORS(INNER))
#define PARTIALS_AT (ROWS_AT + (Q_ROWS + 2 * KV_ROWS) / 4)
#define PARTIAL 9
#define SQUARES_AT (PARTIALS_AT + PARTIAL * SPLITS * Q_ROWS / 32)
#define EXCHANGE_VECTORS (SQUARES_AT + (HAS_UPDATE_NORMS ? HIDDEN / 64 : 0))  // of a token
#define NORMS (HAS_UPDATE_NORMS ? 4 : 2)  // of a layer
DEV bool is_one_request(const Args& g) {
#if TOKENS > 1
  return g.requests == 1;
#else
  return true;
#endif
}
DEV int request_of(const Args& g, int token) { return is_one_request(g) ? 0 : token; }
// Keys that a token sees besides its own.
DEV int keys_before(const Args& g, int token) {
  const int behind = is_one_request(g) ? TOKENS - token : 1;
  return g.seq_len[request_of(g, token)] - behind;
}
DEV uint4* exchange_of(const Args& g, int token) {
  return TOKENS > 1 ? g.exchange + token * EXCHANGE_VECTORS : g.exchange;
}
DEV u32 squares_at(int kind) { return SQUARES_AT + (kind == DOWN ? HIDDEN / 128 : 0); }
DEV u32 records_at(int kind) {
  constexpr int O_AT = RECORD_VECTORS(HIDDEN), GATEUP_AT = O_AT + RECORD_VECTORS(Q_ROWS);
  constexpr int DOWN_AT = GATEUP_AT + RECORD_VECTORS(HIDDEN);
  return kind == QKV ? 0 : kind == O_PROJ ? O_AT : kind == GATEUP ? GATEUP_AT : DOWN_AT;
}

// Inputs of a matrix in shared memory: 8 rows of chunks of 16 codes, `pitch` bytes apart so that
// records are spread without bank conflicts, then scales, sums and squares by record. Of two tokens
// the codes of each, then the planes of `Acts` of each, then of qkv, gate and up squares of each.
DEV constexpr int pitch_of(int columns) { return (columns / 8 + 127) / 128 * 128 + 16; }
DEV constexpr int input_bytes(int columns, bool has_squares) {
  return TOKENS == 1 ? 8 * pitch_of(columns) + 3 * columns / 8
                     : TOKENS * (8 * pitch_of(columns) + (TERM_PLANES + has_squares) * PLANE);
}
constexpr int RECEIVED =  // of a thread
    (TOKENS * RECORD_VECTORS(MOST_COLUMNS) + CONSUMERS - 1) / CONSUMERS;

// Shared memory, bytes; inputs of neighbouring matrices never share a buffer. Slices of down take
// two in turn. The outputs of the warps' attention share the place of the inputs of qkv and down,
// which are not in use then. Of two tokens o has the second buffer of down where outputs leave it
// free: all warps have done with either when the first record of the other can come.
struct Sizes {
  static constexpr int HEADS_FIT = HEAD > 128 ? 512 / HEAD : TOKENS > 1 && HEAD > 64 ? 2 : 4;
  static constexpr int HEADS_AT_ONCE = HEADS < HEADS_FIT ? HEADS : HEADS_FIT;
  static constexpr int OUTPUTS_PITCH = (HEAD + 8) * 4;
  static constexpr int OUTPUTS = WARPS * HEADS_AT_ONCE * OUTPUTS_PITCH;
  static constexpr int IN_QKV = input_bytes(HIDDEN, true), IN_OUT = input_bytes(Q_ROWS, false);
  static constexpr int SLICE = input_bytes(DOWN_COLUMNS, false);
  static constexpr int IN_DOWN = (DOWN_TIMES > 1 ? 2 : 1) * SLICE;
  static constexpr bool SHARES_OUT = TOKENS > 1 && DOWN_TIMES > 1 && OUTPUTS <= IN_QKV + SLICE;
  static constexpr int SHARED =
      most(most(IN_QKV + IN_DOWN, OUTPUTS), SHARES_OUT ? IN_QKV + SLICE + IN_OUT : 0);
  static constexpr int RESULTS_QKV = QKV_ACROSS > 1 ? QKV_ACROSS * OWN_ROWS : 0;
  static constexpr int RESULTS_GATEUP = GATEUP_PARTS * GATEUP_ACROSS * 64;
  static constexpr int RESULTS_OUT = HIDDEN_PARTS * 32 * most(O_ACROSS, DOWN_ACROSS);
  static constexpr int RESULTS = 4 * most(RESULTS_QKV, most(RESULTS_GATEUP, RESULTS_OUT));
  static constexpr int QUERY_PITCH = 2 * HEAD + 16;
  // Of a token: its queries, its key and value, its angles, maxima and sums of warps, cache blocks,
  // slots.
  static constexpr int QUERIES = HEADS * QUERY_PITCH, NEW = 4 * HEAD, ROPE = (WINDOW ? 8 : 4) * HEAD;
  static constexpr int WARP_SUMS = WARPS * HEADS * 8;
  static constexpr int BLOCKS = GROUPS * (MOST_TILES + SLIDING_TILES) * 4, SLOTS = WINDOW ? 16 : 8;
};
struct Rest {  // behind the rings
  static constexpr int IN_QKV = Sizes::SHARES_OUT ? 0 : Sizes::IN_OUT;
  static constexpr int IN_DOWN = IN_QKV + Sizes::IN_QKV, WARP_OUTPUTS = IN_QKV;
  static constexpr int IN_OUT = Sizes::SHARES_OUT ? IN_DOWN + Sizes::SLICE : 0;
  static constexpr int QUERY = IN_QKV + Sizes::SHARED;
  static constexpr int NEW_K = QUERY + TOKENS * Sizes::QUERIES, NEW_V = NEW_K + 2 * HEAD;
  static constexpr int ROPE = NEW_K + TOKENS * Sizes::NEW;
  static constexpr int HEAD_NORMS = ROPE + TOKENS * Sizes::ROPE;
  static constexpr int WARP_SUMS = HEAD_NORMS + 8 * HEAD;
  static constexpr int BLOCKS = WARP_SUMS + TOKENS * Sizes::WARP_SUMS;
  static constexpr int SCRATCH = (BLOCKS + TOKENS * Sizes::BLOCKS + 15) & ~15;
  static constexpr int RESULTS = SCRATCH + TOKENS * 128;
  static constexpr int NEW_SLOT = RESULTS + TOKENS * Sizes::RESULTS;
  static constexpr int COMPUTING = NEW_SLOT + TOKENS * Sizes::SLOTS, LOST = COMPUTING + 4;
  static constexpr int START = LOST + 4;
  static constexpr int NUM_KEYS = START + 4, SHARES = NUM_KEYS + 4 * TOKENS;
  static constexpr int EPOCH = SHARES + 4 * (1 + GATEUP_PARTS);
  static constexpr int BARS = (EPOCH + (RANKS > 1 ? 4 : 0) + 7) & ~7;
};
constexpr int SMEM_BYTES = 232448;  // of an SM, for a CTA
constexpr int RINGS = (SMEM_BYTES - Rest::BARS) / (GROUPS * (SLOT + 16));
#define RING (RINGS < 5 ? RINGS : 5)  // slots of a group; 4 cost 3%, 3 cost 10%
static_assert(RING >= 3, "shared memory of an SM");
struct Layout {
  static constexpr int AT = GROUPS * RING * SLOT;
  static constexpr int IN_OUT = AT + Rest::IN_OUT, IN_QKV = AT + Rest::IN_QKV;
  static constexpr int IN_DOWN = AT + Rest::IN_DOWN, WARP_OUTPUTS = AT + Rest::WARP_OUTPUTS;
  static constexpr int QUERY = AT + Rest::QUERY, NEW_K = AT + Rest::NEW_K;
  static constexpr int NEW_V = AT + Rest::NEW_V, ROPE = AT + Rest::ROPE;
  static constexpr int HEAD_NORMS = AT + Rest::HEAD_NORMS, WARP_SUMS = AT + Rest::WARP_SUMS;
  static constexpr int BLOCKS = AT + Rest::BLOCKS, SCRATCH = AT + Rest::SCRATCH;
  static constexpr int RESULTS = AT + Rest::RESULTS, NEW_SLOT = AT + Rest::NEW_SLOT;
  static constexpr int COMPUTING = AT + Rest::COMPUTING, LOST = AT + Rest::LOST;
  static constexpr int START = AT + Rest::START, NUM_KEYS = AT + Rest::NUM_KEYS;
  static constexpr int SHARES = AT + Rest::SHARES, EPOCH = AT + Rest::EPOCH;
  static constexpr int BARS = AT + Rest::BARS;
};

// ---- exchange
// In shared memory. Of two tokens `scales` are planes of `Acts`, and o and down have no squares.
struct Input { u32 act, pitch, scales, sums, squares; };
DEV Input input_of(u32 smem, int kind, int slice) {
  const int columns = kind == DOWN ? DOWN_COLUMNS : kind == O_PROJ ? Q_ROWS : HIDDEN;
  const u32 act = smem + (kind == DOWN     ? Layout::IN_DOWN + (slice & 1) * Sizes::SLICE
                          : kind == O_PROJ ? Layout::IN_OUT
                                           : Layout::IN_QKV);
  const u32 pitch = kind == DOWN     ? pitch_of(DOWN_COLUMNS)
                    : kind == O_PROJ ? pitch_of(Q_ROWS)
                                     : pitch_of(HIDDEN);
#if TOKENS > 1
  const u32 planes = act + TOKENS * 8 * pitch;
  const bool has_squares = kind == QKV || kind == GATEUP;
  return {act, pitch, planes, 0, has_squares ? planes + TOKENS * TERM_PLANES * PLANE : 0};
#endif
  const u32 scales = act + 8 * pitch, sums = scales + columns / 8;
  return {act, pitch, scales, sums, sums + columns / 8};
}
DEV u32 squares_of(u32 squares, int token) { return squares + (TOKENS > 1 ? token * PLANE : 0); }
DEV u32 results_of(u32 smem, int token) { return smem + Layout::RESULTS + token * Sizes::RESULTS; }
// Whether a step takes so long that it will not end by waiting: then this CTA waits no more. Called
// after polls without success. The upper half of the clock counts 2.2 s at 1.98 GHz.
DEV bool is_lost(u32 smem) {
  if (clock_high() - load_shared<u32>(smem + Layout::START) < MOST_TICKS) return false;
  store_shared<u32>(smem + Layout::LOST, 1);
  return true;
}
// Of the warps of a group the first ones each make records of a token.
DEV bool makes_records(int warp) {
  return TOKENS == 1 ? warp % GROUP_WARPS == 0 : warp % GROUP_WARPS < TOKENS;
}
DEV int token_of(int warp) { return TOKENS == 1 ? 0 : warp % GROUP_WARPS; }
DEV u32 scratch_of(u32 smem, int warp) {
  const u32 own = TOKENS == 1 ? 8 * warp : 32 * (warp / GROUP_WARPS) + 128 * (warp % GROUP_WARPS);
  return smem + Layout::SCRATCH + own;
}
// One warp turns 32 values into a record. v0 = codes 0-11 | sum of squares; v1 = codes 12-23 | sums
// of 16; v2 = codes 24-31, scale | nothing; each | tag. Of two tokens v2 has the sums: who spreads it
// makes terms of scale and sums.
constexpr int SUMS_VECTOR = TOKENS == 1 ? 1 : 2;
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
    v.x = load_shared<u32>(scratch + 12 * lane), v.y = load_shared<u32>(scratch + 12 * lane + 4);
    v.z = lane < 2 ? load_shared<u32>(scratch + 12 * lane + 8)
                   : __float_as_uint(amax * (1.f / 127.f));
    v.w = tag | (lane == 0   ? __float_as_uint(squares) & ~3u
                 : lane == SUMS_VECTOR ? ((u32)(lo & 0x1fff) | (u32)(hi & 0x1fff) << 13) << 2
                             : 0);
    store_relaxed(record + lane, v);
  }
}
// The scale of a record, and of two tokens what `Acts` needs of scale and sums.
DEV void spread_scale(const Input& to, u32 token, u32 group, u32 scale, u32 sums) {
#if TOKENS == 1
  store_shared<u32>(to.scales + 4 * group, scale);
#else
  const float d = __uint_as_float(scale);
  const u32 planes = to.scales + token * TERM_PLANES * PLANE, lane = 16 * (group >> 2);
  const u32 terms = planes + (group >> 1 & 1) * PLANE + lane + 4 * (group & 1);
  store_shared<float>(terms, group & 1 ? d * 0.0625f : d);
  store_shared<float>(terms + 8, d * (float)(sum16(sums, 0) + sum16(sums, 1)));
  store_shared<u32>(planes + 2 * PLANE + 4 * group, sums);
#endif
}
// Vector `k` of thread `own` of those of all tokens, each of which has `vectors` from `records` on.
DEV const uint4* vector_of(const uint4* exchange, u32 records, u32 vectors, u32 own, int k) {
  const u32 token = TOKENS > 1 && own + CONSUMERS * k >= vectors;
  const u32 behind = TOKENS > 1 ? token * (EXCHANGE_VECTORS - vectors) : 0;
  return exchange + (records + own + CONSUMERS * k + behind);
}
// Whether a thread keeps what a look at its first vector found while it still computes: of two tokens
// that would be spilled.
constexpr bool LOOKS_AHEAD = TOKENS == 1;
// Waits for `vectors` vectors of records of each token, at most RECEIVED a thread, and spreads them
// over shared memory: codes[chunk][lane], scale, sums, squares by record. first: what a look at this
// thread's first one found there.
DEV void receive(uint4 first, const uint4* exchange, u32 records, u32 vectors, u32 tag,
                 const Input& to, u32 smem) {
  const u32 own = unknown(threadIdx.x);
  const u32 all = TOKENS * vectors;
  uint4 v[RECEIVED];
  if (LOOKS_AHEAD) v[0] = first;
#pragma unroll
  for (int k = LOOKS_AHEAD; k < RECEIVED; ++k) {
    if (TOKENS > 1) v[k] = {};
    if (own + CONSUMERS * k < all)
      v[k] = load_relaxed(vector_of(exchange, records, vectors, own, k));
  }
  while (true) {
    bool is_missing = false;
#pragma unroll
    for (int k = 0; k < RECEIVED; ++k)
      is_missing |= own + CONSUMERS * k < all && (v[k].w & 3) != tag;
    if (!is_missing || is_lost(smem)) break;
#pragma unroll
    for (int k = 0; k < RECEIVED; ++k)
      if (own + CONSUMERS * k < all)
        v[k] = load_relaxed(vector_of(exchange, records, vectors, own, k));
  }
#pragma unroll
  for (int k = 0; k < RECEIVED; ++k) {
    const u32 token = TOKENS > 1 && own + CONSUMERS * k >= vectors;
    const u32 at = own + CONSUMERS * k - (TOKENS > 1 ? token * vectors : 0);
    const u32 group = at / 3, part = at - 3 * group;
    if (own + CONSUMERS * k >= all) return;
    const u32 codes = to.act + (TOKENS > 1 ? token * 8 * to.pitch : 0);
    const u32 row = codes + (group & 3) * 2 * to.pitch + (group >> 2) * 16;
    if (part == 0) {
      store_shared<u32>(row, v[k].x), store_shared<u32>(row + 4, v[k].y),
          store_shared<u32>(row + 8, v[k].z);
      if (TOKENS == 1 || to.squares)
        store_shared<u32>(to.squares + (TOKENS > 1 ? token * PLANE : 0) + 4 * group, v[k].w & ~3u);
    } else if (part == 1) {
      store_shared<u32>(row + 12, v[k].x), store_shared<u32>(row + to.pitch, v[k].y);
      store_shared<u32>(row + to.pitch + 4, v[k].z);
      if (TOKENS == 1) store_shared<u32>(to.sums + 4 * group, v[k].w >> 2);
    } else {
      store_shared<u32>(row + to.pitch + 8, v[k].x), store_shared<u32>(row + to.pitch + 12, v[k].y);
      spread_scale(to, token, group, v[k].z, v[k].w >> 2);
    }
  }
}
// 1 / rms of the input, from the sums of squares of all records in a fixed order.
DEV float make_rms(u32 squares, float eps, int lane) {
  float t = 0;
#pragma unroll
  for (int at = 0; at < HIDDEN / 128; at += 32) {
    const bool is_there = at + 32 <= HIDDEN / 128 || at + lane < HIDDEN / 128;
    const uint4 s = load_shared<uint4>(squares + 16 * (is_there ? at + lane : 0));
    const float sum = __uint_as_float(s.x) + __uint_as_float(s.y) + __uint_as_float(s.z) +
                      __uint_as_float(s.w);
    t += is_there ? sum : 0;
  }
  for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
  return rsqrtf(t * (1.f / HIDDEN) + eps);
}
