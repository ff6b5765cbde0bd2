// PTX instructions of indexer_scores.cu. On a processor tests/cuda_on_cpu/scores_device.hpp replaces
// this file.
#pragma once

#include "attention/sparse_attention_tiles_ptx.cuh"

// d = 64 rows x 16 columns of a, a warp's fragments in registers, times 64 rows of b; added to d if acc.
template <int acc>
DEV void wgmma_keys(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 db; setp.ne.b32 p, %38, 0;\n"
      "mov.b64 db, {%36, %37};\n" WGMMA("64") " {" R32 "}, {%32, %33, %34, %35}, db, p, 1, 1, 0; }\n"
      : F32(0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(DESC_HI), "n"(acc));
}
