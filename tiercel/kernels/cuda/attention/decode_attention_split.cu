// decode_attention, first kernel: attention of few new tokens per request over the paged cache.
// Writes results of splits, and of whole rows. Layouts: at the parameters. Host side, floor:
// decode_attention_split.py.
//
// A unit of work is a split of one request, one key/value head and one tile of ROWS rows (a row is
// a query of a head of the group). Units are ordered by (request, head, tile of rows, split). A
// unit takes as many places as it has tiles. Each CTA takes the units that begin in its equal share
// of all places. So any mix of lengths spreads evenly, by lengths that only the device knows. Which
// CTA computes a unit is no part of its result, nor is their order (decode_attention_walk.cuh has a
// second one).
//
// With FOLDS, a CTA adds up groups of splits as far as it has them from their first one on, and
// rows as far as it has them from their first split on (decode_attention_sums.cuh). All other
// splits are partial results of their own, for decode_attention_merge.cu to add in the same order.
//
// Keys and values stream through a ring of STAGES tiles that runs ahead over units. Products are
// transposed, keys and value columns as their 16 rows and queries as their 8 columns: 4 heads cost
// 8 columns. A warp scores 16 of each 64 keys; maxima and weights meet in shared memory; then each
// warp multiplies all keys with its quarter of the value columns. So a unit's sums over keys have
// one order, whatever the number of rows.
//
// Copies queue for some 4 us, and what else is read from memory waits in the same queue: blocks are
// looked up a tile early, the next request's table and the first queries come to the cache early,
// and lengths are read once, to shared memory. Before the wait no more than a tile of copies is
// under way, for what the kernel ahead reads at its end.
//
// With dependent launch, lengths, tables and keys older than this step are read before the kernel
// ahead has ended: they must have been written before that one began (docs/notes/attention.md).
//
// Macros: D (head_dim: 64, 128, 256), TILE (keys: 64, 128), BLOCK_SIZE (of the cache, a multiple of
// 64), NR (tiles of 8 rows: 1 to 4), STAGES, CTAS (an SM, for the registers), IS_BF16, FOLDS, KEPT
// (requests whose lengths have room in shared memory), SHARED_SUMS.
#include "attention/decode_attention_ptx.cuh"
#include "attention/decode_attention_splits.cuh"
#include "attention/decode_attention_results.cuh"
#include "attention/decode_attention_sums.cuh"
#include "attention/decode_attention_walk.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) decode_attention_split(
    const u16* q,         // (tokens, heads, D)
    const u16* k_cache,   // (blocks, block_size, kv_heads, D)
    const u16* v_cache,   // like k_cache
    const int* tables,    // (engine rows, max_blocks)
    const int* rows,      // (reqs,)
    const int* cu_seqlens,  // (reqs + 1,)
    const int* seq_lens,  // (reqs,)
    float* partials,      // (tokens * heads, slots, D)
    float2* stats,        // (tokens * heads, slots): maximum and sum
    u16* out,             // (tokens * heads, D), or decode_attention_results.cuh
    i64 q_token_stride, i64 q_head_stride, i64 table_stride,  // elements
    int reqs, int kv_heads, int group, int slots, int window,
#if IMAGE
    int tile,  // tokens of the image's
#endif
    float scale_log2,
    int heads_inside) {  // of splits, see decode_attention_walk.cuh
  extern __shared__ __align__(1024) unsigned char memory[];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // A constant that the compiler does not make again and again, from a slow register.
  const u32 smem = __shfl_sync(~0u, shared_address(memory), 0);
  launch_dependents();
#if IMAGE
  const Results into{out, kv_heads * group, tile};
#else
  const Results into{out};
#endif
  int *kept = (int*)(memory + LENGTHS), *results = (int*)(memory + RESULTS);
  const bool is_kept = reqs <= KEPT;
  if (is_kept) {
    for (int i = tid; i <= reqs; i += 32 * WARPS) {
      const int request = min(i, reqs - 1);
      const int row = rows[request], seq_len = seq_lens[request], first_token = cu_seqlens[i];
      kept[2 * KEPT + i] = first_token;
      if (i < reqs) kept[i] = row, kept[KEPT + i] = seq_len;
    }
    __syncthreads();
  }
  const Lengths lengths{is_kept ? kept : rows, is_kept ? kept + 2 * KEPT : cu_seqlens,
                        is_kept ? kept + KEPT : seq_lens, reqs, kv_heads, group, window,
                        heads_inside};

  Walk ahead;
  ahead.start(lengths, blockIdx.x);
  Walk here = ahead;

  // Row / group by a product, exact for rows * group < 2**20.
  const u32 by_group = quotient(1 << 20, group) + 1;
  auto tokens_of = [&](int row) { return (int)(row * by_group >> 20); };

  const int piece = tid % PIECES, line = tid / PIECES;
  const i64 key_stride = (i64)kv_heads * D;
  auto find_blocks = [&](const Walk& at, int (&blocks)[BLOCKS]) {
    const int* table = tables + at.table_row * table_stride;
    const int* from = table + (u32)at.tile * TILE / BLOCK_SIZE;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      blocks[b] = at.tile * TILE + b * SPAN < at.of.seq_len ? from[b] : 0;
  };
  int blocks[BLOCKS];  // of the tile `ahead`: looked up before they are needed
  // A look-up in memory takes 2 us while keys stream.
  auto ask_for_next_table = [&]() {
    const int next = ahead.request + 1;
    if (tid || next >= reqs) return;
    Request of;
    of.load(next, lengths.cu_seqlens, lengths.seq_lens, window);
    if (of.seq_len > 0)
      prefetch_line(tables + lengths.rows[next] * table_stride + of.low / BLOCK_SIZE);
  };
  // The address of this thread's piece of row `row` of a unit, or null.
  auto find_query = [&](const Walk& at, int row) {
    const int packed = at.row_tile * ROWS + row, query = tokens_of(packed);
    const int head = at.kv_head * group + packed - query * group;
    const i64 from = (at.of.first_token + query) * q_token_stride + head * q_head_stride;
    return query < at.of.queries ? q + from + piece * 8 : nullptr;
  };
  // The tile `ahead`, its queries where a unit begins and needs them; then the next one. Two
  // groups of copies, keys and values, so that scores begin when half of a tile is there; the
  // second one is left open. Paced, a half waits for the one before the last one.
  auto fetch = [&](int slot, bool has_queries, bool is_paced) {
    const u32 to = smem + slot * STAGE_BYTES;
    const int key = ahead.tile * TILE;
    const bool is_whole = key >= ahead.of.low && key + TILE <= ahead.of.seq_len;
    const int in_block = BLOCKS == 1 ? key % BLOCK_SIZE : 0;
    if (has_queries && ahead.has_new_queries(lengths)) {
#pragma unroll
      for (int i = 0; i < ROWS; i += LINES) {
        if (ROWS % LINES && line + i >= ROWS) break;
        const u16* from = find_query(ahead, line + i);
        copy16_of(to + 2 * KV_BYTES + swizzled(line + i, piece, PIECES), from ? from : q,
                  from != nullptr ? 16 : 0);
      }
    }
    if (is_whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u16* cache = half ? v_cache : k_cache;
        const u32 to_half = to + half * KV_BYTES;
        if (is_paced) copy_wait<1>();
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
          const i64 first = (i64)blocks[b] * BLOCK_SIZE + in_block + line;
          const u16* from = cache + first * key_stride + ahead.kv_head * D + piece * 8;
#pragma unroll
          for (int i = 0; i < SPAN; i += LINES) {
            copy16(to_half + swizzled(line + b * SPAN + i, piece, PIECES), from);
            from += LINES * key_stride;
          }
        }
        if (half == 0) copy_commit();
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < TILE; i += LINES) {
        // Nothing outside the visible keys is read: it may be another request's, or NaN.
        const int row = i + line;
        const bool is_read = key + row >= ahead.of.low && key + row < ahead.of.seq_len;
        const i64 first = (i64)(i < SPAN ? blocks[0] : blocks[BLOCKS - 1]) * BLOCK_SIZE + in_block;
        const i64 from = (first + row % SPAN) * key_stride + ahead.kv_head * D + piece * 8;
        const u32 there = to + swizzled(row, piece, PIECES);
        copy16_of(there, is_read ? k_cache + from : k_cache, is_read ? 16 : 0);
        copy16_of(there + KV_BYTES, is_read ? v_cache + from : v_cache, is_read ? 16 : 0);
      }
      copy_commit();
    }
    const int request = ahead.request;
    ahead.advance(lengths);
    if (ahead.is_over()) return;
    find_blocks(ahead, blocks);
    if (ahead.request != request) ask_for_next_table();
  };
  auto load_queries = [&]() {  // into slot 0
    uint4 x[(ROWS + LINES - 1) / LINES];
#pragma unroll
    for (int i = 0; i < ROWS; i += LINES) {
      if (ROWS % LINES && line + i >= ROWS) break;
      const u16* from = find_query(here, line + i);
      x[i / LINES] = from ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += LINES) {
      if (ROWS % LINES && line + i >= ROWS) break;
      store_shared<uint4>(smem + 2 * KV_BYTES + swizzled(line + i, piece, PIECES), x[i / LINES]);
    }
  };

  // The first tiles: keys of earlier steps before the wait, other keys after it. The queries of the
  // first unit go through registers, so that they wait for no tile.
  if (!ahead.is_over()) find_blocks(ahead, blocks);
  bool has_waited = false;
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    if (!ahead.is_over()) {
      const bool is_new = ahead.tile * TILE + TILE > ahead.of.seq_len - ahead.of.queries;
      if (!has_waited && (is_new || (i > 0 && ahead.has_new_queries(lengths)))) {
        wait_for_inputs();
        has_waited = true;
      }
      fetch(i, i > 0, !has_waited);
    } else {
      copy_commit();  // tiles are counted by groups
    }
    copy_commit();
  }
  if (!here.is_over()) {
    ask_for_next_table();
#pragma unroll
    for (int i = 0; i < ROWS; i += LINES) {
      const u16* from = line + i < ROWS ? find_query(here, line + i) : nullptr;
      if (from && piece % 8 == 0 && !has_waited) prefetch_line(from);
    }
  }
  if (!has_waited) wait_for_inputs();
  if (!here.is_over()) load_queries();

  // Lane 4 g + t holds rows 2 t and 2 t + 1 of a tile of 8, and keys or columns g and g + 8 of 16.
  const int group_lane = lane >> 2, row_lane = 2 * (lane & 3);
  // Rows begin at multiples of their length, a power of 2: another piece is an exclusive or.
  const u32 key_at = swizzled(16 * warp + (lane & 15), lane / 16, PIECES);
  const u32 weight_at = smem + WEIGHTS + swizzled(lane & 7, lane / 8, TILE / 8);
  u32 query[NR][D / 16][2];
  float acc[DT][NR][4], maximum[NR][2], sum[NR][2];
  Sums sums(smem);
  int slot = 0;
  bool is_start = true;
  bool is_ours = false;        // the first split of these rows was this CTA's
  bool group_is_ours = false;  // that of this group
  while (!here.is_over()) {
    copy_wait<2 * STAGES - 3>();
    __syncthreads();  // keys are there, and the slot of the tile before is free
    if (ahead.is_over())
      copy_commit();
    else
      fetch(slot == 0 ? STAGES - 1 : slot - 1, true, false);
    copy_commit();
    const u32 keys = smem + slot * STAGE_BYTES, values = keys + KV_BYTES;

    if (here.is_first()) {
      if (FOLDS && here.begins_rows()) is_ours = true;
      if (FOLDS && here.begins_group()) group_is_ours = true;
      if (is_start || here.has_new_queries(lengths)) {
#pragma unroll
        for (int r = 0; r < NR; ++r) {
#pragma unroll
          for (int k = 0; k < D / 16; k += 2) {
            u32 x[4];
            load_matrices(x, values + KV_BYTES +
                                 swizzled(8 * r + (lane & 7), 2 * k + lane / 8, PIECES));
            query[r][k][0] = x[0], query[r][k][1] = x[1];
            query[r][k + 1][0] = x[2], query[r][k + 1][1] = x[3];
          }
        }
        if (tid < ROWS) {
          const int packed = here.row_tile * ROWS + tid, token = tokens_of(packed);
          const int head = here.kv_head * group + packed - token * group;
          const int at = (here.of.first_token + token) * kv_heads * group + head;
          results[tid] = token < here.of.queries ? at : -1;
        }
        is_start = false;
      }
#pragma unroll
      for (int r = 0; r < NR; ++r) {
#pragma unroll
        for (int d = 0; d < DT; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[d][r][i] = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) maximum[r][h] = NEG_INF, sum[r][h] = 0.f;
      }
      if (!group_is_ours || here.begins_group()) sums.clear();
    }

    // Scores of 16 keys of 64: two chains of products, over even and odd steps.
    float score[KT][NR][4] = {};
#pragma unroll
    for (int t = 0; t < KT; ++t) {
      float odd[NR][4] = {};
#pragma unroll
      for (int first = 0; first < D / 16; first += 4) {
        u32 a[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          load_matrices(a[k], ((keys + key_at) ^ 32 * (first + k)) + 64 * t * D * 2);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int r = 0; r < NR; ++r)
            mma(k & 1 ? odd[r] : score[t][r], a[k], query[r][first + k][0],
                query[r][first + k][1]);
      }
#pragma unroll
      for (int r = 0; r < NR; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score[t][r][i] = __fmul_rn(__fadd_rn(score[t][r][i], odd[r][i]), scale_log2);
    }
    // Most tiles are seen by every row.
    const int first_key = here.tile * TILE;
    const int first_position = here.of.seq_len - here.of.queries + tokens_of(here.row_tile * ROWS);
    if (first_key + TILE - 1 > first_position || first_key < here.of.seq_len - window) {
#pragma unroll
      for (int r = 0; r < NR; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = tokens_of(here.row_tile * ROWS + 8 * r + row_lane + h);
          const int position = here.of.seq_len - here.of.queries + token;
          const int last = token < here.of.queries ? position : -1;  // sees nothing
#pragma unroll
          for (int t = 0; t < KT; ++t)
#pragma unroll
            for (int i = h; i < 4; i += 2) {
              const int key = first_key + 64 * t + 16 * warp + group_lane + i / 2 * 8;
              if (key > last || key <= last - window) score[t][r][i] = NEG_INF;
            }
        }
    }
    float most_of_warp[NR][2];
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most_of_warp[r][h] = fmaxf(score[0][r][h], score[0][r][2 + h]);
#pragma unroll
        for (int t = 1; t < KT; ++t)
          most_of_warp[r][h] =
              fmaxf(most_of_warp[r][h], fmaxf(score[t][r][h], score[t][r][2 + h]));
      }
    const u32 own_row = (8 * row_of_group(group_lane) + row_lane + (group_lane & 1)) * 16 + warp * 4;
    store_shared<float>(smem + MAXIMA + own_row,
                reduce(most_of_warp, lane, [](float x, float y) { return fmaxf(x, y); }));
    __syncthreads();  // maxima
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 8 * r + row_lane + h;
        const float4 most_of = load_shared<float4>(smem + MAXIMA + row * 16);
        const float most = fmaxf(fmaxf(fmaxf(most_of.x, most_of.y), fmaxf(most_of.z, most_of.w)),
                                 maximum[r][h]);
        const float shift = most == NEG_INF ? 0.f : most;  // nothing seen yet
        const float decay = exp2_approx(maximum[r][h] - shift);
        maximum[r][h] = most;
        sum[r][h] = __fmul_rn(sum[r][h], decay);
#pragma unroll
        for (int t = 0; t < KT; ++t) {
          const float low = exp2_approx(score[t][r][h] - shift);
          const float high = exp2_approx(score[t][r][2 + h] - shift);
          score[t][r][h] = low, score[t][r][2 + h] = high;
          sum[r][h] = __fadd_rn(sum[r][h], __fadd_rn(low, high));
        }
#pragma unroll
        for (int d = 0; d < DT; ++d) {
          acc[d][r][h] = __fmul_rn(acc[d][r][h], decay);
          acc[d][r][2 + h] = __fmul_rn(acc[d][r][2 + h], decay);
        }
      }
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int t = 0; t < KT; ++t)
        store_transposed(smem + WEIGHTS + swizzled(8 * r + (lane & 7),
                                                   8 * t + 2 * warp + (lane / 8 & 1), TILE / 8),
                         pack(score[t][r][0], score[t][r][1]),
                         pack(score[t][r][2], score[t][r][3]));
    if (here.is_last())
      store_shared<float>(smem + SUMS + own_row,
                  reduce(sum, lane, [](float x, float y) { return __fadd_rn(x, y); }));
    copy_wait<2 * STAGES - 2>();
    __syncthreads();  // weights, sums and values

    // All keys of the tile times this warp's columns.
    u32 weight[NR][TILE / 16][2];
#pragma unroll
    for (int r = 0; r < NR; ++r)
#pragma unroll
      for (int k = 0; k < TILE / 16; k += 2) {
        u32 x[4];
        load_matrices(x, (weight_at ^ 32 * k) + 8 * r * TILE * 2);
        weight[r][k][0] = x[0], weight[r][k][1] = x[1];
        weight[r][k + 1][0] = x[2], weight[r][k + 1][1] = x[3];
      }
#pragma unroll
    for (int d = 0; d < DT; ++d) {
      u32 a[TILE / 16][4];
#pragma unroll
      for (int k = 0; k < TILE / 16; ++k)
        load_transposed(a[k], values + swizzled(16 * k + (lane & 7) + lane / 16 * 8,
                                                2 * (warp * DT + d) + (lane / 8 & 1), PIECES));
#pragma unroll
      for (int k = 0; k < TILE / 16; ++k)
#pragma unroll
        for (int r = 0; r < NR; ++r) mma(acc[d][r], a[k], weight[r][k][0], weight[r][k][1]);
    }

    if (here.is_last()) {
      sums.add(acc, maximum);
      const bool ends_group = here.ends_group(), ends_share = here.ends_share();
      const int first = here.first_split();  // its place is the first one
      int place = here.split - first;
      if (is_ours && !here.is_in_first_group() && (ends_group || ends_share)) {
        if (!ends_group) {
          sums.store(partials, stats, slots, place, results);
          place = here.split / GROUP * GROUP - 1 - first;
        }
        sums.take_row(ends_group);
      }
      if (is_ours && here.ends_rows())
        sums.finish(into, results);
      else if (!group_is_ours || ends_share || (ends_group && !is_ours))
        sums.store(partials, stats, slots, place, results);
      else if (ends_group)
        sums.keep_row();
    }
    here.advance(lengths);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
}
