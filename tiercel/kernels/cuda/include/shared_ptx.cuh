// Loads and stores of shared memory, by 32-bit addresses: load_shared<T>(address) and
// store_shared<T>(address, value), T one of the types below, aligned to its size. On a processor
// tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

// A CTA's dynamic shared memory.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The address of the dynamic shared memory.
DEV u32 shared_base() {
  SHARED_MEMORY(memory);
  return shared_address(memory);
}

template <class T> DEV T load_shared(u32 address);
template <> DEV uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
template <> DEV float4 load_shared(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
template <> DEV uint2 load_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
template <> DEV u64 load_shared(u32 address) {
  u64 v;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(address));
  return v;
}
template <> DEV u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
template <> DEV float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
template <> DEV u16 load_shared(u32 address) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

// The same, widened by the load itself: another form costs the fused decode step a register.
DEV u32 load_shared_half(u32 address) {
  u32 v;
  asm volatile("{.reg .u16 t; ld.shared.u16 t, [%1]; cvt.u32.u16 %0, t;}" : "=r"(v) : "r"(address));
  return v;
}

template <class T> DEV void store_shared(u32 address, T v);
template <> DEV void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <> DEV void store_shared(u32 address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
template <> DEV void store_shared(u32 address, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
template <> DEV void store_shared(u32 address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
template <> DEV void store_shared(u32 address, u64 v) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
template <> DEV void store_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
template <> DEV void store_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
template <> DEV void store_shared(u32 address, u16 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}
// The lowest byte of v.
DEV void store_shared_byte(u32 address, u32 v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
// Adds to a word of shared memory.
DEV void add_shared(u32 address, u32 x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
