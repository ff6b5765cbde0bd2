// PTX instructions of the kernels with quantised weights. On a processor
// tests/cuda_on_cpu/q4k_device.hpp replaces this file.
#pragma once

#include "include/barrier_ptx.cuh"
#include "include/copy_ptx.cuh"
#include "include/half_ptx.cuh"
#include "include/launch_ptx.cuh"
#include "include/shared_ptx.cuh"
#include "include/types.cuh"
#include "packed/packed_words.cuh"

DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Integers: c = start + products. m16n8k32 of unsigned weights, m16n8k16 of signed ones.
DEV void mma_unsigned(int (&c)[4], const u32 (&a)[4], uint2 b, int start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(start));
}
DEV void mma_signed(int (&c)[4], const u32 (&a)[2], u32 b, int start) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(start));
}
