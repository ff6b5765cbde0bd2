// Asynchronous copies to shared memory: cp.async of threads, and bulk copies (Hopper), which arrive
// at an mbarrier. On a processor tests/cuda_on_cpu/ replaces this file.
#pragma once

#include "include/types.cuh"

DEV void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEV void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 16 bytes, of which those from `bytes` on are zeros and not read.
DEV void copy16_of(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(mbarrier)
      : "memory");
}
// A copy of what nobody reads again: first to leave the L2, so that it displaces no keys, values or
// activations.
DEV void load_once(u32 smem, const void* gmem, u32 bytes, u32 bar) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], policy;\n}" ::"r"(smem), "l"(gmem), "r"(bytes), "r"(bar)
      : "memory");
}
