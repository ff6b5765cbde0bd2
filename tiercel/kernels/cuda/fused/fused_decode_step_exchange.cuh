// fused_decode_step: arguments, sizes, shared memory and the exchange of activations between CTAs.
// fused_decode_step.cu says how they are used.
#pragma once

#include "fused/fused_decode_step_plan.cuh"
#include "fused/fused_decode_step_ptx.cuh"
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

struct Args {
  const u8* stream;
  const u64* starts;        // (CTAS, GROUPS): where each group's weights begin in `stream`
  const int* shares;        // (CTAS, 1 + GATEUP_PARTS): pairs of gate and up / 32, and which
  const float* norms;       // (NORMS LAYERS, HIDDEN): attention, mlp; of their updates
  const float* head_norms;  // (LAYERS, 2, HEAD): q, k
  const float* bias;        // (LAYERS, Q_ROWS + 2 KV_ROWS): q, k, v
  const float* rope;        // (positions, 2, HEAD / 2): cos, sin
  const float* rope_sliding;  // of sliding layers; unused without
  const float* x_in;        // (HIDDEN)
  float* x_out;             // (HIDDEN)
  uint4* exchange;          // EXCHANGE_VECTORS, all 0xff
  const int* position;
  const int* seq_len;       // with the new token
  const int* row;
  const int* block_tables;  // (rows, max_blocks)
  const int* tables_sliding;
  const long long* slot;    // of the new token; negative: keep nothing
  const long long* slot_sliding;
  int max_blocks;
  float eps, score_scale;   // scale * log2(e)
  // Of q, k, v, o, gate and up, down: lowest bits of `Type`, the next, the last; then whether it slides.
  u32 types[LAYERS];
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
#define NORMS (HAS_UPDATE_NORMS ? 4 : 2)  // of a layer
DEV u32 squares_at(int kind) { return SQUARES_AT + (kind == DOWN ? HIDDEN / 128 : 0); }
DEV u32 records_at(int kind) {
  constexpr int O_AT = RECORD_VECTORS(HIDDEN), GATEUP_AT = O_AT + RECORD_VECTORS(Q_ROWS);
  constexpr int DOWN_AT = GATEUP_AT + RECORD_VECTORS(HIDDEN);
  return kind == QKV ? 0 : kind == O_PROJ ? O_AT : kind == GATEUP ? GATEUP_AT : DOWN_AT;
}

// Inputs of a matrix in shared memory: 8 rows of chunks of 16 codes, `pitch` bytes apart so that
// records are spread without bank conflicts, then scales, sums and squares by record.
DEV constexpr int pitch_of(int columns) { return (columns / 8 + 127) / 128 * 128 + 16; }
DEV constexpr int input_bytes(int columns) { return 8 * pitch_of(columns) + 3 * columns / 8; }
constexpr int DOWN_COLUMNS =
    128 * PLAN_DOWN.lanes * (PLAN_DOWN.least + (PLAN_DOWN.extra > 0)) * PLAN_DOWN.across;
DEV constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int MOST_COLUMNS = most(most(HIDDEN, Q_ROWS), most(DOWN_COLUMNS, 128));
constexpr int RECEIVED = (RECORD_VECTORS(MOST_COLUMNS) + CONSUMERS - 1) / CONSUMERS;  // of a thread

// Shared memory, bytes; inputs of neighbouring matrices never share a buffer. Slices of down take
// two in turn. The outputs of the warps' attention share the place of the inputs of qkv and down,
// which are not in use then.
struct Sizes {
  static constexpr int HEADS_FIT = HEAD > 128 ? 512 / HEAD : 4;
  static constexpr int HEADS_AT_ONCE = HEADS < HEADS_FIT ? HEADS : HEADS_FIT;
  static constexpr int OUTPUTS_PITCH = (HEAD + 8) * 4;
  static constexpr int OUTPUTS = WARPS * HEADS_AT_ONCE * OUTPUTS_PITCH;
  static constexpr int IN_DOWN = (DOWN_TIMES > 1 ? 2 : 1) * input_bytes(DOWN_COLUMNS);
  static constexpr int SHARED = most(input_bytes(HIDDEN) + IN_DOWN, OUTPUTS);
  static constexpr int RESULTS_QKV = QKV_ACROSS > 1 ? QKV_ACROSS * OWN_ROWS : 0;
  static constexpr int RESULTS_GATEUP = GATEUP_PARTS * GATEUP_ACROSS * 64;
  static constexpr int RESULTS_OUT = HIDDEN_PARTS * 32 * most(O_ACROSS, DOWN_ACROSS);
  static constexpr int RESULTS = 4 * most(RESULTS_QKV, most(RESULTS_GATEUP, RESULTS_OUT));
  static constexpr int QUERY_PITCH = 2 * HEAD + 16;
};
struct Rest {  // behind the rings
  static constexpr int IN_OUT = 0, IN_QKV = IN_OUT + input_bytes(Q_ROWS);
  static constexpr int IN_DOWN = IN_QKV + input_bytes(HIDDEN), WARP_OUTPUTS = IN_QKV;
  static constexpr int QUERY = IN_QKV + Sizes::SHARED;
  static constexpr int NEW_K = QUERY + HEADS * Sizes::QUERY_PITCH, NEW_V = NEW_K + 2 * HEAD;
  static constexpr int ROPE = NEW_V + 2 * HEAD;
  static constexpr int HEAD_NORMS = ROPE + (WINDOW ? 8 : 4) * HEAD;
  static constexpr int WARP_SUMS = HEAD_NORMS + 8 * HEAD;
  static constexpr int BLOCKS = WARP_SUMS + WARPS * HEADS * 8;
  static constexpr int SCRATCH = (BLOCKS + GROUPS * (MOST_TILES + SLIDING_TILES) * 4 + 15) & ~15;
  static constexpr int RESULTS = SCRATCH + 128;
  static constexpr int NEW_SLOT = RESULTS + Sizes::RESULTS;
  static constexpr int COMPUTING = NEW_SLOT + (WINDOW ? 16 : 8), LOST = COMPUTING + 4, START = LOST + 4;
  static constexpr int NUM_KEYS = START + 4, SHARES = NUM_KEYS + 4;
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
struct Input { u32 act, pitch, scales, sums, squares; };  // in shared memory
DEV Input input_of(u32 smem, int kind, int slice) {
  const int columns = kind == DOWN ? DOWN_COLUMNS : kind == O_PROJ ? Q_ROWS : HIDDEN;
  const u32 act = smem + (kind == DOWN     ? Layout::IN_DOWN + (slice & 1) * input_bytes(DOWN_COLUMNS)
                          : kind == O_PROJ ? Layout::IN_OUT
                                           : Layout::IN_QKV);
  const u32 pitch = kind == DOWN     ? pitch_of(DOWN_COLUMNS)
                    : kind == O_PROJ ? pitch_of(Q_ROWS)
                                     : pitch_of(HIDDEN);
  const u32 scales = act + 8 * pitch, sums = scales + columns / 8;
  return {act, pitch, scales, sums, sums + columns / 8};
}
// Whether a step takes so long that it will not end by waiting: then this CTA waits no more. Called
// after polls without success. The upper half of the clock counts 2.2 s at 1.98 GHz.
DEV bool is_lost(u32 smem) {
  if (clock_high() - load_shared<u32>(smem + Layout::START) < MOST_TICKS) return false;
  store_shared<u32>(smem + Layout::LOST, 1);
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
    v.x = load_shared<u32>(scratch + 12 * lane), v.y = load_shared<u32>(scratch + 12 * lane + 4);
    v.z = lane < 2 ? load_shared<u32>(scratch + 12 * lane + 8)
                   : __float_as_uint(amax * (1.f / 127.f));
    v.w = tag | (lane == 0   ? __float_as_uint(squares) & ~3u
                 : lane == 1 ? ((u32)(lo & 0x1fff) | (u32)(hi & 0x1fff) << 13) << 2
                             : 0);
    store_relaxed(record + lane, v);
  }
}
// Waits for `vectors` vectors of records, at most RECEIVED a thread, and spreads them over shared
// memory: codes[chunk][lane], scale, sums, squares by record. first: what a look at this thread's
// first one found there.
DEV void receive(uint4 first, const uint4* exchange, u32 records, u32 vectors, u32 tag,
                 const Input& to, u32 smem) {
  const u32 own = unknown(threadIdx.x);
  uint4 v[RECEIVED];
  v[0] = first;
#pragma unroll
  for (int k = 1; k < RECEIVED; ++k)
    if (own + CONSUMERS * k < vectors) v[k] = load_relaxed(exchange + (records + own + CONSUMERS * k));
  while (true) {
    bool is_missing = false;
#pragma unroll
    for (int k = 0; k < RECEIVED; ++k)
      is_missing |= own + CONSUMERS * k < vectors && (v[k].w & 3) != tag;
    if (!is_missing || is_lost(smem)) break;
#pragma unroll
    for (int k = 0; k < RECEIVED; ++k)
      if (own + CONSUMERS * k < vectors) v[k] = load_relaxed(exchange + (records + own + CONSUMERS * k));
  }
#pragma unroll
  for (int k = 0; k < RECEIVED; ++k) {
    const u32 at = own + CONSUMERS * k, group = at / 3, part = at - 3 * group;
    if (at >= vectors) return;
    const u32 row = to.act + (group & 3) * 2 * to.pitch + (group >> 2) * 16;
    if (part == 0) {
      store_shared<u32>(row, v[k].x), store_shared<u32>(row + 4, v[k].y),
          store_shared<u32>(row + 8, v[k].z);
      store_shared<u32>(to.squares + 4 * group, v[k].w & ~3u);
    } else if (part == 1) {
      store_shared<u32>(row + 12, v[k].x), store_shared<u32>(row + to.pitch, v[k].y);
      store_shared<u32>(row + to.pitch + 4, v[k].z), store_shared<u32>(to.sums + 4 * group, v[k].w >> 2);
    } else {
      store_shared<u32>(row + to.pitch + 8, v[k].x), store_shared<u32>(row + to.pitch + 12, v[k].y);
      store_shared<u32>(to.scales + 4 * group, v[k].z);
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
