// fused_decode_step: attention of one token in a layer, from rows of q, k, v to records of the
// inputs of o.
#pragma once

#include "fused/fused_decode_step_exchange.cuh"
#include "fused/fused_decode_step_products.cuh"

// 64 threads bring the norms of q and k to shared memory.
DEV void load_head_norms(const Args& g, u32 smem, int layer, int i) {
#if HAS_QK_NORM
#pragma unroll
  for (int at = i; at - i < HEAD / 2; at += 64) {
    if (at >= HEAD / 2) return;
    const float4 w = reinterpret_cast<const float4*>(g.head_norms)[HEAD / 2 * layer + at];
    const u32 to = smem + Layout::HEAD_NORMS + 16 * at;
    store_shared<u32>(to, __float_as_uint(w.x)), store_shared<u32>(to + 4, __float_as_uint(w.y));
    store_shared<u32>(to + 8, __float_as_uint(w.z)), store_shared<u32>(to + 12, __float_as_uint(w.w));
  }
#endif
}
// Rows of q, k, v of a token and this CTA's heads arrive as words: warps 0 .. HEADS - 1 take a query
// head each, the next two the new key and the new value; lane l has elements 4 l .. 4 l + 3 of each
// 128 (of heads of 64 two lanes have the same). They norm and rotate, leave fp16 in shared memory, and
// one CTA writes the new key and value to the cache.
DEV void receive_heads(const Args& g, const Caches& caches, u32 smem, int layer, int warp, int lane,
                       const Ends& ends) {
  constexpr int VECTORS = HEAD > 128 ? HEAD / 128 : 1, LANES = HEAD / (4 * VECTORS);
  const int part = lane & (LANES - 1);
  u16* plane = nullptr;
  if (warp >= HEADS && ends.split == 0 && ends.head % SHARERS == 0) {
    const u32 at =
        smem + Layout::NEW_SLOT + (ends.slides ? 8 : 0) + ends.token * Sizes::SLOTS;
    const long long slot = (long long)load_shared<u64>(at);
    // 64-bit: slots * 1024 elements pass 2^31.
    if (slot >= 0)
      plane = caches.planes[layer][warp - HEADS] + (slot * KV_HEADS + ends.kv_head()) * HEAD + 4 * part;
  }
  const int row = warp < HEADS ? (ends.head * HEADS + warp) * HEAD
                               : Q_ROWS + (warp - HEADS) * KV_ROWS + ends.kv_head() * HEAD;
  const uint4* rows = exchange_of(g, ends.token) + ROWS_AT + row / 4 + part;
  uint4 raw[VECTORS];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) raw[k] = load_relaxed(rows + 32 * k);
#if HAS_BIAS
  const float4* biases = reinterpret_cast<const float4*>(g.bias);
  biases += ((Q_ROWS + 2 * KV_ROWS) * layer + row) / 4 + part;
#endif
  // The CTA had all inputs of these rows.
  const float rms = make_rms(squares_of(input_of(smem, QKV, 0).squares, ends.token), g.eps, lane);
  const u32 tag = layer & 3;
  float v[VECTORS][4];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    uint4& own = raw[k];
#if HAS_BIAS
    const float4 bias = biases[32 * k];
#endif
    auto is_missing = [&]() {
      return ((own.x ^ tag) | (own.y ^ tag) | (own.z ^ tag) | (own.w ^ tag)) & 3;
    };
    while (is_missing() && !is_lost(smem)) own = load_relaxed(rows + 32 * k);
    v[k][0] = rms * __uint_as_float(own.x & ~3u), v[k][1] = rms * __uint_as_float(own.y & ~3u);
    v[k][2] = rms * __uint_as_float(own.z & ~3u), v[k][3] = rms * __uint_as_float(own.w & ~3u);
#if HAS_BIAS
    v[k][0] += bias.x, v[k][1] += bias.y, v[k][2] += bias.z, v[k][3] += bias.w;
#endif
  }
  if (warp <= HEADS) {
#if HAS_QK_NORM
    float t = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
      t += v[k][0] * v[k][0] + v[k][1] * v[k][1] + v[k][2] * v[k][2] + v[k][3] * v[k][3];
    for (int o = LANES / 2; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
    const float r = rsqrtf(t * (1.f / HEAD) + g.eps);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const uint4 w = load_shared<uint4>(smem + Layout::HEAD_NORMS + (warp == HEADS) * 4 * HEAD +
                                  16 * part + 512 * k);
      v[k][0] *= r * __uint_as_float(w.x), v[k][1] *= r * __uint_as_float(w.y);
      v[k][2] *= r * __uint_as_float(w.z), v[k][3] *= r * __uint_as_float(w.w);
    }
#endif
    const u32 table =
        smem + Layout::ROPE + (ends.slides ? 4 * HEAD : 0) + ends.token * Sizes::ROPE;
    const u32 turns = table + 16 * (VECTORS > 1 ? part : part & (LANES / 2 - 1));
    const uint4 c = load_shared<uint4>(turns), s = load_shared<uint4>(turns + 2 * HEAD);
    const u32 cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // pairs (i, i + HEAD / 2)
      const float cos = __uint_as_float(cosine[i]), sin = __uint_as_float(sine[i]);
      if (VECTORS > 1) {
        const float first = v[0][i], second = v[VECTORS - 1][i];
        v[0][i] = first * cos - second * sin, v[VECTORS - 1][i] = second * cos + first * sin;
      } else {
        const float turned = __shfl_xor_sync(~0u, v[0][i], LANES / 2) * sin;
        v[0][i] = v[0][i] * cos + (part < LANES / 2 ? -turned : turned);
      }
    }
  }
  const u32 query = Layout::QUERY + ends.token * Sizes::QUERIES, fresh = ends.token * Sizes::NEW;
  const u32 to = smem + 8 * part + (warp < HEADS    ? query + warp * Sizes::QUERY_PITCH
                                    : warp == HEADS ? Layout::NEW_K + fresh
                                                    : Layout::NEW_V + fresh);
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const u32 lo = pack(v[k][0], v[k][1]), hi = pack(v[k][2], v[k][3]);
    store_shared<u32>(to + 256 * k, lo), store_shared<u32>(to + 256 * k + 4, hi);
    if (plane) *reinterpret_cast<uint2*>(plane + 128 * k) = make_uint2(lo, hi);
  }
}

DEV u32 warp_sums_of(u32 smem, int token) {
  return smem + Layout::WARP_SUMS + token * Sizes::WARP_SUMS;
}
// Outputs of a warp's tiles: column 2 (l % 4) and the next of lane l are heads, rows dimensions.
struct Outputs { float o[HEAD / 16][4]; };
// Of a warp's 8 in a tile.
DEV int first_key(const Ends& ends, int group, int warp, int it) {
  return tile_of(ends, group, it) * TILE + 8 * (warp % GROUP_WARPS);
}
// This warp's share of the tiles, 8 keys of each: scores as q K^T (query heads in rows 0 to 7; at
// most 4 are there twice), outputs as V^T P^T, whose columns are heads; so P needs no transposition.
// Leaves (maximum, sum) of each head in shared memory.
DEV Outputs attend(const Args& g, u32 smem, Taker& taker, int group, int warp, int lane,
                   const Ends& ends) {
  const int row = lane >> 2, column = 2 * (lane & 3), chunk = lane >> 3;
  const int own = HEADS > 4 ? lane & 7 : lane & 3, head = own < HEADS ? own : HEADS - 1;
  // Of heads of 256 the outputs leave no registers for queries.
  constexpr bool KEEPS_Q = HEAD <= 128;
  const u32 query = smem + Layout::QUERY + ends.token * Sizes::QUERIES + head * Sizes::QUERY_PITCH +
                    chunk * 16;
  u32 q[KEEPS_Q ? HEAD / 32 : 1][4];
#pragma unroll
  for (int j = 0; KEEPS_Q && j < HEAD / 32; ++j) load_matrices<false>(q[j], query + 64 * j);
  Outputs outputs;
  auto& o = outputs.o;
#pragma unroll
  for (int i = 0; i < HEAD / 16; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  float most = START_MAX, sum = 0;
  const int tiles = tiles_of(ends, group);
  // Of two tokens of one request the second's tiles have the first's key and value, which may not be
  // in the cache yet: they are read where the new ones are.
  const int fresh = TOKENS > 1 && ends.token && is_one_request(g) ? ends.num_keys - 1 : -1;
  // The new token is a tile of one key, of one warp.
#pragma unroll 1
  for (int it = warp == 0 && ends.split == 0 ? -1 : 0; it < tiles; ++it) {
    const bool is_new = it < 0;
    // Whether this lane's key is one of NEW_K, and where that begins.
    const bool is_fresh =
        TOKENS == 1 ? is_new : is_new || first_key(ends, group, warp, it) + (lane & 7) == fresh;
    const u32 own_new = smem + (TOKENS > 1 && is_new ? ends.token * Sizes::NEW : 0);
    // A slot is boxes of 64 dimensions, [key][128 bytes], 16-byte chunks swizzled by TMA.
    const u32 box = is_fresh ? 128 : TILE * 128, swizzle = is_fresh ? 0 : lane & 7;
    const u32 offset = is_fresh ? 0 : (8 * (warp % GROUP_WARPS) + (lane & 7)) * 128;
    const int first = first_key(ends, group, warp, it);
    const int valid = is_new ? 1 : ends.num_keys - first;
    const int lowest = WINDOW && !is_new ? ends.first_key - first : 0;
    auto sees = [&](int key) { return key < valid && (!WINDOW || key >= lowest); };
    auto matrix = [&](u32 base, int j) {
      return base + offset + (j >> 1) * box + (((4 * (j & 1) + chunk) ^ swizzle) << 4);
    };
    float s[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = s[1][i] = 0;
#pragma unroll
    for (int part = 0; part < TILE_SLOTS; ++part) {
      const int k_slot = is_new ? 0 : taker.take();
      const u32 k_at =
          is_fresh ? own_new + Layout::NEW_K + 256 * part : taker.ring.data + k_slot * SLOT;
#pragma unroll
      for (int j = 0; j < HEAD / 32 / TILE_SLOTS; ++j) {
        u32 k[4];
        u32(&own)[4] = q[KEEPS_Q ? j : 0];
        if (!KEEPS_Q) load_matrices<false>(own, query + 64 * (HEAD / 32 / TILE_SLOTS * part + j));
        load_matrices<false>(k, matrix(k_at, j));
        mma_k16(s[0], own[0], own[1], k[0], k[1]);
        mma_k16(s[1], own[2], own[3], k[2], k[3]);
      }
      if (!is_new) taker.give_back(k_slot, lane);
    }
    const float s0 = sees(column) ? (s[0][0] + s[1][0]) * g.score_scale : START_MAX;
    const float s1 = sees(column + 1) ? (s[0][1] + s[1][1]) * g.score_scale : START_MAX;
    float high = fmaxf(s0, s1);
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    // The maximum follows only when it grew by more than 8 in the exponent.
    float factor = 1;
    if (high > most + 8.f) factor = exp2_approx(most - high), most = high;
    if (__any_sync(~0u, factor != 1.f)) {
      sum *= factor;
      const float f0 = __shfl_sync(~0u, factor, 8 * (lane & 3));
      const float f1 = __shfl_sync(~0u, factor, 8 * (lane & 3) + 4);
#pragma unroll
      for (int i = 0; i < HEAD / 16; ++i) o[i][0] *= f0, o[i][1] *= f1, o[i][2] *= f0, o[i][3] *= f1;
    }
    const float p0 = sees(column) ? exp2_approx(s0 - most) : 0;
    const float p1 = sees(column + 1) ? exp2_approx(s1 - most) : 0;
    sum += p0 + p1;
    const u32 p = pack(p0, p1);
    // Memory beside the keys that count holds anything: 0 * NaN would be NaN.
    const u32 keep = (sees(column) ? 0xffffu : 0u) | (sees(column + 1) ? 0xffff0000u : 0u);
#pragma unroll
    for (int part = 0; part < TILE_SLOTS; ++part) {
      const int v_slot = is_new ? 0 : taker.take();
      const u32 v_at =
          is_fresh ? own_new + Layout::NEW_V + 256 * part : taker.ring.data + v_slot * SLOT;
#pragma unroll
      for (int j = 0; j < HEAD / 32 / TILE_SLOTS; ++j) {
        const int at = 2 * (HEAD / 32 / TILE_SLOTS * part + j);
        u32 v[4];
        load_matrices<true>(v, matrix(v_at, j));
        mma_k8(o[at], v[0] & keep, v[1] & keep, p);
        mma_k8(o[at + 1], v[2] & keep, v[3] & keep, p);
      }
      if (!is_new) taker.give_back(v_slot, lane);
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (row < HEADS && (lane & 3) == 0) {
    const u32 at = warp_sums_of(smem, ends.token) + (warp * HEADS + row) * 8;
    store_shared<u32>(at, __float_as_uint(most)), store_shared<u32>(at + 4, __float_as_uint(sum));
  }
  return outputs;
}
// Leaves outputs (head, dimension) of HEADS_AT_ONCE heads, from `first` on, in shared memory.
DEV void store_outputs(const Outputs& outputs, u32 smem, int warp, int lane, int first) {
  constexpr int HEADS_AT_ONCE = Sizes::HEADS_AT_ONCE, PITCH = Sizes::OUTPUTS_PITCH;
  const int row = lane >> 2, column = 2 * (lane & 3);
  const auto& o = outputs.o;
  const u32 mine = smem + Layout::WARP_OUTPUTS + warp * HEADS_AT_ONCE * PITCH + 4 * row;
  if (HEADS <= 4) {
    // Columns 4 to 7 repeat 0 to 3: their lanes store the upper 8 dimensions of each 16.
    const bool upper = lane & 2;
    const int head = column & 2;
    if (head < first || head >= first + HEADS_AT_ONCE) return;
    const u32 at = mine + (upper ? 32 : 0) + (head - first) * PITCH;
#pragma unroll
    for (int i = 0; i < HEAD / 16; ++i) {
      if (head < HEADS)
        store_shared<u32>(at + 64 * i, __float_as_uint(upper ? o[i][2] : o[i][0]));
      if (head + 1 < HEADS)
        store_shared<u32>(at + 64 * i + PITCH, __float_as_uint(upper ? o[i][3] : o[i][1]));
    }
    return;
  }
  if (column < first || column >= first + HEADS_AT_ONCE) return;
  const u32 at = mine + (column - first) * PITCH;
#pragma unroll
  for (int i = 0; i < HEAD / 16; ++i) {
    if (column < HEADS) {
      store_shared<u32>(at + 64 * i, __float_as_uint(o[i][0]));
      store_shared<u32>(at + 64 * i + 32, __float_as_uint(o[i][2]));
    }
    if (column + 1 < HEADS) {
      store_shared<u32>(at + 64 * i + PITCH, __float_as_uint(o[i][1]));
      store_shared<u32>(at + 64 * i + PITCH + 32, __float_as_uint(o[i][3]));
    }
  }
}

// Weights of up to 16 or 32 parts under their common maximum; lane l, and of 16 lane l + 16, holds
// part l.
struct Shares { float most, factor, sum; };
template <int PARTS> DEV Shares make_shares(float most, float sum) {
  float high = most;
  for (int o = PARTS / 2; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
  const float factor = exp2_approx(most - high);
  float total = factor * sum;
  for (int o = PARTS / 2; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  return {high, factor, total};
}
// Warp w adds 32 outputs of the heads from `first` on over the warps, and sends them, with maximum
// and sum, to the CTA that merges them.
DEV void send_partials(const Args& g, u32 smem, int layer, int warp, int lane, const Ends& ends,
                       int active, int first) {
  constexpr int HEAD_PARTS = HEAD / 32, HEADS_AT_ONCE = Sizes::HEADS_AT_ONCE;
  const int head = warp / HEAD_PARTS, part = lane & 15;
  if (head >= HEADS_AT_ONCE || first + head >= HEADS) return;
  const u32 at = warp_sums_of(smem, ends.token) +
                 ((part < active ? part : 0) * HEADS + first + head) * 8;
  const float most = __uint_as_float(load_shared<u32>(at));
  const float own = __uint_as_float(load_shared<u32>(at + 4));
  const Shares shares = make_shares<16>(most, part < active ? own : 0.f);
  const u32 mine = smem + Layout::WARP_OUTPUTS + head * Sizes::OUTPUTS_PITCH +
                   4 * ((warp % HEAD_PARTS) * 32 + lane);
  float y = 0;
#pragma unroll 1
  for (int w = 0; w < active; w += GROUP_WARPS)
#pragma unroll
    for (int i = 0; i < GROUP_WARPS; ++i) {
      const u32 from = mine + (w + i) * HEADS_AT_ONCE * Sizes::OUTPUTS_PITCH;
      y += __shfl_sync(~0u, shares.factor, w + i) * __uint_as_float(load_shared<u32>(from));
    }
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __shfl_sync(~0u, y, (4 * lane + i) & 31);
  if (lane == PARTIAL - 1) v[0] = shares.most, v[1] = shares.sum, v[3] = 0;
  if (lane < PARTIAL) {
    uint4 out = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                           (__float_as_uint(v[3]) & ~3u) | (layer & 3));
    const int record = (ends.head * HEADS + first) * HEAD_PARTS + warp;
    uint4* partials = exchange_of(g, ends.token) + PARTIALS_AT;
    store_relaxed(partials + PARTIAL * (record * SPLITS + ends.split) + lane, out);
  }
}
// One warp merges the partial outputs of 32 elements of a token: lane l has elements 4 (l % 8) and on of parts
// l / 8 + 4 j, and maximum and sum of part l. Returns element l.
DEV float merge_partials(const Args& g, u32 smem, int layer, int token, int record, int lane) {
  constexpr int ROUNDS = (SPLITS + 3) / 4, LANES = SPLITS > 16 ? 32 : 16;
  const uint4* parts = exchange_of(g, token) + PARTIALS_AT + record * SPLITS * PARTIAL;
  const uint4* from = parts + (lane >> 3) * PARTIAL + (lane & 7);
  const int own_part = lane & (LANES - 1);
  const bool has_part = SPLITS == LANES || own_part < SPLITS;
  const uint4* ends = parts + (has_part ? own_part : 0) * PARTIAL + PARTIAL - 1;
  const u32 tag = layer & 3;
  uint4 v[ROUNDS] = {}, own;
  bool again;
  do {
#pragma unroll
    for (int j = 0; j < ROUNDS; ++j)
      if (SPLITS % 4 == 0 || (lane >> 3) + 4 * j < SPLITS)
        v[j] = load_relaxed(from + 4 * j * PARTIAL);
    own = load_relaxed(ends);
    again = (own.w & 3) != tag;
#pragma unroll
    for (int j = 0; j < ROUNDS; ++j)
      if (SPLITS % 4 == 0 || (lane >> 3) + 4 * j < SPLITS) again |= (v[j].w & 3) != tag;
  } while (__any_sync(~0u, again) && !is_lost(smem));
  const Shares shares = make_shares<LANES>(__uint_as_float(own.x),
                                           has_part ? __uint_as_float(own.y) : 0.f);
  float y[4] = {};
#pragma unroll
  for (int j = 0; j < ROUNDS; ++j) {
    const float f = __shfl_sync(~0u, shares.factor, (lane >> 3) + 4 * j);
    y[0] += f * __uint_as_float(v[j].x), y[1] += f * __uint_as_float(v[j].y);
    y[2] += f * __uint_as_float(v[j].z), y[3] += f * __uint_as_float(v[j].w & ~3u);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] += __shfl_xor_sync(~0u, y[i], 8);
    y[i] += __shfl_xor_sync(~0u, y[i], 16);
    y[i] = __shfl_sync(~0u, y[i], lane >> 2);
  }
  const float pair = lane & 1 ? y[1] : y[0], next = lane & 1 ? y[3] : y[2];
  return (lane & 2 ? next : pair) / shares.sum;
}

DEV void attention(const Args& g, const Caches& caches, u32 smem, int layer, int warp, int lane,
                   Taker& taker) {
  Ends ends = make_ends(smem, slides(g, layer), 0);
  if (ends.attends()) {
#if TOKENS == 1
    if (warp <= HEADS + 1) receive_heads(g, caches, smem, layer, warp, lane, ends);
#else
#pragma unroll
    for (int at = 0; at < TOKENS * (HEADS + 2); at += WARPS) {
      const int token = warp + at >= HEADS + 2, own = warp + at - token * (HEADS + 2);
      if (own <= HEADS + 1)
        receive_heads(g, caches, smem, layer, own, lane, make_ends(smem, ends.slides, token));
    }
#endif
    bar_sync(2, CONSUMERS);
    if (warp == 0 && lane == 0) store_shared<u32>(smem + Layout::COMPUTING, phase_of(layer, QKV) + 1);
#pragma unroll 1
    for (int token = 0; token < TOKENS; ++token) {
      if (token) ends = make_ends(smem, ends.slides, token);
      const Outputs outputs = attend(g, smem, taker, warp / GROUP_WARPS, warp, lane, ends);
      int busy = 1;  // groups; those without a tile have added nothing
      while (busy < GROUPS && tiles_of(ends, busy)) ++busy;
#pragma unroll
      for (int first = 0; first < HEADS; first += Sizes::HEADS_AT_ONCE) {
        // All have read the outputs of the heads before, or of the token before.
        if (first || token) bar_sync(2, CONSUMERS);
        store_outputs(outputs, smem, warp, lane, first);
        bar_sync(3, CONSUMERS);
        send_partials(g, smem, layer, warp, lane, ends, GROUP_WARPS * busy, first);
      }
    }
  }
  const int record = (int)blockIdx.x + CTAS * (warp / GROUP_WARPS), own_token = token_of(warp);
  if (makes_records(warp) && record < Q_ROWS / 32) {
    const float y = merge_partials(g, smem, layer, own_token, record, lane);
    publish(exchange_of(g, own_token) + records_at(O_PROJ) + 3 * record,
            smem + Layout::SCRATCH + 32 * (warp / GROUP_WARPS) + 128 * own_token, y, 0, false,
            layer & 3, lane);
  }
  // Warps without records of the next exchange fetch what the next layer's heads would wait for.
  if (warp >= WARPS - 2 && layer + 1 < LAYERS)
    load_head_norms(g, smem, layer + 1, 32 * warp + lane - CONSUMERS + 64);
}
