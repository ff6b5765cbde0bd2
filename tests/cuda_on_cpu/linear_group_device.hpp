// What linear_group_ptx.cuh gives a kernel, for one processor; behind attention_device.hpp.
using std::max;
DEV void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Matrices& m = current->warp->matrices[current->warp->turn & 1];
  const int row = lane_id() / 4, column = 2 * (lane_id() % 4);
  const u32 b[] = {b0, b1};
  for (int i = 0; i < 4; ++i) {
    float* to = &m.a[row + 8 * (i % 2)][8 * (i / 2) + column];
    unpack_fp16(a[i], to[0], to[1]);
  }
  for (int i = 0; i < 2; ++i) unpack_fp16(b[i], m.b[row][8 * i + column], m.b[row][8 * i + column + 1]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) d[i] += dot(m.a[row + 8 * (i / 2)], m.b[column + i % 2], 2);
}
DEV float float_of_e4m3(u32 byte) {
  const u32 low = byte & 0x7f;
  const float v = low == 0x7f ? NAN : low < 8 ? std::ldexp((float)low, -9) : std::ldexp(8.f + low % 8, (int)(low / 8) - 10);
  return byte & 0x80 ? -v : v;
}
DEV void halves_of_e4m3(u32 bytes, u32& low, u32& high) {
  low = pack_fp16(float_of_e4m3(bytes & 255), float_of_e4m3(bytes >> 8 & 255));
  high = pack_fp16(float_of_e4m3(bytes >> 16 & 255), float_of_e4m3(bytes >> 24));
}
DEV u32 atomicMax(u32* p, u32 v) {
  const u32 old = *p;
  *p = std::max(old, v);
  return old;
}
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
