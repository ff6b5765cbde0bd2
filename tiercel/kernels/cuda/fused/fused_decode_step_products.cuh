// fused_decode_step: the stream of weights, keys and values, and the products of one matrix.
#pragma once

#include "fused/fused_decode_step_exchange.cuh"
#include "fused/fused_decode_step_ranks.cuh"
#include "fused/fused_decode_step_tokens.cuh"

// ---- the stream
// A CTA's parts of a matrix: q, k and v; groups of 32 outputs of o and down; of 32 pairs.
DEV int parts_of(int kind, int gateup_parts) {
  if (kind == QKV) return 3;
  const int groups = HIDDEN / 32 - (int)blockIdx.x;
  return kind == GATEUP ? gateup_parts : HIDDEN / 32 % CTAS == 0 ? HIDDEN_PARTS
                                                                 : (groups + CTAS - 1) / CTAS;
}
DEV int type_of(int types, int kind, int part) {
  const int bits = types >> (kind == QKV ? part : kind + 2);
  // What the compiler knows of a model's types leaves out the code of others.
  constexpr int LOWEST = HAS(Q6_K) || HAS(Q4_0) || HAS(IQ4_XS) || HAS(IQ4_NL);
  constexpr int MIDDLE = HAS(Q5_K) || HAS(Q4_0) || HAS(Q5_0) || HAS(IQ4_NL);
  constexpr int HIGHEST = HAS(Q8_0) || HAS(IQ4_XS) || HAS(Q5_0) || HAS(IQ4_NL);
  return (bits & LOWEST) | (MIDDLE ? bits >> 5 & 2 : 0) | (HIGHEST ? bits >> 10 & 4 : 0);
}
// Attention is a phase of its own after QKV.
DEV int phase_of(int layer, int kind) { return 5 * layer + kind + (kind > QKV); }
struct Ring { u32 data, full, empty; };  // of one group
// Whether a layer sees the last WINDOW tokens alone.
DEV bool slides(const Args& g, int layer) { return WINDOW && g.types[layer] >> 18 & 1; }
struct Ends {  // of this CTA's attention; head: HEADS query heads that share a key/value head
  int split, head, num_keys, first_key;
  bool slides;
  int token;
  DEV bool attends() const {
    return KV_HEADS * SHARERS * SPLITS == CTAS || head < KV_HEADS * SHARERS;
  }
  DEV int kv_head() const { return head / SHARERS; }
};
DEV Ends make_ends(u32 smem, bool slides, int token) {
  const int num_keys = (int)load_shared<u32>(smem + Layout::NUM_KEYS + 4 * token);
  const int first_key = WINDOW && slides ? most(0, num_keys + 1 - WINDOW) : 0;
  return {(int)blockIdx.x % SPLITS, (int)blockIdx.x / SPLITS, num_keys, first_key, slides, token};
}
// Tiles of a split: those of keys that count, from split + SPLITS * group on.
DEV int tile_of(const Ends& ends, int group, int it) {
  return ends.first_key / TILE + ends.split + SPLITS * (group + GROUPS * it);
}
DEV int tiles_of(const Ends& ends, int group) {
  const int tiles = (ends.num_keys + TILE - 1) / TILE, first = tile_of(ends, group, 0);
  return tiles > first ? (tiles - first - 1) / (SPLITS * GROUPS) + 1 : 0;
}
// Cache blocks of a group's tiles, in shared memory: of all keys, then of sliding layers.
DEV int* blocks_of(u8* memory, int group, bool slides, int token) {
  int* blocks = reinterpret_cast<int*>(memory + Layout::BLOCKS + token * Sizes::BLOCKS);
  return blocks + (slides ? GROUPS * MOST_TILES + group * SLIDING_TILES : group * MOST_TILES);
}

DEV u32 whole_lines(u32 bytes) { return (bytes + 127) & ~127u; }
// One thread feeds a group's ring. Copies in flight matter more than the depth of the ring: beyond
// latency x bandwidth (about 28 KB an SM) they lengthen the queues in which the exchange waits too.
DEV void produce(const Args& g, const Caches& caches, u8* memory, u32 smem, const Ring& ring,
                 int group, int gateup_parts, const volatile int* computing) {
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
  const u8* src = g.stream + g.starts[blockIdx.x * GROUPS + group];
  auto put = [&](u32 bytes, int phase) {
    open(bytes, phase);
    load_once(ring.data + slot * SLOT, src, bytes, ring.full + 8 * slot);
    src += bytes;
    advance();
  };
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const int types = g.types[layer];
#pragma unroll 1
    for (int kind = QKV; kind <= DOWN; ++kind) {
      const int phase = phase_of(layer, kind), parts = parts_of(kind, gateup_parts);
      const Plan p = plan_of(kind);
#pragma unroll 1
      for (int time = 0; time < p.times; ++time) {
        const int wide = p.lanes * make_width(p, time, group, 0).all;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
          const Deal deal = make_deal(p, kind, part, group);
          const int type = type_of(types, kind, part);
          auto put_slot = [&](int lanes) {
            const u32 bytes = whole_lines(slot_bytes(type) * lanes);
            put(bytes, phase);
            if (HAS(Q8_0) && type == Q8_0) put(bytes, phase);
          };
#pragma unroll 1
          for (int it = 0; it < deal.count; it += 2) {
            int own = wide * deal.rows_of(it);
            put_slot(own);
            if (it + 1 < deal.count) {
              const int more = wide * deal.rows_of(it + 1);
              put_slot(more);
              own += more;
            }
            if (has_c(type)) put(whole_lines(own * c_bytes(type)), phase);
          }
        }
      }
      if (kind != QKV) continue;
#pragma unroll 1
      for (int t = 0; t < TOKENS; ++t) {
        const Ends ends = make_ends(smem, slides(g, layer), t);
        const int* blocks = blocks_of(memory, group, ends.slides, t);
        const int tiles = ends.attends() ? tiles_of(ends, group) : 0;
        for (int it = 0; it < tiles; ++it) {
          const int place = blocks[it] * PAGE + tile_of(ends, group, it) * TILE % PAGE;
#pragma unroll 1
          for (int part = 0; part < 2 * TILE_SLOTS; ++part) {
            open(TILE * 2 * HEAD / TILE_SLOTS, phase + 1);
            const TMap* map = &caches.maps[layer][part / TILE_SLOTS];
            const u32 bar = ring.full + 8 * slot, to = ring.data + slot * SLOT;
            constexpr int BOXES = HEAD / 64 / TILE_SLOTS;
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
              const int column = 64 * (box + part % TILE_SLOTS * BOXES);
              tma3(to + box * TILE * 128, map, bar, column, ends.kv_head(), place);
            }
            advance();
          }
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
  // Whether the warp's next slot is there.
  DEV bool can_take() const {
    return !__any_sync(~0u, !mbar_has_passed(ring.full + 8 * next, parity));
  }
  DEV void give_back(int slot, int lane) {
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.empty + 8 * slot);
  }
};

// ---- matrices
// The unit of a warp in a slot: lanes of those before it, its rows and lanes.
struct Unit { int at, rows, lanes; };
DEV Unit make_unit(const Plan& p, const Width& width, int left, int tile) {
  if (WHOLE) return {32 * tile, 1, 32};
  const int behind = left - tile * p.tile;  // rows from this unit's first on
  const int rows = behind < 0 ? 0 : behind < p.tile ? behind : p.tile;
  return {p.lanes * (width.all * p.tile * tile + width.before * rows), rows, p.lanes * width.own * rows};
}
// A unit of a type without part C, of Q8_0 its first half or its second.
DEV void load_unit(Q4& w, int type, u32 slot, const Unit& u, int slot_lanes, int lane) {
  if (HAS(Q4_K) && type == Q4_K)
    load_q4(w, slot + 72 * u.at, u.lanes, lane);
  else
    load_codes(w, type, slot, u.at, u.lanes, slot_lanes, lane);
}
template <int HALF> DEV Sums dot_unit(const Q4& w, int type, const Acts& a, int lane) {
  if (HAS(Q4_K) && type == Q4_K) return dot_q4(w, a, lane);
  if (HAS(Q4_0) && type == Q4_0) return dot_q4_0(w, a);
  if (HAS(IQ4_XS) && type == IQ4_XS) return dot_iq4_xs(w, a, lane);
  if (HAS(IQ4_NL) && type == IQ4_NL) return dot_iq4_nl(w, a);
  return HAS(Q8_0) ? dot_q8_0<HALF>(w, a) : Sums{};
}
// Sums of a unit's rows, in the first lane of each. column: of the lane among the lanes of its row.
DEV float sum_rows(float y, int column, int row_lanes) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float other = __shfl_down_sync(~0u, y, o);
    y += column + o < row_lanes ? other : 0;
  }
  return y;
}
// What this CTA's warps left of 32 outputs, or rows of q, k, v: the sum over `across` slices.
DEV float sum_results(u32 at, int across, int pitch) {
  float v = 0;
  for (int i = 0; i < across; ++i) v += __uint_as_float(load_shared<u32>(at + 4 * i * pitch));
  return v;
}
// Row `row` of q, k or v (part 0, 1, 2) of this CTA, for those that attend; without 1 / rms.
DEV void send_row(const Args& g, int layer, int part, int row, int token, float y) {
  const int at = (part ? Q_ROWS + (part - 1) * KV_ROWS + OWN_KV * (int)blockIdx.x
                       : OWN_Q * (int)blockIdx.x) + row;
  store_relaxed_word(reinterpret_cast<u32*>(exchange_of(g, token) + ROWS_AT) + at,
                     (__float_as_uint(y) & ~3u) | (layer & 3));
}
// A record for the next matrix, or the result.
DEV void hand_on(const Args& g, u32 smem, int layer, int kind, int part, int token, int record,
                 int lane, float v, float norm, bool adds) {
  if (kind == DOWN && layer == LAYERS - 1) {
    const bool lost = load_shared<u32>(smem + Layout::LOST);
    g.x_out[token * HIDDEN + 32 * record + lane] = lost ? __int_as_float(0x7fffffff) : v;
  } else {
    publish(exchange_of(g, token) + records_at((kind + 1) & 3) + 3 * record,
            smem + Layout::SCRATCH + 32 * (part % GROUPS) + 128 * token, v, norm, adds,
            (layer + (kind == DOWN)) & 3, lane);
  }
}
// The sum of squares of 32 outputs of o or down to the warps that norm them.
DEV void send_squares(const Args& g, int layer, int kind, int token, int record, int lane, float v) {
  float squares = v * v;
  for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
  u32* to = reinterpret_cast<u32*>(exchange_of(g, token) + squares_at(kind)) + record;
  if (lane == 0) store_relaxed_word(to, (__float_as_uint(squares) & ~3u) | (layer & 3));
}
// The sum of squares of all outputs.
DEV float receive_squares(const Args& g, u32 smem, int layer, int kind, int token, int lane) {
  const uint4* words = exchange_of(g, token) + squares_at(kind);
  const u32 tag = layer & 3;
  constexpr int VECTORS = HIDDEN / 128, ROUNDS = (VECTORS + 31) / 32;
  uint4 raw[ROUNDS] = {};
  bool is_missing;
  do {
    is_missing = false;
#pragma unroll
    for (int k = 0; k < ROUNDS; ++k) {
      const int at = lane + 32 * k;
      raw[k] = load_relaxed(words + (at < VECTORS ? at : 0));
      is_missing |= ((raw[k].x ^ tag) | (raw[k].y ^ tag) | (raw[k].z ^ tag) | (raw[k].w ^ tag)) & 3;
    }
  } while (__any_sync(~0u, is_missing) && !is_lost(smem));
  float t = 0;
#pragma unroll
  for (int k = 0; k < ROUNDS; ++k)
    if (lane + 32 * k < VECTORS)
      t += __uint_as_float(raw[k].x & ~3u) + __uint_as_float(raw[k].y & ~3u) +
           __uint_as_float(raw[k].z & ~3u) + __uint_as_float(raw[k].w & ~3u);
  for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
  return t;
}
// A part of a matrix is done: one warp makes a record of its 32 outputs of a token. residual, norm: of
// that warp's token and part of o and down. Updates that are parts of sums over GPUs travel first, and
// so do sums of squares of those that pass a norm: see finish_update.
DEV void finish_part(const Args& g, u32 smem, int layer, int kind, int part, int warp, int lane,
                     float& residual, float norm) {
  if (TOKENS == 1 ? warp != GROUP_WARPS * (part % GROUPS)
                  : warp / GROUP_WARPS != part % GROUPS || !makes_records(warp)) {
    bar_arrive(4 + part, CONSUMERS);
    return;
  }
  const int token = token_of(warp);
  const bool adds = kind != GATEUP;
  const float rms = adds ? 1 : make_rms(squares_of(input_of(smem, kind, 0).squares, token), g.eps, lane);
  bar_sync(4 + part, CONSUMERS);
  const Plan p = plan_of(kind);
  const u32 results = results_of(smem, token) + 4 * part * p.across * p.rows;
  float v;
  int record;
  if (adds) {
    v = sum_results(results + 4 * lane, p.across, 32);
    record = CTAS * part + (int)blockIdx.x;
    if (RANKS > 1) return send_sums(g, smem, layer, kind, record, lane, v);
    if (HAS_UPDATE_NORMS) return send_squares(g, layer, kind, token, record, lane, v);
    v = residual = residual + v;
  } else {
    const float gate = rms * sum_results(results + 8 * lane, p.across, 64);
    // GELU with tanh: 0.5 (1 + tanh z) is the sigmoid of 2 z, here 2 sqrt(2 / pi) (x + 0.044715 x^3).
    const float turn = IS_GELU ? 1.5957691f * gate * (1.f + 0.044715f * gate * gate) : gate;
    v = gate / (1.f + __expf(-turn)) * rms * sum_results(results + 8 * lane + 4, p.across, 64);
    record = (int)load_shared<u32>(smem + Layout::SHARES + 4 * (1 + part));
  }
  hand_on(g, smem, layer, kind, part, token, record, lane, v, norm, adds);
}
// Adds an update once it is known, and hands it on: the warps of group i that make records its part
// i. Ranks' parts are added first; a norm needs the sums of squares of all CTAs. After `multiply`: a
// warp that waited within it would hold up parts of its own CTA. Weights are read while it waits:
// registers that kept them longer would be spilled.
DEV void finish_update(const Args& g, u32 smem, int layer, int kind, int warp, int lane,
                       float& residual) {
  const int part = warp / GROUP_WARPS, record = CTAS * part + (int)blockIdx.x;
  if (!makes_records(warp) || record >= HIDDEN / 32) return;
  const int token = token_of(warp);
  const float* norms = g.norms + (NORMS * layer * HIDDEN + 32 * record + lane);
  const float update_norm = HAS_UPDATE_NORMS ? __ldg(norms + (kind == O_PROJ ? 2 : 3) * HIDDEN) : 1;
  float norm = 0;
  if (kind == O_PROJ || layer < LAYERS - 1)
    norm = __ldg(norms + (kind == O_PROJ ? 1 : NORMS) * HIDDEN);
  auto own_part = [&]() {
    const Plan p = plan_of(kind);
    const u32 results = results_of(smem, token) + 4 * part * p.across * p.rows;
    return sum_results(results + 4 * lane, p.across, 32);
  };
  float update = 0, squares = 0;
  if (RANKS > 1) {
    update = add_ranks(g, smem, layer, kind, record, lane, own_part());
    if (HAS_UPDATE_NORMS) send_squares(g, layer, kind, token, record, lane, update);
  }
  if (HAS_UPDATE_NORMS) squares = receive_squares(g, smem, layer, kind, token, lane);
  if (RANKS == 1) update = own_part();
  if (HAS_UPDATE_NORMS) update = update * rsqrtf(squares * (1.f / HIDDEN) + g.eps) * update_norm;
  residual += update;
  hand_on(g, smem, layer, kind, part, token, record, lane, residual, norm, true);
}
// Units that a warp loads while it waits for their inputs. Two are faster but where units have several
// rows, and where a CTA has two parts of o and down. One gives 0.2% (H200,
// decode_step_sizes_h200.json), for which codes of two tokens leave no registers.
constexpr int EARLY = TOKENS > 1 ? 0 : PLAN_GATEUP.tile == 1 && HIDDEN_PARTS == 1 ? 2 : 1;
// This CTA's rows of a matrix, two units at a time. Rows of q, k, v are sent as they are done, if
// no warps share them; each 32 others make a record when the last warp has its own. A slice of down
// begins when its inputs are there: the first ones are, while slow CTAs still compute the last of
// gate and up. residual, norm: of the warp that makes a record; ahead: a look at the first record of
// down, taken before the last of gate and up.
DEV void multiply(const Args& g, Taker& taker, u32 smem, int layer, int kind, int gateup_parts,
                  int warp, int lane, float& residual, float norm, uint4& ahead) {
  const int group = warp / GROUP_WARPS, own = warp % GROUP_WARPS;
  const u32 tid = 32 * warp + lane;
  const int parts = parts_of(kind, gateup_parts), phase = phase_of(layer, kind);
  const u32 tag = layer & 3, data = taker.ring.data;
  if (parts == 0) {
    if (tid == 0) store_shared<u32>(smem + Layout::COMPUTING, phase);
    if (LOOKS_AHEAD) ahead.w = tag ^ 1;  // nothing seen yet
    return;
  }
  const Plan p = plan_of(kind);
  const int types = g.types[layer], tile = own >> p.side_log;
  const u32 records = records_at(kind);
  const u32 block_vectors = 12 * p.lanes;  // of the records of a block of inputs
  if (LOOKS_AHEAD && kind != DOWN && tid < block_vectors * p.blocks)
    ahead = load_relaxed(g.exchange + (records + tid));
  Sums acc0 = {}, acc1 = {}, kept0 = {}, kept1 = {};
#pragma unroll 1
  for (int time = 0; time < p.times; ++time) {
    const Width width = make_width(p, time, group, own);
    const int from = first_block(p, time * p.across), until = first_block(p, (time + 1) * p.across);
    const Input in = input_of(smem, kind, time);
    const int row_lanes = p.lanes * width.own;
    const int row = WHOLE ? 0 : lane / row_lanes, column = WHOLE ? lane : lane - row * row_lanes;
    // The first units wait for their inputs in registers, so that their slots can be filled again.
    Q4 early0 = {}, early1 = {};
    const Deal head = make_deal(p, kind, 0, group);
    const int head_type = type_of(types, kind, 0);
    const bool is_halves = HAS(Q8_0) && head_type == Q8_0;  // the second is that of the first unit
    const int most_early = has_c(head_type) ? 0 : is_halves ? 2 * head.count : head.count;
    auto load_early = [&](Q4& to, int number) {
      if (number >= most_early || !taker.can_take()) return false;
      const int it = is_halves ? 0 : number;
      const Unit u = make_unit(p, width, head.left(it), tile);
      const int slot = taker.take();
      load_unit(to, head_type, data + slot * SLOT, u, p.lanes * width.all * head.rows_of(it), lane);
      taker.give_back(slot, lane);
      return true;
    };
    const bool is_early0 = EARLY > 0 && load_early(early0, 0);
    const bool is_early1 = EARLY > 1 && is_early0 && load_early(early1, 1);
    receive(ahead, g.exchange, records + block_vectors * from, block_vectors * (until - from), tag, in,
            smem);
    if (LOOKS_AHEAD && !WHOLE && kind == GATEUP) ahead.w = tag ^ 1;  // a group may have no rows
    bar_sync(2, CONSUMERS);
    if (tid == 0) store_shared<u32>(smem + Layout::COMPUTING, phase);
    const bool is_last = kind != DOWN || time == p.times - 1;
    if (LOOKS_AHEAD && !is_last && tid < block_vectors * (p.least + (time + 1 < p.extra)))
      ahead = load_relaxed(g.exchange + (records + block_vectors * until + tid));
    const Acts a = load_acts(in, p.lanes * (width.first - from) + column);
    const Sums early_sum0 = is_early0 ? dot_unit<0>(early0, head_type, a, lane) : Sums{};
    const Sums early_sum1 = is_early1 ? dot_unit<1>(early1, head_type, a, lane) : Sums{};
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const Deal deal = make_deal(p, kind, part, group);
      const int type = type_of(types, kind, part);
      const int slice = warp & (p.across - 1);
      const u32 results =
          smem + Layout::RESULTS +
          4 * (kind == QKV ? slice * OWN_ROWS + (part ? OWN_Q + (part - 1) * OWN_KV : 0)
                           : (part * p.across + slice) * p.rows);
      if (HIDDEN_PARTS > 1 && parts > 1 && kind == DOWN) {  // two parts' sums stay over slices
        const Sums s0 = acc0, s1 = acc1;
        acc0 = kept0, acc1 = kept1, kept0 = s0, kept1 = s1;
      }
#pragma unroll 1
      for (int it = 0; it < deal.count; it += 2) {
        const bool is_pair = it + 1 < deal.count;
        if (LOOKS_AHEAD && kind == GATEUP && part == parts - 1 && it + 2 >= deal.count &&
            tid < RECORD_VECTORS(DOWN_COLUMNS))
          ahead = load_relaxed(g.exchange + (records_at(DOWN) + tid));
        const Unit u0 = make_unit(p, width, deal.left(it), tile);
        const Unit u1 = make_unit(p, width, is_pair ? deal.left(it + 1) : 0, tile);
        Sums y0, y1 = {};
        const int n0 = p.lanes * width.all * deal.rows_of(it);
        const int n1 = is_pair ? p.lanes * width.all * deal.rows_of(it + 1) : 0;
        if (!has_c(type)) {
          Q4 w;
          auto load_next = [&](const Unit& u, int slot_lanes) {
            const int slot = taker.take();
            load_unit(w, type, data + slot * SLOT, u, slot_lanes, lane);
            taker.give_back(slot, lane);
          };
          const bool is_head = part == 0 && it == 0;
          if (is_early0 && is_head) {
            y0 = early_sum0;
          } else {
            load_next(u0, n0);
            y0 = dot_unit<0>(w, type, a, lane);
          }
          if (HAS(Q8_0) && type == Q8_0) {
            if (is_early1 && is_head) {
              y0 = y0 + early_sum1;
            } else {
              load_next(u0, n0);
              y0 = y0 + dot_q8_0<1>(w, a);
            }
            if (is_pair) {
              load_next(u1, n1);
              y1 = dot_q8_0<0>(w, a);
              load_next(u1, n1);
              y1 = y1 + dot_q8_0<1>(w, a);
            }
          } else if (is_early1 && is_head) {
            y1 = early_sum1;
          } else if (is_pair) {
            load_next(u1, n1);
            y1 = dot_unit<0>(w, type, a, lane);
          }
        } else {
          const int s0 = taker.take(), s1 = is_pair ? taker.take() : s0, s2 = taker.take();
          const u32 a0 = data + s0 * SLOT, a1 = data + s1 * SLOT, c = data + s2 * SLOT;
          auto give_back = [&]() {
            taker.give_back(s0, lane);
            if (is_pair) taker.give_back(s1, lane);
            taker.give_back(s2, lane);
          };
          if (HAS(Q6_K) && type == Q6_K) {
            Q6 w;
            const u32 d = c + 32 * (n0 + n1);
            load_q6(w, a0 + 72 * u0.at, c + 32 * u0.at, d + u0.at, u0.lanes, lane);
            y0 = dot_q6(w, a);
            if (is_pair)
              load_q6(w, a1 + 72 * u1.at, c + 32 * (n0 + u1.at), d + n0 + u1.at, u1.lanes, lane);
            give_back();
            if (is_pair) y1 = dot_q6(w, a);
          } else if (HAS(Q5_K) && type == Q5_K) {
            Q5 w;
            load_q5(w, a0 + 72 * u0.at, c + 16 * u0.at, u0.lanes, lane);
            y0 = dot_q5(w, a, lane);
            if (is_pair) load_q5(w, a1 + 72 * u1.at, c + 16 * (n0 + u1.at), u1.lanes, lane);
            give_back();
            if (is_pair) y1 = dot_q5(w, a, lane);
          } else {
            Q5 w;
            load_codes(w.low, Q5_0, a0, u0.at, u0.lanes, n0, lane);
            w.high = load_shared<uint4>(c + 16 * (u0.at + lane));
            y0 = dot_q5_0(w.low, w.high, a);
            if (is_pair) {
              load_codes(w.low, Q5_0, a1, u1.at, u1.lanes, n1, lane);
              w.high = load_shared<uint4>(c + 16 * (n0 + u1.at + lane));
            }
            give_back();
            if (is_pair) y1 = dot_q5_0(w.low, w.high, a);
          }
        }
        // Other lanes have read what is no weight of theirs.
        acc0 = acc0 + (WHOLE || lane < u0.lanes ? y0 : Sums{});
        acc1 = acc1 + (WHOLE || lane < u1.lanes ? y1 : Sums{});
        if (!is_last) continue;
        const int at = deal.rows - deal.left(it) + tile * p.tile, next = at + p.turn * p.step;
        auto keep = [&](int row_at, int token, float y) {
          if (QKV_ACROSS == 1 && kind == QKV)
            send_row(g, layer, part, row_at, token, y);
          else
            store_shared<u32>(results + token * Sizes::RESULTS + 4 * row_at, __float_as_uint(y));
        };
        if (WHOLE || p.tile == 1) {
          // Both rows in five shuffles: lanes 0-15 end with row 0, lanes 16-31 with row 1. Of two
          // tokens in six: the first 8 lanes of these 16 end with the first token.
          float ys[TOKENS];
#pragma unroll
          for (int t = 0; t < TOKENS; ++t)
            ys[t] = (lane < 16 ? of(acc0, t) : of(acc1, t)) +
                    __shfl_xor_sync(~0u, lane < 16 ? of(acc1, t) : of(acc0, t), 16);
          const bool is_second = TOKENS > 1 && lane & 8;
          float y = ys[0];
          if (TOKENS > 1)
            y = (is_second ? ys[TOKENS - 1] : y) +
                __shfl_xor_sync(~0u, is_second ? y : ys[TOKENS - 1], 8);
#pragma unroll
          for (int o = 8 / TOKENS; o; o >>= 1) y += __shfl_xor_sync(~0u, y, o);
          const bool has_row = WHOLE ? lane < 16 || is_pair : (lane < 16 ? u0 : u1).rows > 0;
          if ((lane & (16 / TOKENS - 1)) == 0 && has_row) keep(lane < 16 ? at : next, is_second, y);
        } else {
#pragma unroll
          for (int t = 0; t < TOKENS; ++t) {
            const float sum0 = sum_rows(of(acc0, t), column, row_lanes);
            const float sum1 = sum_rows(of(acc1, t), column, row_lanes);
            if (column == 0 && row < u0.rows) keep(at + row, t, sum0);
            if (column == 0 && row < u1.rows) keep(next + row, t, sum1);
          }
        }
        acc0 = acc1 = Sums{};
      }
      if (kind != QKV && is_last)
        finish_part(g, smem, layer, kind, part, warp, lane, residual, norm);
    }
  }
  if (QKV_ACROSS == 1 || kind != QKV) return;
  bar_sync(4, CONSUMERS);
  if (tid >= TOKENS * OWN_ROWS) return;
  const u32 token = TOKENS > 1 && tid >= OWN_ROWS, at = tid - token * OWN_ROWS;
  const int part = (at >= OWN_Q) + (at >= OWN_Q + OWN_KV);
  const float y = sum_results(results_of(smem, token) + 4 * at, QKV_ACROSS, OWN_ROWS);
  send_row(g, layer, part, at - (part ? OWN_Q + (part - 1) * OWN_KV : 0), token, y);
}
