// PTX instructions of packed_gemm.cu besides those of hopper.cuh. Macro: TOKENS. On a processor
// tests/cuda_on_cpu/products_device.hpp replaces both files.
#pragma once

#include "include/cluster_ptx.cuh"
#include "include/half_ptx.cuh"
#include "include/hopper.cuh"
#include "include/launch_ptx.cuh"
#include "packed/packed_words.cuh"

#define R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R48 R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PRODUCT(n, regs, a0, a1, a2, a3, b)                                                  \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" regs "}, {%" a0 ", %" a1 ", %" a2 \
  ", %" a3 "}, %" b ", 1, 1, 1, 0;\n"
// The descriptor b has 64 bits here: from halves ptxas moves the constant one before each product.
DEV void product(float (&d)[TOKENS / 2], const u32* a, u64 b) {
#if TOKENS == 32
  asm volatile(PRODUCT("32", R16, "16", "17", "18", "19", "20")
               : F16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 64
  asm volatile(PRODUCT("64", R32, "32", "33", "34", "35", "36")
               : F32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 96
  asm volatile(PRODUCT("96", R48, "48", "49", "50", "51", "52")
               : F32(0), F16(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile(PRODUCT("128", R64, "64", "65", "66", "67", "68")
               : F32(0), F32(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// Arrives when the copies of this thread so far are there.
DEV void mbar_arrive_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
DEV void prefetch_bulk(const void* from, u32 bytes) {  // to the L2; 16 bytes or more
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEV u32 hidden(u32 v) {  // from the compiler: it stays in a register
  asm("mov.u32 %0, %0;" : "+r"(v));
  return v;
}
DEV u32 merge(u32 v, u32 mask, u32 other) {  // (v & mask) | other
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(other));
  return d;
}
