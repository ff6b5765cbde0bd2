// PTX instructions of the kernels whose CTAs hand activations to each other, fused_decode_step.cu
// and fused_layer_tail.cu. On a processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#include "include/clock_ptx.cuh"
#include "include/copy_ptx.cuh"
#include "include/mbarrier_ptx.cuh"
#include "include/types.cuh"

DEV uint4 load_relaxed(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV void store_relaxed(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
