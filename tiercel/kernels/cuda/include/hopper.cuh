// PTX instructions of Hopper (sm_90a) that kernels share: wgmma, TMA, registers of
// warpgroups. Macro: IS_BF16 (0: fp16), the type of matrix operands. On a processor
// tests/cuda_on_cpu/hopper_device.hpp replaces this file.
#pragma once

#include "include/approx_ptx.cuh"
#include "include/barrier_ptx.cuh"
#include "include/copy_ptx.cuh"
#include "include/mbarrier_ptx.cuh"
#include "include/pack_ptx.cuh"
#include "include/shared_ptx.cuh"
#include "include/types.cuh"

struct __align__(64) TMap { unsigned char b[128]; };
#define DYNAMIC_SHARED(name) extern __shared__ unsigned char name[]
// A CTA's dynamic shared memory, aligned for the 128-byte swizzle.
#define ALIGNED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]
DEV u32 aligned_base() {
  ALIGNED_MEMORY(aligned_memory);
  return shared_address(aligned_memory);
}

// ---- wgmma: m64nNk16, A and B from shared memory (scores); m64n128k16, A from registers and B
// transposed (product with V). Accumulators are the first N / 2 operands.
#if IS_BF16
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16"
#else
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16"
#endif
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F32(i) F16(i), F16(i + 16)
#define R32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64 R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <int acc>
DEV void wgmma_ss(float (&d)[32], u32 a, u32 ah, u32 b, u32 bh) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %36, 0;\n"
      "mov.b64 da, {%32, %33}; mov.b64 db, {%34, %35};\n" WGMMA("64") " {" R32
      "}, da, db, p, 1, 1, 0, 0; }\n"
      : F32(0)
      : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"(acc));
}
template <int acc>
DEV void wgmma_ss(float (&d)[64], u32 a, u32 ah, u32 b, u32 bh) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %68, 0;\n"
      "mov.b64 da, {%64, %65}; mov.b64 db, {%66, %67};\n" WGMMA("128") " {" R64
      "}, da, db, p, 1, 1, 0, 0; }\n"
      : F32(0), F32(32)
      : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"(acc));
}
DEV void wgmma_rs(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u32 b,
                                         u32 bh) {
  asm volatile(
      "{ .reg .b64 db; mov.b64 db, {%68, %69};\n" WGMMA("128") " {" R64
      "}, {%64, %65, %66, %67}, db, 1, 1, 1, 1; }\n"
      : F32(0), F32(32)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(bh));
}
template <int N> DEV void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
DEV void wg_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEV void wg_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// the compiler may move no use of r across this
template <int N> DEV void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// ---- barriers, TMA, registers
DEV void bar_arrive(int id, int n) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
DEV void tma3(u32 dst, const TMap* m, u32 bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// A warpgroup gives registers back, or takes more, up to N a thread.
template <int N> DEV void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEV void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Bounds of loops around wgmma go through this: without it ptxas serialises the products (C7520).
DEV int uni(int x) { return __shfl_sync(~0u, x, 0); }
// A value equal in all lanes, moved to a uniform register: descriptor arithmetic leaves the issue
// path. 530 TFLOP/s without, 537 with (H200, 2048 x 128 x 32); causal 8192: 528 and 555.
DEV u32 uniform(u32 x) { return __reduce_or_sync(~0u, x); }
// Matrix descriptor in shared memory, 128-byte swizzle: low word; the high word is constant (1024
// bytes between groups of 8 rows).
#define DESC_HI ((1024u >> 4) | (1u << 30))
DEV u32 mdesc(u32 addr, u32 lbo) {
  return ((addr & 0x3FFFF) >> 4) | ((lbo >> 4) << 16);
}
