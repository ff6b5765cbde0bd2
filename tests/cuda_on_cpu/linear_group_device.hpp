// What linear_group_ptx.cuh gives a kernel, for one processor; behind attention_device.hpp.
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
