// The router's choice within moe_experts_tiles: each CTA finds the experts of all tokens by itself, a
// warp those of one token. As kernels/moe/moe_route.py, in another order of sums.
//
// Macros: ROUTED (1: by scores, 2: by a table of token ids), EXPERTS, TOPK (at most 32).
#pragma once

struct Routing {
  const float* logits;    // (num_tokens, EXPERTS), rows of stride floats
  const float* bias;      // (EXPERTS,), ROUTED 1
  const i64* table;       // (vocab, TOPK), ROUTED 2
  const void* token_ids;  // (num_tokens,) int32, or int64 if has_long_ids
  i64 stride;
  float scale;
  int has_long_ids;
};

// sqrt(softplus(z)), without cancellation: log1p(e) = 2 artanh(e / (2 + e)), whose series has a ratio
// below 1 / 9.
DEV float route_score(float z) {
  const float e = __expf(z < 0.f ? z : -z), w = e / (2.f + e), s = w * w;
  float series = 1.f / 15.f;
#pragma unroll
  for (int n = 13; n > 0; n -= 2) series = series * s + 1.f / n;
  return sqrtf((z < 0.f ? 0.f : z) + 2.f * w * series);  // NaN is not below 0
}
// Numbers in the order of values, NaN first as in a descending sort; none is 0.
DEV u32 route_rank(float value) {
  const u32 bits = value != value ? 0x7fc00000u : __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
// The expert of lane k < TOPK is that of slot k, and so is the weight.
DEV void route_token(const Routing& r, int token, int lane, int& expert, float& weight) {
  const float* logits = r.logits + token * r.stride;
  expert = 0;
#if ROUTED == 2
  const i64 id = r.has_long_ids ? ((const i64*)r.token_ids)[token] : ((const int*)r.token_ids)[token];
  if (lane < TOPK) expert = (int)r.table[id * TOPK + lane];
#else
  constexpr int OWN = (EXPERTS + 31) / 32;  // experts lane, lane + 32, ...
  u32 ranks[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int e = lane + 32 * i;
    ranks[i] = e < EXPERTS ? route_rank(route_score(__ldcg(logits + e)) + r.bias[e]) : 0;
  }
  for (int k = 0; k < TOPK; ++k) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) best = max_or_nan(best, ranks[i]);
    best = warp_largest(best);
    u32 first = ~0u;
#pragma unroll
    for (int i = OWN - 1; i >= 0; --i)
      if (ranks[i] == best) first = lane + 32 * i;
    first = warp_least(first);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (first == lane + 32 * i) ranks[i] = 0;
    if (lane == k) expert = (int)first;
  }
#endif
  float sum = lane < TOPK ? route_score(__ldcg(logits + expert)) : 0.f;
  weight = sum;
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  weight = weight / (sum + 1e-20f) * r.scale;
}
