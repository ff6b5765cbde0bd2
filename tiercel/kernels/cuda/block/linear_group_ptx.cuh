// PTX instructions of linear_group.cu. On a processor tests/cuda_on_cpu/linear_group_device.hpp
// replaces this file.
#pragma once

#include "include/global_ptx.cuh"
#include "include/half_ptx.cuh"
#include "include/shared_ptx.cuh"
#include "include/types.cuh"

// The same of float16.
DEV void mma_half(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if HALF_X
// Two float16 of E4M3 in the bytes 0 and 1, and of those in the bytes 2 and 3 (sm_89 and later).
DEV void halves_of_e4m3(u32 bytes, u32& low, u32& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high) : "r"(bytes));
}
#endif
// m16n8k16: rows are weights, columns tokens.
DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
