// PTX instructions of Blackwell's tensor cores (sm_100a) that kernels share: tensor memory, tcgen05,
// descriptors of operands in shared memory. Compiled, never run: no such GPU was to be had.
#pragma once

#include "include/copy_ptx.cuh"
#include "include/mbarrier_ptx.cuh"
#include "include/shared_ptx.cuh"
#include "include/types.cuh"

// ---- tensor memory: 128 lanes of 512 columns of 32 bits, lane in bits 16 and up of an address
DEV void tmem_allocate(u32 place, u32 columns) {  // by one whole warp, a power of two
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(place),
               "r"(columns)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
DEV void tmem_free(u32 address, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns));
}
DEV void fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
DEV void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
DEV void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DEV void wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

#define T4(i) "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3])
#define S4(i) "r"(r[i]), "r"(r[i + 1]), "r"(r[i + 2]), "r"(r[i + 3])
// 16 columns of a warp's 32 lanes: a thread has those of its lane.
DEV void tmem_load(u32 (&r)[16], u32 address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
      : T4(0), T4(4), T4(8), T4(12)
      : "r"(address));
}
DEV void tmem_store(u32 address, const u32 (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
      "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};" ::"r"(address),
      S4(0), S4(4), S4(8), S4(12)
      : "memory");
}

// 512 bytes of scales, 128 rows of 4, to 4 columns: lane i of column j has row 32 j + i, and all
// four quarters of the lanes have a copy.
DEV void copy_scales(u32 address, u64 descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor)
               : "memory");
}
// All tcgen05 work that this thread has issued arrives at a barrier when it is done.
DEV void commit(u32 barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// ---- descriptors of shared memory (PTX ISA, "tcgen05 shared memory descriptor"): address, leading
// and stride offsets in units of 16 bytes; 1 in bits 46 to 48; the swizzle in bits 61 to 63.
constexpr u64 NO_SWIZZLE = 0, SWIZZLE_128 = 2;
DEV u64 operand(u32 address, u32 leading, u32 stride, u64 swizzle) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |
         (u64)1 << 46 | swizzle << 61;
}
