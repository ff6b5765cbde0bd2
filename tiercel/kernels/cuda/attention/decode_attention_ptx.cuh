// PTX instructions of decode_attention_split.cu: products, copies and shared memory. On a processor
// tests/cuda_on_cpu/attention_device.hpp replaces this file. Macro: IS_BF16.
#pragma once

#include "include/attention_ptx.cuh"

#if IS_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void load_matrices(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEV void load_transposed(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
// Two 8x8 matrices, each transposed; lane i % 16 has the address of row i % 8 of matrix i / 8. A
// register of lane 4 g + t has column g of rows 2 t and 2 t + 1.
DEV void store_transposed(u32 address, u32 x0, u32 x1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(address), "r"(x0), "r"(x1) : "memory");
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 row = __shfl_sync(~0u, address, i / 2 * 8 + 2 * (lane & 3) + i % 2);
    const u32 x = i < 2 ? x0 : x1;
    asm volatile("st.shared.u16 [%0], %1;"
                 ::"r"(row + 2 * (lane >> 2)), "h"((u16)(i % 2 ? x >> 16 : x)) : "memory");
  }
#endif
}
DEV void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 16 bytes, or zeros without reading the source.
DEV void copy16(u32 to, const void* from, bool is_read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(is_read ? 16 : 0) : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEV float4 load_floats(u32 address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}
DEV void store_floats(u32 address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEV void store_16(u32 address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEV void store_float(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
DEV void store_half(u32 address, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((u16)x) : "memory");
}
// Prefetches a line to the L2.
DEV void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
