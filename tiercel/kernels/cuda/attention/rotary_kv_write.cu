// rotary_kv_write: norm, rotation and cache write of heads whose whole width rotates. Layouts: at
// the parameters. Host side, floor: kernels/attention/rotary_kv_write.py.
//
// D / 8 lanes take a head, each of them four pairs (i, i + D / 2). Between a step's products this
// is a chain of latencies. So the token's position and slot, its row of the table and the weights
// are read before the wait. Positions and slots must therefore have been written before the kernel
// ahead began. 32 registers and no shared memory let CTAs wait beside one of fused_layer_tail.cu,
// whose 640 threads leave 4096 registers of an SM.
//
// Macros: D (head_dim: 64, 128, 256), NUM_HEADS (of queries), KV_HEADS, HAS_NORMS, IS_BF16.
#include "include/attention_ptx.cuh"

#define WARPS 4
#define LANES (D / 8)
#define ALL (NUM_HEADS + 2 * KV_HEADS)

DEV void load4(float (&x)[4], const float* from) {
  const float4 v = *(const float4*)from;
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
DEV void unpack4(float (&x)[4], uint2 v) {
  unpack(v.x, x[0], x[1]), unpack(v.y, x[2], x[3]);
}
DEV uint2 pack4(const float (&x)[4]) { return make_uint2(pack(x[0], x[1]), pack(x[2], x[3])); }
DEV void store(uint2* to, uint2 first, uint2 second) { to[0] = first, to[D / 8] = second; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16) rotary_kv_write(
    uint2* heads,          // (tokens, ALL, D)
    const int* positions,  // (tokens,)
    const float* table,    // (positions, 2, D / 2): cos, then sin
    const i64* slots,      // (tokens,)
    uint2* k_cache,        // (slots, KV_HEADS, D)
    uint2* v_cache,        // like k_cache
    const float* q_weight, const float* k_weight,  // (D,), read with HAS_NORMS
    float eps) {
  launch_dependents();
  const int token = blockIdx.x, dim = 4 * ((int)threadIdx.x % LANES);
  // Lanes after the last head compute as those of the last one, for the shuffles, and store
  // nothing.
  const int wanted = (blockIdx.y * (32 * WARPS) + (int)threadIdx.x) / LANES;
  const int head = wanted < ALL ? wanted : ALL - 1;
  const bool is_v = head >= NUM_HEADS + KV_HEADS;
  const float* row = table + (i64)positions[token] * D + dim;
  const i64 slot = wanted < ALL ? slots[token] : -1;
  const bool is_written = slot >= 0 && head >= NUM_HEADS;
  float cos[4], sin[4];
  load4(cos, row), load4(sin, row + D / 2);
#if HAS_NORMS
  float a_weight[4], b_weight[4];
  const float* weight = (head < NUM_HEADS ? q_weight : k_weight) + dim;
  load4(a_weight, weight), load4(b_weight, weight + D / 2);
#endif
  // In runs of 4 elements, of which the host allows 2**32: a register each, where two would spill.
  const u32 at = ((u32)token * ALL + head) * (D / 4) + dim / 4;
  const u32 to = ((u32)slot * KV_HEADS + (head - NUM_HEADS) % KV_HEADS) * (D / 4) + dim / 4;
  wait_for_inputs();
  const uint2 first = __ldcg(heads + at), second = __ldcg(heads + at + D / 8);
  if (is_written && is_v) store(v_cache + to, first, second);
  float a[4], b[4];
  unpack4(a, first), unpack4(b, second);
#if HAS_NORMS
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) squares += a[i] * a[i] + b[i] * b[i];
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float scale = rsqrtf(squares * (1.f / D) + eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] *= scale * a_weight[i], b[i] *= scale * b_weight[i];
#endif
  if (is_v) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float turned = a[i] * cos[i] - b[i] * sin[i];
    b[i] = b[i] * cos[i] + a[i] * sin[i], a[i] = turned;
  }
  store(heads + at, pack4(a), pack4(b));
  if (is_written) store(k_cache + to, pack4(a), pack4(b));
}
