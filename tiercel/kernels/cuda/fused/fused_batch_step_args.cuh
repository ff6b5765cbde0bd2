// Arguments of fused_batch_step.cu, in place of those of fused_layer_tail.cu; the fields that both
// have are described in fused_layer_tail_products.cuh.
//
// Macros: SIXES (bits of the matrices that are Q6_K in every layer: o, gate and up, down, q and k, v)
// and MAYBE_SIXES (of those that are in some); KV_HEADS, HAS_NORMS (of q and k), BLOCK_SIZE (of the
// cache), SPAN (keys of a part of a request's attention), AHEAD (units of a warp in flight before
// the attention is over).
#pragma once

#define V_IS_APART 1
#define D 128                     // head_dim
#define HEADS (ATTENDED / D)      // of queries
#define GROUP (HEADS / KV_HEADS)  // of them that share keys
#define ALL_HEADS (HEADS + 2 * KV_HEADS)

// o, gate and up and down of a layer, q, k and v of the next one; its attention.
struct alignas(16) Layer {
  Planes o, gate_up, down, qk, v;
  const float *mlp_norm, *next_norm;  // (HIDDEN)
  const float *q_norm, *k_norm;       // (D), HAS_NORMS
  u16 *k_cache, *v_cache;             // (blocks, BLOCK_SIZE, KV_HEADS, D) fp16
  u64 sixes;                          // of MAYBE_SIXES
  u64 unused;
  static constexpr int SIXES_AT = 5 * sizeof(Planes) + 6 * 8;
};
// A token, which is a request's newest.
struct Request {
  const int* table;  // blocks
  i64 slot;          // of the new key; -1: none
  int older;         // keys before it
  int position;
};

// What a launch's requests are, by TOKENS.
struct Plan {
  Request requests[TOKENS];
  int ends[TOKENS];  // parts of the attention of the requests up to this one
  u32 counts[2];     // layers before this launch, of 8 tokens
};

struct Args {
  const Layer* layers;
  float* x;
  const u16* heads;        // (m, ALL_HEADS * D) fp16: q, k, v of the first layer
  u8* exchange;            // (2 COLUMNS_X + COLUMNS_H + COLUMNS_O, COLUMN)
  uint4* squares;
  u32* launches;           // (2, CTAS): layers before this launch, with tokens of these 8
  u32* counters;           // (columns of exchange, 2)
  uint4* sent_heads;       // (TOKENS, ALL_HEADS, D / 4): 4 fp16 and the epoch
  uint4* sent_parts;       // (TOKENS, KV_HEADS, most_parts, GROUP, 2, 32): fused_batch_step_attention.cuh
  const float* angles;     // (positions, 2, D / 2): cos, then sin
  const int* positions;    // (m)
  const i64* slots;        // (m)
  const int* seq_lens;     // (m), with the new token
  const int* rows;         // (m), of tables
  const int* tables;       // (requests, table_width)
  int table_width, most_parts, num_layers, m;
  float eps, head_eps, scale_log2;
};
