// fused_decode_step: all layers of a dense decoder for one or two new tokens, in one launch. Layouts:
// `Args` and `Layout` of fused_decode_step_exchange.cuh. Why each part is as it is:
// docs/notes/fused_decode_step.md. Host side: ops/fused_decode_step.py.
//
// Split: 128 CTAs x 16 consumer warps. The same rows of q, k and v for each CTA; groups of 32 outputs
// of o and down, and of 32 pairs of (gate, up), as Geometry deals them: what one CTA gives to the next
// matrix is whole activation groups of 32. Which warp takes what: fused_decode_step_plan.cuh.
// Attention: CTA c attends for group c / SPLITS of query heads, over every SPLITS-th tile of 32 keys
// (more than 8 query heads of a key/value head are several groups, which read its keys each for
// itself); CTA c merges outputs 32 c and on, and each 4096 further.
//
// Stream: a group is 4 warps with a ring of their own, filled by a producer thread in the order of
// use: weights of a slot (a unit for each of the 4 warps) are end to end in memory for the whole
// step, so the producer only counts; tiles of K and V come through the same ring by TMA. It
// never waits for activations, only for a free slot and for its copies in flight to fall below a
// limit.
//
// Exchange: vectors of 16 bytes that validate themselves. The two lowest bits of the last word are
// the layer number mod 4; readers poll the data itself. Before a launch all are filled with 0xff. A
// buffer is written again one layer later, after every CTA has passed exchanges that need all CTAs.
// Waiting is bounded: after MOST_TICKS a CTA waits no more in this step, and its results become
// NaN. So a step ends even if CTAs do not run side by side.
// Several GPUs that share a model: fused_decode_step_ranks.cuh.
//
// Two tokens (TOKENS) of one request or of two: a unit of weights is decoded once and multiplied by
// both, all else is done for each, in the order in which it is done for one token. So each has the
// bits that it has alone.
//
// Macros: TOKENS, LAYERS, HIDDEN, INNER, HAS_QK_NORM, HAS_BIAS, HAS_UPDATE_NORMS, IS_GELU (else SiLU),
// TYPES (a bit each that a matrix has), CTAS, GROUPS of GROUP_WARPS warps,
// HEAD (its width), KV_HEADS, SHARERS (groups of query heads of a key/value head), HEADS (query heads
// of such a group), SPLITS (its CTAs), TILE (keys of a tile, 8 for each warp of a group), PAGE (tokens
// of a cache block), MOST_TILES (of a group), WINDOW (tokens that sliding layers see; 0 without such
// layers), SLIDING_TILES (MOST_TILES of those), GATEUP_PARTS (most groups of 32 pairs of a CTA), RANKS
// (GPUs that share the model; heads and INNER are one's), and plans of fused_decode_step_plan.cuh.
#include "fused/fused_decode_step_attention.cuh"
#include "fused/fused_decode_step_exchange.cuh"
#include "fused/fused_decode_step_products.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fused_decode_step(const __grid_constant__ Args g, const __grid_constant__ Caches caches) {
  ALIGNED_MEMORY(memory);
  const int tid = threadIdx.x, lane = tid & 31, cta = blockIdx.x;
  const int warp = __shfl_sync(~0u, tid >> 5, 0);
  const int group = warp < WARPS ? warp / GROUP_WARPS : warp - WARPS;
  const u32 smem = shared_address(memory), bars = smem + Layout::BARS + 16 * group * RING;
  const Ring ring = {smem + group * RING * SLOT, bars, bars + 8 * RING};
  volatile int* computing = reinterpret_cast<volatile int*>(memory + Layout::COMPUTING);
  if (tid == 0) {
    const u32 now = clock_high();
    *computing = 0;
    store_shared<u32>(smem + Layout::LOST, 0), store_shared<u32>(smem + Layout::START, now);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int i = 0; i < (WINDOW ? 2 : 1); ++i) {
        const u64 slot = i ? g.slot_sliding[t] : g.slot[t];
        const u32 to = smem + Layout::NEW_SLOT + t * Sizes::SLOTS + 8 * i;
        store_shared<u32>(to, (u32)slot);
        store_shared<u32>(to + 4, (u32)(slot >> 32));
      }
      store_shared<u32>(smem + Layout::NUM_KEYS + 4 * t, keys_before(g, t));
    }
    count_layers(g, smem);
  }
  if (tid < HEAD) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const long long at = (long long)g.position[t] * HEAD + tid;
      const u32 to = smem + Layout::ROPE + t * Sizes::ROPE + 4 * tid;
      store_shared<u32>(to, __float_as_uint(g.rope[at]));
      if (WINDOW) store_shared<u32>(to + 4 * HEAD, __float_as_uint(g.rope_sliding[at]));
    }
  }
  if (tid <= GATEUP_PARTS)
    store_shared<u32>(smem + Layout::SHARES + 4 * tid, g.shares[(1 + GATEUP_PARTS) * cta + tid]);
  if (tid < 64) load_head_norms(g, smem, 0, tid);
  __syncthreads();
  if (warp >= WARPS) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int i = 0; i < (WINDOW ? 2 : 1); ++i) {
        const Ends ends = make_ends(smem, i, t);
        int* blocks = blocks_of(memory, group, i, t);
        const int* table = (i ? g.tables_sliding : g.block_tables) +
                           (long long)g.row[request_of(g, t)] * g.max_blocks;
        const int tiles = ends.attends() ? tiles_of(ends, group) : 0;
        for (int it = lane; it < tiles; it += 32)
          blocks[it] = table[tile_of(ends, group, it) * TILE / PAGE];
      }
    }
    if (lane < RING) {
      mbar_init(ring.full + 8 * lane, 1), mbar_init(ring.empty + 8 * lane, GROUP_WARPS);
      mbar_fence();
    }
  }
  __syncthreads();
  if (warp >= WARPS) {
    drop_registers();
    const int gateup_parts = load_shared<u32>(smem + Layout::SHARES);
    if (lane == 0) produce(g, caches, memory, smem, ring, group, gateup_parts, computing);
    return;
  }
  take_registers();
  Taker taker = {ring, 0, 0};
  // The first warp of group i, lane l: element l of this CTA's part i of the residual stream, in a
  // register for the whole step; the second warp that of the second token.
  float residual = 0;
  const int part = cta + CTAS * (warp / GROUP_WARPS);
  if (makes_records(warp) && part < HIDDEN / 32) {
    residual = g.x_in[token_of(warp) * HIDDEN + 32 * part + lane];
    publish(exchange_of(g, token_of(warp)) + records_at(QKV) + 3 * part, scratch_of(smem, warp),
            residual, g.norms[32 * part + lane], true, 0, lane);
  }
  const int gateup_parts = load_shared<u32>(smem + Layout::SHARES);
  uint4 ahead = {};
#pragma unroll 1
  for (int phase = 0; phase < 4 * LAYERS; ++phase) {
    const int layer = phase >> 2, kind = phase & 3;
    const int own = lane_id();
    float norm = 0;  // weight of the norm that follows, fetched long before it is needed
    if (!FINISHES_LATER && makes_records(warp) &&
        (kind == O_PROJ || (kind == DOWN && layer < LAYERS - 1))) {
      const u32 at = 32 * (blockIdx.x + CTAS * (warp / GROUP_WARPS)) + own;
      if (at < HIDDEN)
        norm = __ldg(g.norms + (2 * layer + (kind == O_PROJ ? 1 : 2)) * HIDDEN + at);
    }
    auto multiply_by = [&](int of) {
      multiply(g, taker, smem, layer, of, gateup_parts, warp, own, residual, norm, ahead);
    };
    if (WHOLE)  // else constants of each kind are worth code of its own
      multiply_by(kind);
    else if (kind == QKV)
      multiply_by(QKV);
    else if (kind == O_PROJ)
      multiply_by(O_PROJ);
    else if (kind == GATEUP)
      multiply_by(GATEUP);
    else
      multiply_by(DOWN);
    if (FINISHES_LATER && (kind == O_PROJ || kind == DOWN))
      finish_update(g, unknown(smem), layer, unknown(kind), unknown(warp), unknown(own), residual);
    if (kind != QKV) continue;
    attention(g, caches, unknown(smem), layer, unknown(warp), unknown(own), taker);
  }
}
