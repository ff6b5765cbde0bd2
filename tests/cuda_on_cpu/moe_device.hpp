// What moe_experts_ptx.cuh gives, for one processor; behind products_device.hpp.
struct BfloatOperands { u32 a[4], b[2]; };
DEV void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Matrices& m = current->warp->matrices[current->warp->turn & 1];
  const int row = lane_id() / 4, column = 2 * (lane_id() % 4);
  const u32 a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  for (int i = 0; i < 4; ++i) {
    float* to = &m.a[row + 8 * (i % 2)][8 * (i / 2) + column];
    unpack_bf16(a[i], to[0], to[1]);
  }
  for (int i = 0; i < 2; ++i) unpack_bf16(b[i], m.b[row][8 * i + column], m.b[row][8 * i + column + 1]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) d[i] += dot(m.a[row + 8 * (i / 2)], m.b[column + i % 2], 2);
}
DEV void mma_digits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  int sums[4];
  multiply_bytes<u8>(sums, {{a0, a1, a2, a3}, {b0, b1}}, 2, 0);
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}
DEV uint4 load_fresh(const void* p) {
  if ((u64)p % 16) fail("alignment of a load");
  return *(const uint4*)p;
}
DEV void publish_shared(u32 at, u32 v) { store_shared(at, v), ++events; }
DEV void wait_for_shared(u32 at, u32 n) {
  while (load_shared<u32>(at) < n) give_way();
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
DEV int __popc(u32 v) { return __builtin_popcount(v); }

// ---- moe_experts_gemm_ptx.cuh
template <int N> DEV void product_bf16(float (&sums)[N], const u32* weights, u32 tokens) {
  own_products().back().push_back({sums, weights, tokens, 2 * N, true});
}
template <int N> DEV void lower_registers() {}
template <int N> DEV void raise_registers() {}
