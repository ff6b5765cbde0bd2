// PTX instructions of packed_gemm.cu besides those of hopper.cuh. Macro: TOKENS. On a processor
// tests/cuda_on_cpu/products_device.hpp replaces both files.
#pragma once

#include "include/hopper.cuh"

#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]

struct Planes {
  const u8 *p0, *p1, *p2, *p3;  // Q4_K qs, header; Q6_K ql, qh, scales, d; STEP: packed_ptx.cuh
};

#define R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R48 R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PRODUCT(n, regs, a0, a1, a2, a3, b, h)                                               \
  "{ .reg .b64 db; mov.b64 db, {%" b ", %" h "};\n"                                          \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" regs "}, {%" a0 ", %" a1 ", %" a2 \
  ", %" a3 "}, db, 1, 1, 1, 0; }\n"
DEV void product(float (&d)[TOKENS / 2], const u32* a, u32 b) {
#if TOKENS == 32
  asm volatile(PRODUCT("32", R16, "16", "17", "18", "19", "20", "21")
               : F16(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(DESC_HI));
#elif TOKENS == 64
  asm volatile(PRODUCT("64", R32, "32", "33", "34", "35", "36", "37")
               : F32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(DESC_HI));
#elif TOKENS == 96
  asm volatile(PRODUCT("96", R48, "48", "49", "50", "51", "52", "53")
               : F32(0), F16(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(DESC_HI));
#else
  asm volatile(PRODUCT("128", R64, "64", "65", "66", "67", "68", "69")
               : F32(0), F32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(DESC_HI));
#endif
}
DEV uint4 lds16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEV uint2 lds8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
DEV u32 lds4(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
DEV u32 lds2(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
DEV void sts4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEV void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Arrives when the copies of this thread so far are there.
DEV void mbar_arrive_copied(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
DEV void sts(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
DEV float load_of(u32 a, int rank) {  // a float in the shared memory of a CTA of the cluster
  float v;
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(a), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  return v;
}
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEV u16 float_to_bf16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEV u32 word(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
DEV u32 hidden(u32 v) {  // from the compiler: it stays in a register
  asm("mov.u32 %0, %0;" : "+r"(v));
  return v;
}
DEV u32 merge(u32 v, u32 mask, u32 other) {  // (v & mask) | other
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(other));
  return d;
}
// Byte k of v in both halves, as the fp16 1024 + byte.
DEV u32 byte_pair(u32 v, int k) { return __byte_perm(v, 0x64646464u, 0x4040u | k | k << 8); }
DEV void mbar_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void launch_next() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
