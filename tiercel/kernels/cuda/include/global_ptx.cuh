// Loads of global memory that no kernel writes while this one runs. Volatile: they stay where they
// are written, for instance before the wait for the kernel ahead. On a processor
// tests/cuda_on_cpu/attention_device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

template <class T> DEV T load_read_only(const void* from);
template <> DEV u64 load_read_only(const void* from) {
  u64 v;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
template <> DEV u32 load_read_only(const void* from) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
DEV u32 load_read_only_byte(const void* from) {
  u32 v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
// What is read once, past the L1.
template <class T> DEV T load_no_allocate(const void* from);
template <> DEV uint4 load_no_allocate(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
template <> DEV uint2 load_no_allocate(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
