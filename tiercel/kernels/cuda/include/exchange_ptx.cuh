// PTX instructions of the kernels whose CTAs hand activations to each other, fused_decode_step.cu
// and fused_layer_tail.cu. On a processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

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
DEV void bulk_load(u32 smem, const void* gmem, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(smem), "l"(gmem), "r"(bytes), "r"(bar)
      : "memory");
}
DEV void mbar_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// The upper half of the clock counts 2.2 s at 1.98 GHz.
DEV u32 clock_high() {
  u32 now;
  asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(now)::"memory");
  return now;
}
