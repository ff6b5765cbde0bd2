// PTX instructions of the n-gram kernels: loads, and the wait for the kernel before. On a processor
// tests/cuda_on_cpu/ngram_device.hpp replaces this file.
#pragma once

#include "include/launch_ptx.cuh"
#include "include/types.cuh"

__device__ __forceinline__ u64 read_key(const u64* key) { // past L1: other CTAs lower it
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(key) : "memory");
  return value;
}

// 16 bytes that no kernel writes meanwhile.
__device__ __forceinline__ void load_constant(int (&word)[4], const void* from) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(from));
}

// 16 bytes past L1: others write them.
__device__ __forceinline__ void load_volatile(int (&word)[4], const int* from) {
  asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(from));
}

// Loaded where the call is, not where the value is needed.
__device__ __forceinline__ int2 load_pair(const int* from) {
  int2 v;
  asm volatile("ld.global.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}
