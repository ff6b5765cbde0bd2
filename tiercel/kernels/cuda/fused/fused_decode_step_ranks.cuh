// fused_decode_step: sums over the GPUs that share a model. Each has some columns of o and of down, so
// 32 outputs of its CTA are a part of the sum. All GPUs deal outputs out alike, so the warp that owns
// them needs those of the same warp on each other GPU and of no other: it stores its own into their
// memory, polls its own memory for theirs and adds all in the order of ranks. So all ranks have the
// same bits, and no warp waits for more than its own outputs. Nothing else crosses GPUs.
//
// Layout of a rank's memory, Args::peers: [2][HIDDEN / 32][RANKS][32] of 8 bytes: o or down, group of
// outputs, rank that wrote it, output. A word is a float and the count of layers that the CTA has
// passed in all launches so far: Args::passed, which each launch adds LAYERS to, also one that gave up.
//
// Why one buffer suffices. A warp writes what is of o once more after it has seen the other one's sums
// of down, which that one stored after it had read those of o; and so the other way round, from layer
// to layer and from launch to launch. A warp that gave up may write too early: then the other one
// waits for words that are gone until it gives up too, and both end with NaN; the next launch has
// other counts. Counts wrap around at 2^32; a word that is never written stays 0, the count of no
// layer before that.
#pragma once

#include "fused/fused_decode_step_exchange.cuh"
#include "include/peer_words.cuh"

#if RANKS > 1
#define RANK_PART 256  // bytes of a warp's outputs
DEV u32 place_of_sums(int kind, int record, int lane) {
  return ((kind == DOWN) * (HIDDEN / 32) + record) * RANKS * RANK_PART + 8 * lane;
}
DEV u32 epoch_of(u32 smem, int layer) { return load_shared<u32>(smem + Layout::EPOCH) + layer; }
// Before the first layer, by one thread: no other CTA reads this one's count.
DEV void count_layers(const Args& g, u32 smem) {
  u32* passed = g.passed + blockIdx.x;
  const u32 before = *passed;
  *passed = before + LAYERS;
  store_shared<u32>(smem + Layout::EPOCH, before + 1);
}
// To all other ranks; NaN from a CTA that gave up, whose inputs were not complete.
DEV void send_sums(const Args& g, u32 smem, int layer, int kind, int record, int lane, float own) {
  const bool lost = load_shared<u32>(smem + Layout::LOST);
  const u64 sent = word(lost ? 0x7fffffff : __float_as_uint(own), epoch_of(smem, layer));
  const u32 place = place_of_sums(kind, record, lane) + g.tp_rank * RANK_PART;
#pragma unroll
  for (int i = 1; i < RANKS; ++i)  // each rank begins with another one
    store_word(g.peers[(g.tp_rank + i) % RANKS] + place, sent);
}
// The sum over all ranks.
DEV float add_ranks(const Args& g, u32 smem, int layer, int kind, int record, int lane, float own) {
  const u32 epoch = epoch_of(smem, layer);
  const u8* from = g.peers[g.tp_rank] + place_of_sums(kind, record, lane);
  u64 v[RANKS];
  bool is_missing;
  do {
    is_missing = false;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      v[r] = word(__float_as_uint(own), epoch);
      if (r != g.tp_rank) v[r] = load_word(from + r * RANK_PART);
      is_missing |= epoch_of_word(v[r]) != epoch;
    }
  } while (__any_sync(~0u, is_missing) && !is_lost(smem));
  float sum = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) sum += __uint_as_float((u32)v[r]);
  return sum;
}
#else
DEV void count_layers(const Args&, u32) {}
DEV void send_sums(const Args&, u32, int, int, int, int, float) {}
DEV float add_ranks(const Args&, u32, int, int, int, int, float own) { return own; }
#endif
