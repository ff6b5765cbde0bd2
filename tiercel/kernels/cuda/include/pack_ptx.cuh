// Two floats as a pair of 16-bit numbers, the first in the low half. Macro: IS_BF16 (0: fp16). On a
// processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

#if IS_BF16
#define PACK2 "cvt.rn.bf16x2.f32"
#else
#define PACK2 "cvt.rn.f16x2.f32"
#endif
DEV u32 pack(float low, float high) {
  u32 y;
  asm(PACK2 " %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
