// fused_layer_tail: sums over the GPUs that share a model. Each has some columns of o and of down, so
// what it adds to the residual is a part. All GPUs deal rows out alike, so a warp that adds up needs
// the sums of the same warp on each other GPU and of no other: it stores its own into their memory,
// polls its own memory for theirs and adds all in the order of ranks. So all ranks have the same
// bits, and no warp waits for more than its own rows.
//
// Layout of a rank's memory, Args::peers: [2][GROUPS_X][2][RANKS][4][32] of 16 bytes: o or down,
// group of rows, 8 tokens, rank that wrote it, piece, lane. Two floats with the epoch are a piece.
//
// Why one buffer suffices. A warp writes what is of o once more after it has seen the other one's
// sums of down, which that one stored after it had read those of o; and so the other way round.
// Words of tokens beyond m are neither stored nor read; they keep an older epoch, equal to that of
// a launch after 2^32 of them at the earliest.
#pragma once

#include "fused/fused_layer_tail_products.cuh"
#include "include/peer_words.cuh"

#define RANK_PART 2048  // bytes of a warp's sums

#if RANKS > 1
// Sums of two tiles over all ranks, in place.
DEV void add_ranks(const Args& g, u8* memory, float (&first)[4], float (&second)[4], int kind,
                   int group, int nt, u32 epoch, int lane) {
  const bool is_used = 8 * nt + 2 * (lane & 3) < g.m;
  const i64 place = (i64)((kind * GROUPS_X + group) * 2 + nt) * RANKS * RANK_PART + 16 * lane;
  float own[8], sum[8] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = first[i], own[4 + i] = second[i];
#pragma unroll
  for (int i = 1; i < RANKS; ++i) {  // each rank begins with another one
    u8* to = g.peers[(g.tp_rank + i) % RANKS] + place + g.tp_rank * RANK_PART;
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if (is_used)
        store_words(to + 512 * p, words(__float_as_uint(own[2 * p]),
                                        __float_as_uint(own[2 * p + 1]), epoch));
  }
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    Words v[4];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        v[p] = words(__float_as_uint(own[2 * p]), __float_as_uint(own[2 * p + 1]), epoch);
        if (is_used && r != g.tp_rank)
          v[p] = load_words(g.peers[g.tp_rank] + place + r * RANK_PART + 512 * p);
        there &= has_epoch(v[p], epoch);
      }
    } while (!__all_sync(~0u, there) && !is_lost(memory));
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      sum[2 * p] += __uint_as_float((u32)v[p].first);
      sum[2 * p + 1] += __uint_as_float((u32)v[p].second);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] = sum[i], second[i] = sum[4 + i];
}
#endif
