// fused_layer_tail and fused_batch_step: the warps that fetch activations, and those that add up sums
// and publish results.
#pragma once

#include "fused/fused_layer_tail_products.cuh"
#include "fused/fused_layer_tail_ranks.cuh"

// ---- the warp that brings activations: a lane a slot, whose columns it knows in their order
DEV void bring(const Args& g, u8* memory, u32 smem, int rank, int lane) {
  cluster_sync();
  wait_for_inputs();
  u32 target[NT];  // what counters reach in this launch; modulo 2^32, as they count
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
    target[nt] = PUBLISHERS * (1 + __ldcg(g.launches + nt * CTAS + blockIdx.x));
  // This CTA's launches are not counted before all of its warps have looked.
  bar_sync(2, 32 * (1 + NT));
  // CTAs begin at different columns: all want the same few lines of the L2 at the same time.
  const int four = (lane / CLASS_SLOTS + (blockIdx.x >> 1)) & 3;
  const int in_o = columns_of(COLUMNS_O, four), in_x = columns_of(COLUMNS_X, four);
  const int in_h = columns_of(COLUMNS_H, four);
#if IS_STEP
  int at = lane % CLASS_SLOTS, begin = 0, end = 0, layer = 0;
  auto has_more = [&] {
    if (__any_sync(~0u, at < end)) return true;
    if (layer == g.num_layers) return false;
    bar_sync(3, 32 * (WARPS + 1));  // columns may come to where the attention was
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) target[nt] += layer > 0 ? PUBLISHERS : 0;
    begin = end, ++layer;
    if (lane < XSLOTS) end += in_o + in_x + in_h + (layer < g.num_layers ? in_x : 0);
    return true;
  };
#else
  constexpr u32 times = 1;
  const int end = lane < XSLOTS ? in_o + in_x + in_h + (IS_LAST ? 0 : in_x) : 0;
  int at = lane % CLASS_SLOTS;
  if (at < in_o) at += CLASS_SLOTS;  // attention's outputs are there already
  auto has_more = [&] { return __any_sync(~0u, at < end); };
#endif
#pragma unroll 1
  while (has_more()) {
    if (at >= end) continue;
#if IS_STEP
    int i = at - begin - in_o, first = 0;
    const u32 times = i < 0 ? OUTPUTS / PUBLISHERS : 1;
    if (i < 0)
      i += in_o, first = FIRST_O;
    else if (i >= in_x)
      i -= in_x, first = FIRST_H;
    if (first == FIRST_H && i >= in_h) i -= in_h, first = FIRST_QKV;
#else
    int i = at - in_o, first = 0;
    if (i >= in_x) i -= in_x, first = FIRST_H;
    if (first && i >= in_h) i -= in_h, first = FIRST_QKV;
#endif
    const int from = first + 2 * (four + 4 * i) + rank;
    const uint2 count = load_relaxed2(g.counters + 2 * from);
    const bool there =
        count.x == times * target[0] && (NT == 1 || count.y == times * target[NT - 1]);
    if (!there && !is_lost(memory)) continue;
    const int slot = slot_of(four, at), round = at / CLASS_SLOTS;
    if (round > 0 && !mbar_has_passed(smem + Layout::X_EMPTY + 8 * slot, (round - 1) & 1)) continue;
    copy_fence();
    const u32 bar = smem + Layout::X_FULL + 8 * slot;
    mbar_expect(bar, COLUMN);
    copy_bulk(smem + Layout::X + slot * COLUMN, g.exchange + (i64)from * COLUMN, COLUMN, bar);
    at += CLASS_SLOTS;
  }
}

// ---- warps that add up: `nt` of tokens 8 nt and on
struct Adder {
  const Args& g;
  u8* memory;
  u32 smem, scratch, epoch;
  int rank, nt, lane, step;

  // The factor of results: NaN where a wait for other CTAs was given up.
  DEV float one_or_nan() const {
    return *(volatile u32*)(memory + Layout::LOST) ? __int_as_float(0x7fffffff) : 1.f;
  }
  // Sums of this CTA's next two tiles, in units of 2^-24: lane 4 g + t has rows g and g + 8 of
  // tokens 2 t and 2 t + 1.
  DEV void reduce(float (&first)[4], float (&second)[4]) {
    const int buffer = step % BUFFERS;
    const u32 full = smem + Layout::FULL + 8 * (NT * buffer + nt);
    if (lane == 0) mbar_expect(full, 16 * 512);
    bar_wait(full, step / BUFFERS & 1);
    const u32 from = smem + Layout::SUMS + buffer * Layout::SUM + nt * 512 + 16 * lane;
    add_parts(first, from), add_parts(second, from + 8 * NT * 512);
    __syncwarp();
    // Warps that wait for room overwrite the sums immediately, and an arrival does not wait for
    // reads under way: so its address takes them in, which changes nothing as m < 65536.
    const u32 read = (__float_as_uint(first[0]) | __float_as_uint(second[0])) & (u32)g.m >> 16;
    const u32 empty = smem + Layout::EMPTY + 8 * (BUFFERS * rank + buffer);
    if (lane < 2) bar_arrive_there(remote_address(empty | read, lane));
    ++step;
  }
  DEV void add_parts(float (&y)[4], u32 from) {
    y[0] = y[1] = y[2] = y[3] = 0;
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const uint4 v = load_shared<uint4>(from + part * NT * 512);
      y[0] += __uint_as_float(v.x), y[1] += __uint_as_float(v.y);
      y[2] += __uint_as_float(v.z), y[3] += __uint_as_float(v.w);
    }
  }
  // Tile u of two to where `rows` finds it.
  DEV void lay(const float (&y)[4], int u) {
    float* to = (float*)(memory + scratch) + 2 * (lane & 3) * (SCRATCH_PITCH / 4) + 16 * u;
    const int row = lane >> 2;
    to[row] = y[0], to[row + SCRATCH_PITCH / 4] = y[1];
    to[row + 8] = y[2], to[row + 8 + SCRATCH_PITCH / 4] = y[3];
  }
  // Of token lane / 4 rows 8 (lane % 4) and on of both tiles.
  DEV void rows(float (&v)[8]) {
    __syncwarp();
    const u32 at = smem + scratch + (lane >> 2) * SCRATCH_PITCH + 32 * (lane & 3);
    const uint4 a = load_shared<uint4>(at), b = load_shared<uint4>(at + 16);
    v[0] = __uint_as_float(a.x), v[1] = __uint_as_float(a.y), v[2] = __uint_as_float(a.z);
    v[3] = __uint_as_float(a.w), v[4] = __uint_as_float(b.x), v[5] = __uint_as_float(b.y);
    v[6] = __uint_as_float(b.z), v[7] = __uint_as_float(b.w);
    __syncwarp();
  }
  DEV u32 pack(float lo, float hi) {
    return (u32)float_to_half(lo) | (u32)float_to_half(hi) << 16;
  }
  // What `rows` gave, as a group of the matrix whose columns begin at `first`. Each launch
  // publishes all groups, also unused ones and after a wait was given up: counters count launches.
  DEV void publish(const float (&v)[8], int first, int group) {
    const int q = lane & 3, n = 8 * nt + (lane >> 2), j = group % PUBLISHERS;
    const int column = first + group / PUBLISHERS;
    u8* to = g.exchange + (i64)column * COLUMN;
    const uint4 x = make_uint4(pack(v[0], v[2]), pack(v[1], v[3]), pack(v[4], v[6]),
                               pack(v[5], v[7]));
    *(uint4*)(to + ((4 * (j & 1) + q) * TOKENS + n) * 64 + 16 * ((j >> 1) ^ (q >> 1))) = x;
    float mean = sum8(x);
    mean += __shfl_xor_sync(~0u, mean, 1);
    mean += __shfl_xor_sync(~0u, mean, 2);
    mean *= 1.f / 32;
    if (q == 0) {
      const u16 near = float_to_half(mean);
      u16* means = (u16*)(to + 4096 * NT + 32 * n + 8 * (j >> 1)) + (j & 1);
      means[0] = near, means[2] = float_to_half(mean - half_to_float(near));
    }
    copy_fence();
    __syncwarp();
    if (lane == 0) add_release(g.counters + 2 * column + nt);
  }
  // Adds to the residual and publishes x times the norm's weight; `kind` 0: this layer's, 1: the
  // next one's.
  DEV void publish_normed(float (&residual)[8], const float (&w)[8], int kind, int group) {
    float v[8], squares = 0;
    rows(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      residual[i] += v[i] * 16777216.f;
      squares += residual[i] * residual[i];
      v[i] = residual[i] * w[i] * SHRINK;
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    // They validate themselves, so that no CTA waits for them after x. All lose two bits, whatever
    // the position of the token.
    squares = __uint_as_float(__float_as_uint(squares) & ~3u);
    uint4 own;
    own.x = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane));
    own.y = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 4));
    own.z = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 8));
    own.w = __float_as_uint(__shfl_sync(~0u, squares, 16 * lane + 12));
    own.w |= epoch & 3;
    if (lane < 2) store_relaxed(squares_of(kind, group) + lane, own);
    publish(v, kind ? FIRST_QKV : 0, group);
  }
#if IS_STEP
  // Two tiles of q, k, v, or the first alone, to the CTAs that attend with them.
  DEV void send_heads(float (&y)[4], float (&z)[4], int tile, int tiles, const float (&scale)[2]) {
    const float factor = one_or_nan();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y[i] = y[i] * scale[i & 1] * factor, z[i] = z[i] * scale[i & 1] * factor;
    lay(y, 0), lay(z, 1);
    float v[8];
    rows(v);
    const int n = 8 * nt + (lane >> 2), row = 8 * (lane & 3);
    if (n >= g.m || row >= 16 * tiles) return;
    uint4* to = g.sent_heads + ((i64)n * QKV_TILES * 16 + 16 * tile + row) / 4;
    store_relaxed(to, make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), epoch, 0));
    store_relaxed(to + 1, make_uint4(pack(v[4], v[5]), pack(v[6], v[7]), epoch, 0));
  }
#endif
  DEV uint4* squares_of(int kind, int group) const {
    return g.squares + ((kind * GROUPS_X + group) * 2 + nt) * 2;
  }
  // 1 / rms of tokens 2 t and 2 t + 1 and what the sums lack, from all groups' squares.
  DEV void norms(float (&scale)[2], int kind) {
    float s[8] = {};
#pragma unroll 1
    for (int from = lane; from < GROUPS_X + lane; from += 128) add_squares(s, kind, from);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      for (int o = 16; o; o >>= 1) s[i] += __shfl_xor_sync(~0u, s[i], o);
    const int t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = t < 2 ? (t == 0 ? s[i] : s[2 + i]) : (t == 2 ? s[4 + i] : s[6 + i]);
      scale[i] = rsqrtf(mine * (1.f / HIDDEN) + g.eps) * GROW;
    }
  }
  // Of groups `from`, 32 further, ...: four of them.
  DEV void add_squares(float (&s)[8], int kind, int from) {
    uint4 v[4][2];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int group = from + 32 * (i >> 1);
        v[i >> 1][i & 1] = make_uint4(0, 0, 0, epoch & 3);
        if (GROUPS_X % 128 == 0 || group < GROUPS_X)
          v[i >> 1][i & 1] = load_relaxed(squares_of(kind, group) + (i & 1));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) there &= (v[i >> 1][i & 1].w & 3) == (epoch & 3);
    } while (!__all_sync(~0u, there) && !is_lost(memory));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& own = v[i >> 1][i & 1];
      const int first = 4 * (i & 1);
      s[first] += __uint_as_float(own.x), s[first + 1] += __uint_as_float(own.y);
      s[first + 2] += __uint_as_float(own.z), s[first + 3] += __uint_as_float(own.w & ~3u);
    }
  }
};

DEV void add_all(const Args& g, u8* memory, u32 smem, int rank, int nt, int lane) {
  const int number = number_of(blockIdx.x), n = 8 * nt + (lane >> 2);
  auto first_of = [&](int round) { return 32 * (CTAS * round + number) + 8 * (lane & 3); };
  float norm[8] = {};  // of the next sums: from cold memory, so long before it is needed
#if IS_STEP
  const float *mlp_norm = g.layers->mlp_norm, *next_norm = g.layers->next_norm;
#else
  const float *mlp_norm = g.mlp_norm, *next_norm = g.next_norm;
#endif
  if (owns(number, 0, GROUPS_X)) load8(norm, mlp_norm + first_of(0));
  cluster_sync();
  wait_for_inputs();
  u32* launches = g.launches + nt * CTAS + blockIdx.x;
  const u32 epoch = 1 + __ldcg(launches);
  bar_sync(2, 32 * (1 + NT));
#if !IS_STEP
  if (lane == 0) *launches = epoch;
#endif
  Adder adder = {g, memory, smem, (u32)(Layout::SCRATCH + nt * 8 * SCRATCH_PITCH), epoch,
                 rank, nt, lane, 0};
  float y[4], z[4], scale[2];
  auto add_to_residual = [&](int kind, const float* weights, const float* next_weights) {
#pragma unroll 1
    for (int round = 0; round < ROUNDS_X && owns(number, round, GROUPS_X); ++round) {
      float* x = g.x + (i64)n * HIDDEN + first_of(round);
      float residual[8] = {};
      if (n < g.m) load8(residual, x);
      const int group = CTAS * round + number;
      adder.reduce(y, z);
#if RANKS > 1
      add_ranks(g, memory, y, z, kind, group, nt, epoch, lane);
#endif
      adder.lay(y, 0), adder.lay(z, 1);
      adder.publish_normed(residual, norm, kind, group);
      const bool has_more = owns(number, round + 1, GROUPS_X);
      load8(norm, has_more ? weights + first_of(round + 1) : next_weights + first_of(0));
      if (n >= g.m) continue;
      const float factor = adder.one_or_nan();
#pragma unroll
      for (int i = 0; i < 8; ++i) residual[i] *= factor;
      *(float4*)x = make_float4(residual[0], residual[1], residual[2], residual[3]);
      *(float4*)(x + 4) = make_float4(residual[4], residual[5], residual[6], residual[7]);
    }
  };
#if IS_STEP
#pragma unroll 1
  for (int layer = 0; layer < g.num_layers; ++layer, ++adder.epoch) {
  const bool is_last = layer + 1 == g.num_layers;
  lane = adder.lane = unknown(lane);  // no address is kept in registers for all layers
  const float* after = g.layers[is_last ? layer : layer + 1].mlp_norm;
#else
  const float* after = next_norm;
#endif
  add_to_residual(0, mlp_norm, next_norm);
  adder.norms(scale, 0);
#pragma unroll 1
  for (int round = 0; round < ROUNDS_H && owns(number, round, GROUPS_H); ++round) {
#pragma unroll 1
    for (int u = 0; u < 2; ++u) {
      adder.reduce(y, z);  // gate, up
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gate = y[i] * scale[i & 1];
        y[i] = gate / (1.f + __expf(-gate)) * (z[i] * scale[i & 1]);
      }
      adder.lay(y, u);
    }
    float h[8];
    adder.rows(h);
    adder.publish(h, FIRST_H, CTAS * round + number);
  }
  add_to_residual(1, next_norm, after);
#if IS_STEP
  if (is_last) break;
  mlp_norm = after, next_norm = g.layers[layer + 1].next_norm;
#endif
#if !IS_LAST
  adder.norms(scale, 1);
#if IS_STEP
  auto store = [&](float (&y)[4], float (&z)[4], int tile, int tiles) {
    adder.send_heads(y, z, tile, tiles, scale);
  };
#else
  auto store_tile = [&](const float (&y)[4], int tile) {
    const float factor = adder.one_or_nan();
    u16* to = g.heads + 16 * tile + (lane >> 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int token = 8 * nt + 2 * (lane & 3) + (k & 1);
      if (token < g.m)
        to[(i64)token * 16 * QKV_TILES + 8 * (k >> 1)] =
            float_to_half(y[k] * scale[k & 1] * factor);
    }
  };
  auto store = [&](const float (&y)[4], const float (&z)[4], int tile, int tiles) {
    store_tile(y, tile);
    if (tiles == 2) store_tile(z, tile + 1);
  };
#endif
#pragma unroll 1
  for (int round = 0; round < ROUNDS_QKV && owns(number, round, QKV_TILES / 2); ++round) {
    adder.reduce(y, z);
    store(y, z, 2 * (CTAS * round + number), 2);
  }
  const int single = 2 * CTAS * ROUNDS_QKV + number;
  if (HAS_SINGLES && single < QKV_TILES) {
    adder.reduce(y, z);
#pragma unroll
    for (int k = 0; k < 4; ++k) y[k] += z[k];
    store(y, z, single, 1);
  }
#endif
#if IS_STEP
  }
  if (lane == 0) *launches = epoch - 1 + g.num_layers;  // all warps have looked before
#endif
}
