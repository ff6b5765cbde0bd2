// What moe_experts_ptx.cuh gives, for one processor; behind products_device.hpp.
struct BfloatOperands { u32 a[4], b[2]; };
DEV void widen_bf16(float* to, u32 both) {
  to[0] = bits<float>(both << 16), to[1] = bits<float>(both & 0xffff0000u);
}
DEV void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Matrices& m = current->warp->matrices[current->warp->turn & 1];
  const int row = lane_id() / 4, column = 2 * (lane_id() % 4);
  const u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  for (int i = 0; i < 4; ++i) widen_bf16(&m.a[row + 8 * (i % 2)][8 * (i / 2) + column], a[i]);
  for (int i = 0; i < 2; ++i) widen_bf16(&m.b[row][8 * i + column], b[i]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) d[i] += dot(m.a[row + 8 * (i / 2)], m.b[column + i % 2], 2);
}
DEV void mma_digits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  int sums[4];
  multiply_bytes<u8>(sums, {{a0, a1, a2, a3}, {b0, b1}}, 2, 0);
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}
DEV void sts1(u32 a, u32 v) { *shared(a, 1) = (u8)v; }
DEV u32 fma_bf16(u32 a, u32 b, u32 c) {
  float x[2], y[2], z[2];
  widen_bf16(x, a), widen_bf16(y, b), widen_bf16(z, c);
  return pack_bf16(std::fma(x[0], y[0], z[0]), std::fma(x[1], y[1], z[1]));
}
DEV uint4 load_fresh(const void* p) {
  if ((u64)p % 16) fail("alignment of a load");
  return *(const uint4*)p;
}
DEV u32 atomicAdd(u32* p, u32 v) {
  const u32 old = *p;
  *p += v;
  return old;
}
DEV u32 __match_any_sync(u32, u32 v) {
  const auto lanes = collect(v);
  u32 same = 0;
  for (int i = 0; i < WARP; ++i) same |= (u32)(lanes[i] == v) << i;
  return same;
}
DEV u32 warp_largest(u32 v) {
  const auto lanes = collect(v);
  for (int i = 0; i < WARP; ++i) v = std::max<u32>(v, lanes[i]);
  return v;
}
DEV u32 warp_least(u32 v) {
  const auto lanes = collect(v);
  for (int i = 0; i < WARP; ++i) v = std::min<u32>(v, lanes[i]);
  return v;
}
DEV int __popc(u32 v) { return __builtin_popcount(v); }

// ---- moe_experts_gemm_ptx.cuh
#define ALIGNED_MEMORY(name) SHARED_MEMORY(name)
template <int N> DEV void product_bf16(float (&sums)[N], const u32* weights, u32 tokens) {
  own_products().back().push_back({sums, weights, tokens, 2 * N, true});
}
template <int N> DEV void lower_registers() {}
template <int N> DEV void raise_registers() {}
