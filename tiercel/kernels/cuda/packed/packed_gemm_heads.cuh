// What packed_gemm.cu does to the results of a projection to query, key and value heads: norm,
// rotation and cache write, which rotary_kv_write.cu would do in a launch of its own. Queries go to
// the result, keys and values to the cache alone. Macros: HEADS (columns of a head, 64 or 128),
// HAS_NORMS, PREFETCH, and those of packed_gemm.cu, whose CTAs have whole heads.
//
// PREFETCH: the attention after it is bound by memory, a product is not. So its producers request the
// first keys and values of each request to the L2: the first pieces behind the first weights, while
// the kernel ahead ends, the others as units are multiplied, so that no weights wait for them.
#pragma once

#include "include/shared_ptx.cuh"
#include "packed/packed_gemm_ptx.cuh"

struct HeadWrite {
  const int* positions;    // (m,)
  const float* table;      // (positions, 2, HEADS / 2): cos, then sin
  const i64* slots;        // (m,), -1 for none
  u16* k_cache;            // (slots, kv_heads, HEADS)
  u16* v_cache;            // like k_cache
  const float* q_weight;   // (HEADS,); HAS_NORMS
  const float* k_weight;
  int first, heads, kv_heads;  // head of the product's first row; of queries; of keys
  float eps;
};
struct HeadPlace {  // what four columns of a token's head need besides themselves
  float4 cos, sin, weight;
  i64 slot;
  DEV void load(const HeadWrite& to, i64 token, int row) {
    const int column = row % HEADS;
    const float* angles = to.table + (i64)to.positions[token] * HEADS + column % (HEADS / 2);
    cos = *(const float4*)angles, sin = *(const float4*)(angles + HEADS / 2);
    slot = to.slots[token];
#if HAS_NORMS
    const bool is_query = to.first + row / HEADS < to.heads;
    weight = *(const float4*)((is_query ? to.q_weight : to.k_weight) + column);
#endif
  }
};
#if PREFETCH
struct KeyPrefetch {
  const int* tables;    // (engine rows, table_stride)
  const int* rows;      // (requests,)
  const int* seq_lens;  // (requests,)
  i64 table_stride;
  int requests, pieces;  // of each, keys and values in turn
  u32 bytes, tokens;     // of a piece
  u32 per_block;         // pieces of a block's keys
};
struct Piece { const u8* at; u32 bytes; };
DEV Piece find_piece(const HeadWrite& to, const KeyPrefetch& keys, int number) {
  const int request = number % keys.requests, piece = number / keys.requests, chunk = piece >> 1;
  if (piece >= keys.pieces || chunk * (int)keys.tokens >= keys.seq_lens[request]) return {nullptr, 0};
  const int block = keys.tables[keys.rows[request] * keys.table_stride + chunk / keys.per_block];
  const u8* plane = (const u8*)(piece & 1 ? to.v_cache : to.k_cache);
  return {plane + ((i64)block * keys.per_block + chunk % keys.per_block) * keys.bytes, keys.bytes};
}
#endif
// Lanes of a head, which all call this, have four columns each, `y`.
DEV void write_head(u16* out, int out_stride, const HeadWrite& to, const HeadPlace& own,
                    float (&y)[4], bool has, i64 token, int row) {
  constexpr int LANES = HEADS / 4;
  const int head = to.first + row / HEADS, column = row % HEADS, key = head - to.heads;
  const bool is_value = key >= to.kv_heads;
  float x[4];
#if HAS_NORMS
  float squares = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) squares = fmaf(y[e], y[e], squares);
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  const float scale = rsqrtf(squares * (1.f / HEADS) + to.eps);
  x[0] = y[0] * scale * own.weight.x, x[1] = y[1] * scale * own.weight.y;
  x[2] = y[2] * scale * own.weight.z, x[3] = y[3] * scale * own.weight.w;
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = y[e];
#endif
  const float cos[4] = {own.cos.x, own.cos.y, own.cos.z, own.cos.w};
  const float sin[4] = {own.sin.x, own.sin.y, own.sin.z, own.sin.w};
  const float sign = column < HEADS / 2 ? -1.f : 1.f;  // the other of a pair is half a head away
  u16 h[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float other = __shfl_xor_sync(~0u, x[e], LANES / 2);
    h[e] = float_to_half(is_value ? y[e] : x[e] * cos[e] + sign * other * sin[e]);
  }
  if (!has || (key >= 0 && own.slot < 0)) return;
  u16* at = out + token * out_stride + head * HEADS;
  if (key >= 0)
    at = is_value ? to.v_cache + (own.slot * to.kv_heads + key - to.kv_heads) * HEADS
                  : to.k_cache + (own.slot * to.kv_heads + key) * HEADS;
  *(uint2*)(at + column) = make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
}
