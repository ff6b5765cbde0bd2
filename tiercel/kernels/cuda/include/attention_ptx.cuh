// PTX instructions of decode_attention's kernels, rotary_kv_write.cu and all_reduce.cu. On a
// processor tests/cuda_on_cpu/attention_device.hpp, or ranks_device.hpp, replaces this file. Macro:
// IS_BF16 (0: fp16), the type of queries and cache.
#pragma once

#include "include/approx_ptx.cuh"
#include "include/half_ptx.cuh"
#include "include/launch_ptx.cuh"
#include "include/pack_ptx.cuh"
#include "include/types.cuh"

DEV void unpack(u32 both, float& low, float& high) {
#if IS_BF16
  low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xffff0000u);
#else
  unpack_fp16(both, low, high);
#endif
}
