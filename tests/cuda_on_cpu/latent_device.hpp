// What sparse_attention_ptx.cuh gives, for one processor; behind attention_device.hpp.
DEV u32 multiply_pairs(u32 a, u32 b) {
  float x[2], y[2];
  unpack(a, x[0], x[1]), unpack(b, y[0], y[1]);
  return pack(x[0] * y[0], x[1] * y[1]);
}
DEV uint4 load_rows(const void* from) {
  if ((u64)from % 16) fail("alignment of a load");
  return *(const uint4*)from;
}
DEV u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
