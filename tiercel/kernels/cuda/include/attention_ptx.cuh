// PTX instructions of decode_attention's kernels, rotary_kv_write.cu and all_reduce.cu. On a
// processor tests/cuda_on_cpu/attention_device.hpp, or ranks_device.hpp, replaces this file. Macro:
// IS_BF16 (0: fp16), the type of queries and cache.
#pragma once

#include "include/pack_ptx.cuh"
#include "include/types.cuh"

DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV void unpack(u32 both, float& low, float& high) {
#if IS_BF16
  low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xffff0000u);
#else
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high) : "r"(both));
#endif
}
// The next kernel may start as soon as there is room for it; this one waits for the one before.
DEV void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEV void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
