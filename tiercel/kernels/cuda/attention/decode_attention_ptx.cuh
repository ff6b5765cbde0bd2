// PTX instructions of decode_attention_split.cu: products, copies and shared memory. On a processor
// tests/cuda_on_cpu/attention_device.hpp replaces this file. Macro: IS_BF16.
#pragma once

#include "include/attention_ptx.cuh"
#include "include/copy_ptx.cuh"
#include "include/shared_ptx.cuh"

#if IS_BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif

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
// Prefetches a line to the L2.
DEV void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// A warp's 8 x 8 matrix of 16-bit elements, transposed: lane 4 g + t has row g, columns 2 t, 2 t + 1.
DEV u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
