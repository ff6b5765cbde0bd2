// PTX instructions of sparse_attention_tiles.cu. On a processor tests/cuda_on_cpu/tiles_device.hpp
// replaces this file.
#pragma once

#include "attention/decode_attention_ptx.cuh"
#include "include/cluster_ptx.cuh"
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
