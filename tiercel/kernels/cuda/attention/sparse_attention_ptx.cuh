// PTX instructions of what reads encoded vectors and index keys. On a processor
// tests/cuda_on_cpu/latent_device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

// Products of two pairs of bfloat16, each rounded once.
DEV u32 multiply_pairs(u32 a, u32 b) {
  u32 y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// 16 bytes that no kernel writes while this one runs.
DEV uint4 load_rows(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
