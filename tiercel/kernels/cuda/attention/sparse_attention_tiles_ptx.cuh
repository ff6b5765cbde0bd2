// PTX instructions of sparse_attention_tiles.cu. On a processor tests/cuda_on_cpu/tiles_device.hpp
// replaces this file.
#pragma once

#include "attention/cluster_ptx.cuh"
#include "include/hopper.cuh"

// d = 64 rows of a x 128 columns of b, both in shared memory, b transposed; added to d unless is_first.
DEV void wgmma_values(float (&d)[64], u32 a, u32 b, int is_first) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 da, db; setp.eq.b32 p, %68, 0;\n"
      "mov.b64 da, {%64, %65}; mov.b64 db, {%66, %67};\n" WGMMA("128") " {" R64
      "}, da, db, p, 1, 1, 0, 1; }\n"
      : F32(0), F32(32)
      : "r"(a), "r"(DESC_HI), "r"(b), "r"(DESC_HI), "r"(is_first));
}
DEV void store_row(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEV u64 load_scales(const void* from) {
  u64 x;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(x) : "l"(from));
  return x;
}
DEV void store_short(u32 address, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((u16)x) : "memory");
}
DEV void store_pair(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// The address of the dynamic shared memory, as swizzled rows need it.
DEV u32 aligned_base() {
  extern __shared__ __align__(1024) u8 memory_of_rows[];
  return smem_u32(memory_of_rows);
}
