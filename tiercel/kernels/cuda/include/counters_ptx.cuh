// Counters by which the CTAs of a launch wait for each other. On a processor
// tests/cuda_on_cpu/counters_device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

// Until *p is n or more; a wait that never ends becomes a trap (after seconds), not a hang.
DEV void wait_for_count(const u32* p, u32 n) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 v, i; mov.u32 i, 0;\n"
      "WAIT: ld.acquire.gpu.global.u32 v, [%0]; setp.ge.u32 p, v, %1;\n@p bra DONE;\n"
      "add.u32 i, i, 1; setp.gt.u32 p, i, 4000000;\n@p trap;\nbra WAIT;\nDONE: }" ::"l"(p),
      "r"(n)
      : "memory");
}
DEV void add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
