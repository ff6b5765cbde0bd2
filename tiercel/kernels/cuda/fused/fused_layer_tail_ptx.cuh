// PTX instructions of fused_layer_tail.cu and fused_batch_step.cu besides those of packed_ptx.cuh and exchange_ptx.cuh:
// barriers and memory of a cluster of two CTAs, counters of CTAs. On a processor
// tests/cuda_on_cpu/chain_device.hpp replaces this file.
#pragma once

#include "include/cluster_ptx.cuh"
#include "include/mbarrier_ptx.cuh"
#include "include/types.cuh"

// ---- barriers in shared memory, of this CTA
DEV bool bar_passed(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// Without a bound of its own: the data that it waits for is bounded by MOST_TICKS.
DEV void bar_wait(u32 bar, u32 parity) {
  while (!bar_passed(bar, parity)) {}
}

// ---- the two CTAs of a cluster
// Arrives there later and counts 16 bytes on that CTA's barrier: no fence, which costs 0.5 us.
DEV void send_there(u32 a, const float (&v)[4], u32 bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(a), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar)
      : "memory");
}
DEV void bar_arrive_there(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// ---- memory that CTAs share
// Releases what this warp stored, after __syncwarp. Earlier additions stay released, as
// each add continues their release sequences.
DEV void add_release(u32* p, u32 v = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Each of the two on its own.
DEV uint2 load_relaxed2(const u32* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)
               : "memory");
  return v;
}
// Between stores of threads and bulk copies of what they stored. Counters are polled relaxed: bulk
// copies read where counters and data meet, in the L2, and start only when the counts were seen.
// An acquire for each poll waits for each load on its own, 0.7 us.
DEV void copy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEV int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// From the compiler, which would have an address in registers for each constant offset.
DEV const u16* hidden(const u16* p) {
  asm volatile("" : "+l"(p));
  return p;
}
// Of 96 registers that a warp begins with.
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 104;"); }
DEV void drop_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 64;"); }
