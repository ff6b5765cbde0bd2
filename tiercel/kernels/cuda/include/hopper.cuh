// PTX instructions of Hopper (sm_90a) that kernels share: wgmma, mbarrier, TMA, named barriers,
// arithmetic. Macro: IS_BF16 (0: fp16), the type of matrix operands. On a processor
// tests/cuda_on_cpu/hopper_device.hpp replaces this file.
#pragma once

#include "include/barrier_ptx.cuh"
#include "include/pack_ptx.cuh"
#include "include/types.cuh"

struct __align__(64) TMap { unsigned char b[128]; };
#define DYNAMIC_SHARED(name) extern __shared__ unsigned char name[]

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
__device__ __forceinline__ void wgmma_ss(float (&d)[32], u32 a, u32 ah, u32 b, u32 bh) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %36, 0;\n"
      "mov.b64 da, {%32, %33}; mov.b64 db, {%34, %35};\n" WGMMA("64") " {" R32
      "}, da, db, p, 1, 1, 0, 0; }\n"
      : F32(0)
      : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"(acc));
}
template <int acc>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], u32 a, u32 ah, u32 b, u32 bh) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %68, 0;\n"
      "mov.b64 da, {%64, %65}; mov.b64 db, {%66, %67};\n" WGMMA("128") " {" R64
      "}, da, db, p, 1, 1, 0, 0; }\n"
      : F32(0), F32(32)
      : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"(acc));
}
__device__ __forceinline__ void wgmma_rs(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u32 b,
                                         u32 bh) {
  asm volatile(
      "{ .reg .b64 db; mov.b64 db, {%68, %69};\n" WGMMA("128") " {" R64
      "}, {%64, %65, %66, %67}, db, 1, 1, 1, 1; }\n"
      : F32(0), F32(32)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(bh));
}
template <int N> __device__ __forceinline__ void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void wg_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wg_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// the compiler may move no use of r across this
template <int N> __device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// ---- barriers, TMA, arithmetic
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count));
}
__device__ __forceinline__ void fence_mbar_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbar_expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
// bounded: a wait that never ends becomes a trap (about 2 s), not a hang
__device__ __forceinline__ void mbar_wait(u32 b, u32 parity) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
      "add.u32 n, n, 1; setp.gt.u32 p, n, 2000000;\n@p trap;\nbra WAIT;\nDONE: }" ::"r"(b),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int n) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
__device__ __forceinline__ void tma3(u32 dst, const TMap* m, u32 bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEV void copy_bulk(u32 to, const u8* from, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// What a thread wrote to shared memory can be read by wgmma, behind the next barrier.
DEV void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void store_zeros(u32 address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
// A warpgroup gives registers back, or takes more, up to N a thread.
template <int N> __device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Bounds of loops around wgmma go through this: without it ptxas serialises the products (C7520).
__device__ __forceinline__ int uni(int x) { return __shfl_sync(~0u, x, 0); }
// A value equal in all lanes, moved to a uniform register: descriptor arithmetic leaves the issue
// path. 530 TFLOP/s without, 537 with (H200, 2048 x 128 x 32); causal 8192: 528 and 555.
__device__ __forceinline__ u32 uniform(u32 x) { return __reduce_or_sync(~0u, x); }
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Matrix descriptor in shared memory, 128-byte swizzle: low word; the high word is constant (1024
// bytes between groups of 8 rows).
#define DESC_HI ((1024u >> 4) | (1u << 30))
__device__ __forceinline__ u32 mdesc(u32 addr, u32 lbo) {
  return ((addr & 0x3FFFF) >> 4) | ((lbo >> 4) << 16);
}
