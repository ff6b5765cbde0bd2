// What linear_group_ptx.cuh gives a kernel, for one processor; behind attention_device.hpp.
template <class T> DEV T load_aligned(const void* from) {
  if ((u64)from % sizeof(T)) fail("alignment of a load");
  return *(const T*)from;
}
DEV uint4 load_weights16(const void* from) { return load_aligned<uint4>(from); }
DEV uint2 load_weights8(const void* from) { return load_aligned<uint2>(from); }
DEV u32 load_scale_word(const void* from) { return load_aligned<u32>(from); }
DEV u32 load_scale_byte(const void* from) { return *(const u8*)from; }
DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int i = 0; i < 32; i += 16)  // a product of two bf16 is exact in float32
    d |= to_16(of_16((u16)(a >> i)) * of_16((u16)(b >> i)) + of_16((u16)(c >> i))) << i;
  return d;
}
DEV float fp16_to_float(u32 bits) { return half_to_float((u16)bits); }
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
