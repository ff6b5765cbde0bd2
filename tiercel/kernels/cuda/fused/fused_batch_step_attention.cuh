// fused_batch_step: norm, rotation, cache write and attention of a step in which each request has
// one new token.
//
// A request's older keys are cut into parts of SPAN keys (at least one part), whatever the other
// requests are. A cluster takes a part and a key/value head ("item"), then the next one for it. Its
// 32 warps take every 32nd tile of 16 keys, each with maximum, sum and outputs of its own. Then a
// warp for each query head adds up its CTA's 16 parts and, in the first CTA and the first part, the
// new key, which comes from shared memory; the CTAs exchange half of the heads (`send_there`). The
// owner of a head publishes it as columns that the output projection multiplies. Where a request has
// several parts, it sends the sums to the cluster of the first part, which adds them in order. So a
// token's bits depend on its own request alone.
//
// Keys of a tile go to shared memory, where each lane reads what it has copied itself, its values to
// registers; those of a first tile before q, k and v of the step are there, which come as words with
// the count of layers and so are waited for without a fence.
//
// Lane 4 g + t. Scores: heads are the rows g of a product, keys its columns; of key 8 a + g a lane
// has 8 of each 32 dimensions. Outputs: dimensions are rows, heads columns; of four keys a lane has
// dimensions 8 g to 8 g + 7 of each half, so weights of scores are an operand as they are.
#pragma once

#include "fused/fused_layer_tail_products.cuh"
#include "include/approx_ptx.cuh"
#include "include/global_ptx.cuh"

#define CLUSTERS (CTAS / 2)
#define KEYS 16                    // of a tile
#define STRIDE (2 * WARPS * KEYS)  // from a warp's tile to its next one
#define NEG_INF __int_as_float(0xff800000)

// In the place of columns of x, which are read before the attention, and which nothing is copied to
// before it is over.
struct AttentionLayout {
  static constexpr int QUERY_PITCH = 2 * D + 64, QUERIES = Layout::X;
  // By a turn's parity and head: the other CTA's outputs, maximum and sum.
  static constexpr int REMOTE_HEAD = 4 * D + 16, REMOTE = QUERIES + GROUP * QUERY_PITCH;
  static constexpr int STATS = REMOTE + 2 * GROUP * REMOTE_HEAD;  // maximum and sum by warp, head
  static constexpr int TILE = 2 * KEYS * D, TILES = STATS + WARPS * GROUP * 8;  // keys, by warp
  // By warp and head. Where there is no room for both, keys of a next item are asked for late.
  static constexpr int PART_PITCH = 4 * D, SIZE = WARPS * GROUP * PART_PITCH;
  static constexpr int END = Layout::SUMS, BEHIND = TILES + WARPS * TILE;
  static constexpr bool HAS_ROOM = BEHIND + SIZE <= END;
  static constexpr int PARTS = HAS_ROOM ? BEHIND : TILES;
};
static_assert(AttentionLayout::BEHIND <= AttentionLayout::END &&
                  AttentionLayout::PARTS + AttentionLayout::SIZE <= AttentionLayout::END,
              "attention in the place of x");
static_assert(GROUP >= 2 && GROUP <= 8 && HEADS % KV_HEADS == 0 && BLOCK_SIZE % KEYS == 0 &&
                  SPAN % STRIDE == 0 && 16 * QKV_TILES == ALL_HEADS * D,
              "heads");

struct Item { int token, kv_head, part, parts; };

struct Attention {
  const Args& g;
  u8* memory;
  u32 smem;
  int rank, warp, lane;
  const Layer* layer;  // in shared memory
  int number;          // of it
  int turn;            // items of this cluster so far, of all layers

  Item item;
  int first, end;      // of the item's older keys: this warp's tile, and all
  int block, next_block;  // of that tile, and of the warp's next one
  uint4 v[4][2];       // of a tile
  u32 head[2];         // of q, k or v: two dimensions of each half
  float norm[4];       // of the same dimensions, where the head is one of q or k
  float2 cos, sin;

  DEV const Plan& plan() const { return *(const Plan*)(memory + Layout::PLAN); }
  DEV const Request& request(int token) const { return plan().requests[token]; }
  // A tile's in shared memory: this lane's.
  DEV u32 keys() const {
    return smem + AttentionLayout::TILES + warp * AttentionLayout::TILE + 16 * lane;
  }
  DEV int num_items() const { return plan().ends[g.m - 1] * KV_HEADS; }
  // The cluster's item of a round.
  DEV bool take(int round) {
    const int index = CLUSTERS * round + ((int)blockIdx.x >> 1);
    if (index >= num_items()) return false;
    const int at = index / KV_HEADS, end = plan().ends[min(lane, g.m - 1)];
    const int token = __popc(__ballot_sync(~0u, end <= at));
    const int begin = token ? plan().ends[token - 1] : 0;
    item = {token, index % KV_HEADS, at - begin, plan().ends[token] - begin};
    return true;
  }
  DEV u32 count_of(int token) const { return plan().counts[token >> 3]; }

  // The item's first tile of this warp, and what its head needs besides q, k and v.
  DEV void begin() {
    const Request& own = request(item.token);
    first = item.part * SPAN + KEYS * (2 * warp + rank);
    end = min(own.older, (item.part + 1) * SPAN);
    block = look_up(first), next_block = look_up(first + STRIDE);
    if (!stages()) return;
    const float* angles = g.angles + (i64)own.position * D + 2 * lane;
    cos = *(const float2*)angles, sin = *(const float2*)(angles + D / 2);
#if HAS_NORMS
    const float* weights = (warp < GROUP ? layer->q_norm : layer->k_norm) + 2 * lane;
    const float2 low = *(const float2*)weights, high = *(const float2*)(weights + D / 2);
    norm[0] = low.x, norm[1] = low.y, norm[2] = high.x, norm[3] = high.y;
#endif
  }
  DEV int look_up(int key) const {
    return key < end ? __ldg(request(item.token).table + key / BLOCK_SIZE) : 0;
  }
  // A place of 16 bytes of the cache: of a key of the tile that begins at `first`.
  DEV i64 place(int key, int dim) const {
    const i64 slot = (i64)block * BLOCK_SIZE + first % BLOCK_SIZE + key;
    return (slot * KV_HEADS + item.kv_head) * D + dim;
  }
  // Nothing but older keys is read: what follows may be another request's, or NaN.
  DEV void copy_keys() {
    const u16* from = hidden(layer->k_cache + place(lane >> 2, 8 * (lane & 3)));
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        copy16_of(keys() + 512 * (4 * a + j), from + 8 * a * KV_HEADS * D + 32 * j,
                  first + 8 * a + (lane >> 2) < end ? 16 : 0);
    copy_commit();
  }
  DEV void load_values() {
    const u16* from = hidden(layer->v_cache + place(2 * (lane & 3), 8 * (lane >> 2)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * (i >> 1) + (i & 1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        v[i][half] = first + 2 * (lane & 3) + key < end
                         ? load_no_allocate<uint4>(from + key * KV_HEADS * D + 64 * half)
                         : make_uint4(0, 0, 0, 0);
    }
  }
  // Keys and values of the item's first tile.
  DEV void ask() {
    if (first >= end) return;
    copy_keys();
    load_values();
  }
  // Which head this warp stages: of the item's queries, then in the first CTA of the first part its
  // key, its value.
  DEV bool stages() const { return warp < GROUP + (rank == 0 && item.part == 0 ? 2 : 0); }
  // Of a later layer: waits until all of it has been sent.
  DEV void receive() {
    if (!stages()) return;
    const int at = warp < GROUP ? item.kv_head * GROUP + warp
                                : HEADS + (warp - GROUP) * KV_HEADS + item.kv_head;
    if (number == 0) {
      const u32* from = (const u32*)g.heads + ((i64)item.token * ALL_HEADS + at) * (D / 2) + lane;
      head[0] = __ldcg(from), head[1] = __ldcg(from + D / 4);
      return;
    }
    const uint4* from = g.sent_heads + ((i64)item.token * ALL_HEADS + at) * (D / 4) + (lane >> 1);
    const u32 epoch = count_of(item.token) + number;
    uint4 low, high;
    do {
      low = load_relaxed(from), high = load_relaxed(from + D / 8);
    } while (!__all_sync(~0u, low.z == epoch && high.z == epoch) && !is_lost(memory));
    head[0] = lane & 1 ? low.y : low.x, head[1] = lane & 1 ? high.y : high.x;
  }

  // The head of q or k, normed and rotated: this lane's dimensions 2 l and 2 l + 1 of each half.
  DEV void rotate(u32 (&x)[2]) const {
    float a[2], b[2];
    unpack_fp16(head[0], a[0], a[1]), unpack_fp16(head[1], b[0], b[1]);
#if HAS_NORMS
    float squares = a[0] * a[0] + a[1] * a[1] + b[0] * b[0] + b[1] * b[1];
#pragma unroll
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float scale = rsqrtf(squares * (1.f / D) + g.head_eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) a[i] *= scale * norm[i], b[i] *= scale * norm[2 + i];
#endif
    x[0] = pack_fp16(a[0] * cos.x - b[0] * sin.x, a[1] * cos.y - b[1] * sin.y);
    x[1] = pack_fp16(b[0] * cos.x + a[0] * sin.x, b[1] * cos.y + a[1] * sin.y);
  }
  DEV void keep(const u32 (&x)[2], u32 at) const {
    store_shared<u32>(smem + at + 4 * lane, x[0]), store_shared<u32>(smem + at + D + 4 * lane, x[1]);
  }
  // The item's queries, and its new key and value, to shared memory and to the cache.
  DEV void stage_heads() const {
    if (!stages()) return;
    u32 x[2] = {head[0], head[1]};
    const int which = warp - GROUP;  // 0: the key, 1: the value
    if (which <= 0) rotate(x);
    if (which < 0) {
      keep(x, AttentionLayout::QUERIES + warp * AttentionLayout::QUERY_PITCH);
      return;
    }
    keep(x, Layout::NEW + 2 * D * which);
    const i64 slot = request(item.token).slot;
    if (slot < 0) return;
    u32* to = (u32*)((which == 0 ? layer->k_cache : layer->v_cache) +
                     (slot * KV_HEADS + item.kv_head) * D);
    to[lane] = x[0], to[D / 4 + lane] = x[1];
  }

  // Scores of the tile in `keys` become weights, two operands; returns what older sums are multiplied
  // by.
  DEV float weigh(u32 (&weights)[2], float& most, float& sum) const {
    const int row = min(lane >> 2, GROUP - 1);  // rows without a head repeat the last one
    const u32 query = smem + AttentionLayout::QUERIES + row * AttentionLayout::QUERY_PITCH +
                      16 * (lane & 3);
    float s[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 q = load_shared<uint4>(query + 64 * j);
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const uint4 k = load_shared<uint4>(keys() + 512 * (4 * a + j));
        mma(s[a], q.x, 0, q.y, 0, k.x, k.y);
        mma(s[a], q.z, 0, q.w, 0, k.z, k.w);
      }
    }
    float largest = most;
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_seen = first + 8 * a + 2 * (lane & 3) + i < end;
        s[a][i] = is_seen ? s[a][i] * g.scale_log2 : NEG_INF;
        largest = fmaxf(largest, s[a][i]);
      }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float decay = exp2_approx(most - largest);
    most = largest, sum *= decay;
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const float x = exp2_approx(s[a][0] - most), y = exp2_approx(s[a][1] - most);
      sum += x + y;
      weights[a] = pack_fp16(x, y);
    }
    return decay;
  }
  // The next tile's keys are under way while the values of one are multiplied.
  DEV void step_on() {
    first += STRIDE;
    block = next_block, next_block = look_up(first + STRIDE);
    if (first < end) copy_keys();
  }
  // Every 32nd tile from this warp's first one on, whose keys and values have been asked for.
  DEV void attend() {
    float most = NEG_INF, sum = 0, acc[8][4] = {};
    if (first < end) {
      u32 weights[2];
      copy_wait<0>();
      weigh(weights, most, sum);
      step_on();
#pragma unroll 1
      while (true) {
#pragma unroll
        for (int d = 0; d < 8; ++d) {
          const int half = d >> 2, j = d & 3;
          const u32 x0 = word(v[0][half], j), x1 = word(v[1][half], j);
          const u32 x2 = word(v[2][half], j), x3 = word(v[3][half], j);
          mma(acc[d], __byte_perm(x0, x1, 0x5410), __byte_perm(x0, x1, 0x7632),
              __byte_perm(x2, x3, 0x5410), __byte_perm(x2, x3, 0x7632), weights[0], weights[1]);
        }
        if (first >= end) break;
        load_values();
        copy_wait<0>();
        const float decay = weigh(weights, most, sum);
        step_on();
        const float even = __shfl_sync(~0u, decay, 8 * (lane & 3));
        const float odd = __shfl_sync(~0u, decay, 8 * (lane & 3) + 4);
#pragma unroll
        for (int d = 0; d < 8; ++d)
          acc[d][0] *= even, acc[d][1] *= odd, acc[d][2] *= even, acc[d][3] *= odd;
      }
    }
    if (!AttentionLayout::HAS_ROOM) bar_sync(1, 32 * WARPS);  // keys are read
    if (most != NEG_INF) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = 2 * (lane & 3) + h;
        if (head >= GROUP) break;
        u8* to = memory + AttentionLayout::PARTS +
                 (warp * GROUP + head) * AttentionLayout::PART_PITCH + 32 * (lane >> 2);
#pragma unroll
        for (int d = 0; d < 8; d += 2)
          *(float4*)(to + 2 * D * (d >> 2) + 16 * (d >> 1 & 1)) =
              make_float4(acc[d][h], acc[d][2 + h], acc[d + 1][h], acc[d + 1][2 + h]);
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if ((lane & 3) == 0 && lane >> 2 < GROUP)
      *(float2*)(memory + AttentionLayout::STATS + 8 * (warp * GROUP + (lane >> 2))) =
          make_float2(most, sum);
  }

  // Outputs of head `warp`, dimensions 4 l to 4 l + 3 of lane l, with what they are to be divided by.
  struct Sums { float y[4], most, sum; };
  DEV static Sums add(const Sums& a, const Sums& b) {
    Sums all;
    all.most = fmaxf(a.most, b.most);
    const float of_a = exp2_approx(a.most - all.most), of_b = exp2_approx(b.most - all.most);
    all.sum = a.sum * of_a + b.sum * of_b;
#pragma unroll
    for (int i = 0; i < 4; ++i) all.y[i] = a.y[i] * of_a + b.y[i] * of_b;
    return all;
  }
  // Over this CTA's warps in order.
  DEV Sums add_warps() const {
    Sums all = {{0, 0, 0, 0}, NEG_INF, 0};
    float2 own = make_float2(NEG_INF, 0);
    if (lane < WARPS)
      own = *(const float2*)(memory + AttentionLayout::STATS + 8 * (lane * GROUP + warp));
    const bool has_new = rank == 0 && item.part == 0;
    const u32 new_key = smem + Layout::NEW + 8 * lane;
    float score = 0;
    if (has_new) {
      const uint2 q = load_shared<uint2>(smem + AttentionLayout::QUERIES +
                                         warp * AttentionLayout::QUERY_PITCH + 8 * lane);
      const uint2 key = load_shared<uint2>(new_key);
      score = dot(q.x, key.x) + dot(q.y, key.y);
#pragma unroll
      for (int step = 16; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
      score *= g.scale_log2, all.most = score;
    }
    all.most = fmaxf(all.most, own.x);
#pragma unroll
    for (int step = 16; step; step /= 2)
      all.most = fmaxf(all.most, __shfl_xor_sync(~0u, all.most, step));
    const float shift = all.most == NEG_INF ? 0.f : all.most;
    const float weight = exp2_approx(own.x - shift);
    all.sum = weight * own.y;
#pragma unroll
    for (int step = 16; step; step /= 2) all.sum += __shfl_xor_sync(~0u, all.sum, step);
    const u8* from = memory + AttentionLayout::PARTS + warp * AttentionLayout::PART_PITCH + 16 * lane;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) {
      const float w = __shfl_sync(~0u, weight, part);
      if (w == 0.f) continue;  // a warp without keys has stored nothing
      const float4 x = *(const float4*)(from + part * GROUP * AttentionLayout::PART_PITCH);
      all.y[0] += w * x.x, all.y[1] += w * x.y, all.y[2] += w * x.z, all.y[3] += w * x.w;
    }
    if (has_new) {
      const float w = exp2_approx(score - shift);
      const uint2 value = load_shared<uint2>(new_key + 2 * D);
      float x[4];
      unpack_fp16(value.x, x[0], x[1]), unpack_fp16(value.y, x[2], x[3]);
      all.sum += w;
#pragma unroll
      for (int i = 0; i < 4; ++i) all.y[i] += w * x[i];
    }
    return all;
  }
  DEV float dot(u32 a, u32 b) const {
    float x[2], y[2];
    unpack_fp16(a, x[0], x[1]), unpack_fp16(b, y[0], y[1]);
    return x[0] * y[0] + x[1] * y[1];
  }
  // Until then the other CTA may read columns of x where sums are to go.
  DEV void wait_for_other() const { bar_wait(smem + Layout::READY, number & 1); }
  // Which CTA of the cluster has head `warp` in the end.
  DEV int owner() const { return 2 * warp < GROUP ? 0 : 1; }
  // Both CTAs' sums of head `warp` meet in one of them, which passes them on.
  DEV void finish() const {
    const int parity = turn & 1;
    const Sums own = add_warps();
    const u32 remote = smem + AttentionLayout::REMOTE +
                       (parity * GROUP + warp) * AttentionLayout::REMOTE_HEAD;
    const u32 bar = smem + Layout::MET + 8 * (GROUP * parity + warp);
    if (rank != owner()) {
      wait_for_other();
      const float stats[4] = {own.most, own.sum, 0, 0};
      send_there(remote_address(remote + 16 * lane, owner()), own.y, remote_address(bar, owner()));
      if (lane == 0)
        send_there(remote_address(remote + 4 * D, owner()), stats, remote_address(bar, owner()));
      return;
    }
    if (lane == 0) mbar_expect(bar, AttentionLayout::REMOTE_HEAD);
    bar_wait(bar, turn >> 1 & 1);
    const float4 x = load_shared<float4>(remote + 16 * lane);
    const float4 stats = load_shared<float4>(remote + 4 * D);
    const Sums all = add(own, {{x.x, x.y, x.z, x.w}, stats.x, stats.y});
    if (item.parts == 1)
      publish(all);
    else
      send_part(all);
  }
  // Sums of a part: two words of outputs, its maximum or its sum, and the epoch.
  DEV uint4* part_of(int part) const {
    const i64 place = (i64)(item.token * KV_HEADS + item.kv_head) * g.most_parts + part;
    return g.sent_parts + (place * GROUP + warp) * 64 + lane;
  }
  DEV void send_part(const Sums& all) const {
    const u32 epoch = count_of(item.token) + number + 1;
    store_relaxed(part_of(item.part), make_uint4(__float_as_uint(all.y[0]), __float_as_uint(all.y[1]),
                                                 __float_as_uint(all.most), epoch));
    store_relaxed(part_of(item.part) + 32,
                  make_uint4(__float_as_uint(all.y[2]), __float_as_uint(all.y[3]),
                             __float_as_uint(all.sum), epoch));
  }
  DEV Sums receive_part(int part) const {
    const u32 epoch = count_of(item.token) + number + 1;
    uint4 a, b;
    do {
      a = load_relaxed(part_of(part)), b = load_relaxed(part_of(part) + 32);
    } while (!__all_sync(~0u, a.w == epoch && b.w == epoch) && !is_lost(memory));
    return {{__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(b.x), __uint_as_float(b.y)},
            __uint_as_float(a.z), __uint_as_float(b.z)};
  }
  // As `Adder::publish`, of 4 groups of 32 columns. Every column's counter grows by OUTPUTS in a
  // layer: a group's one for each token, those that are not there too.
  DEV void publish(const Sums& all) const {
    const int head = item.kv_head * GROUP + warp, n = item.token, column = FIRST_O + head / 2;
    const int j = 4 * (head & 1) + (lane >> 3), q = lane >> 1 & 3;
    u8* to = g.exchange + (i64)column * COLUMN;
    const float scale = 1.f / all.sum;
    float y[4], z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y[i] = all.y[i] * scale, z[i] = __shfl_down_sync(~0u, y[i], 1);
    const uint4 x = make_uint4(pack_fp16(y[0], y[2]), pack_fp16(y[1], y[3]), pack_fp16(z[0], z[2]),
                               pack_fp16(z[1], z[3]));
    float mean = sum8(x);
    mean += __shfl_xor_sync(~0u, mean, 2);
    mean += __shfl_xor_sync(~0u, mean, 4);
    mean *= 1.f / 32;
    if ((lane & 1) == 0)
      *(uint4*)(to + ((4 * (j & 1) + q) * TOKENS + n) * 64 + 16 * ((j >> 1) ^ (q >> 1))) = x;
    if ((lane & 7) == 0) {
      const u16 near = float_to_half(mean);
      u16* means = (u16*)(to + 4096 * NT + 32 * n + 8 * (j >> 1)) + (j & 1);
      means[0] = near, means[2] = float_to_half(mean - half_to_float(near));
    }
    copy_fence();
    __syncwarp();
    const int first = n & ~7, absent = n == first ? max(first + 8 - g.m, 0) : 0;
    if (lane == 0) add_release(g.counters + 2 * column + (n >> 3), 4 * (1 + absent));
  }
  // The attention of a layer; `ahead` asks for what is needed after it.
  template <class Ahead> DEV void run(Ahead ahead) {
    if (warp == 0 && lane == 0) bar_arrive_there(remote_address(smem + Layout::READY, rank ^ 1));
    turn = number * ((num_items() - ((int)blockIdx.x >> 1) + CLUSTERS - 1) / CLUSTERS);
    int round = 0;
    bool has_item = take(0);
    if (has_item) begin(), ask();
    ahead();
    if (has_item) receive(), stage_heads();
#pragma unroll 1
    while (has_item) {
      bar_sync(1, 32 * WARPS);  // heads are staged
      attend();
      bar_sync(1, 32 * WARPS);
      const Attention done = *this;
      ++turn;
      has_item = take(++round);
      if (has_item) begin();
      if (has_item && AttentionLayout::HAS_ROOM) ask();
      if (warp < GROUP) done.finish();
      if (!has_item) break;
      receive();
      bar_sync(1, 32 * WARPS);  // queries and parts are read
      if (!AttentionLayout::HAS_ROOM) ask();
      stage_heads();
    }
    if (warp == 0) wait_for_other();  // so that no phase passes without a wait
    if (warp >= GROUP || rank != owner()) return;
    for (round = 0; take(round); ++round) {
      if (item.part > 0 || item.parts == 1) continue;
      Sums all = receive_part(0);
      for (int part = 1; part < item.parts; ++part) all = add(all, receive_part(part));
      publish(all);
    }
  }
};
