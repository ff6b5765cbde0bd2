// fused_decode_step: arguments, sizes, shared memory and the exchange of activations between CTAs.
// fused_decode_step.cu says how they are used.
#pragma once

#include "fused/fused_decode_step_ptx.cuh"
#include "fused/fused_decode_step_units.cuh"
#include "include/exchange_ptx.cuh"
#include "include/hopper.cuh"

#define WARPS (GROUPS * GROUP_WARPS)
#define CONSUMERS (32 * WARPS)
#define THREADS (CONSUMERS + 32 * GROUPS)  // one producer warp a group
#define UNIT 2304
#define SLOT (GROUP_WARPS * UNIT)
#define PAIR_C 2112
#define SLOT_C (GROUP_WARPS * PAIR_C)
#define RING 5             // slots of a group; 4 cost 3%, 3 cost 10%
#define IN_FLIGHT_NOW 2    // copies in flight of a group while it fetches what is being computed
#define IN_FLIGHT_AHEAD 1  // ... while running ahead: longer queues delay the exchange
#define MOST_TICKS 2       // of the clock's upper half, 2.2 s each; no step takes as long
#define START_MAX (-1e30f)  // finite, so that a warp without keys ends with sum 0, not NaN

enum Kind { QKV, O_PROJ, GATEUP, DOWN };

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
// warps' attention share the place of the inputs of qkv and down, which are not in use then.
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
                  (kind == DOWN     ? Layout::IN_DOWN
                   : kind == O_PROJ ? Layout::IN_OUT
                                    : Layout::IN_QKV);
  const u32 scales = act + 8 * ACT_PITCH, sums = scales + 512;
  return {act, scales, sums, sums + 512};
}
// Whether a step takes so long that it will not end by waiting: then this CTA waits no more. Called
// after polls without success. The upper half of the clock counts 2.2 s at 1.98 GHz.
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
