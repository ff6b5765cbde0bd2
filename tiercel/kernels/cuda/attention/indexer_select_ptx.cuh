// PTX instructions of indexer_select.cu. On a processor tests/cuda_on_cpu/select_device.hpp replaces
// this file.
#pragma once

#include "attention/decode_attention_ptx.cuh"
#include "include/cluster_ptx.cuh"

// Adds to a word of shared memory, and gives what it was.
DEV u32 take_shared(u32 address, u32 x) {
  u32 y;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(y) : "r"(address), "r"(x) : "memory");
  return y;
}
DEV void or_shared(u32 address, u32 x) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
