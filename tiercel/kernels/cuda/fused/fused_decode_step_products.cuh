// fused_decode_step: the stream of weights, keys and values, and the products of one matrix.
#pragma once

#include "fused/fused_decode_step_exchange.cuh"
#include "fused/fused_decode_step_units.cuh"

// ---- the stream
DEV int pairs_of(int kind, int group) {  // of a warp; those of QKV: q, then k (group 0) or v (1)
  return kind == QKV      ? (group < 2 ? 2 : 1)
         : kind == O_PROJ ? 1
         : kind == GATEUP ? 2 * SLICES
                          : SLICES;
}
DEV bool is_q6(int six, int kind, int group, int it) {
  return (six >> (kind == QKV ? (it ? 1 + group : 0) : kind + 2)) & 1;
}
// Attention is a phase of its own after QKV.
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
  const int group = warp / GROUP_WARPS, pairs = pairs_of(kind, group);
  const int step = kind == DOWN ? 1 : pairs;
  const int six = g.six[layer];
  const bool adds = kind == O_PROJ || kind == DOWN;
  const u32 data = taker.ring.data, mine = (warp % GROUP_WARPS) * UNIT, tag = layer & 3;
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
        const u32 c = data + s2 * SLOT + (warp % GROUP_WARPS) * PAIR_C;
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
      if (warp != GROUP_WARPS * part) {
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
