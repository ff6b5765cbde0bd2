// Barriers in shared memory, which count arrivals and bytes of copies (Hopper and later). On a
// processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

DEV void mbar_init(u32 mbarrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}
// New mbarriers become visible to copies and to the cluster.
DEV void mbar_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbar_expect(u32 mbarrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes)
               : "memory");
}
DEV void mbar_arrive(u32 mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// A wait that never ends becomes a trap after about 2 s, not a hang.
DEV void mbar_wait(u32 mbarrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
      "add.u32 n, n, 1; setp.gt.u32 p, n, 2000000;\n@p trap;\nbra WAIT;\nDONE: }" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}
// Whether a wait would not wait.
DEV bool mbar_has_passed(u32 mbarrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(mbarrier), "r"(parity) : "memory");
  return done;
}
// What threads wrote to shared memory can be read by tensor cores and bulk copies, after the next
// barrier.
DEV void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
