// Instructions of moe_experts_tiles: products and pairs of bfloat16, counters between CTAs. On a
// processor tests/cuda_on_cpu/moe_device.hpp replaces this file.
#pragma once

#include "include/counters_ptx.cuh"
#include "packed/packed_ptx.cuh"

DEV void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Bytes: c += products of unsigned weights and signed tokens.
DEV void mma_digits(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A word by which a warp of a CTA waits for another, and what that one wrote to any memory before.
DEV void publish_shared(u32 address, u32 value) {
  asm volatile("fence.acq_rel.cta;\nst.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(value)
               : "memory");
}
// Until it is n or more; a wait that never ends becomes a trap (after seconds), not a hang.
DEV void wait_for_shared(u32 address, u32 n) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 v, i; mov.u32 i, 0;\n"
      "WAIT: ld.volatile.shared.u32 v, [%0]; setp.ge.u32 p, v, %1;\n@p bra DONE;\n"
      "add.u32 i, i, 1; setp.gt.u32 p, i, 100000000;\n@p trap;\nbra WAIT;\n"
      "DONE: fence.acq_rel.cta; }" ::"r"(address), "r"(n) : "memory");
}
// What another CTA of this launch, or the kernel ahead, writes: never from the first-level cache.
DEV uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
