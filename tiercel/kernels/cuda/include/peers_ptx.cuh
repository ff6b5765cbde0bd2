// PTX instructions of kernels that several GPUs run together: memory that all of them map. On a
// processor tests/cuda_on_cpu/peers_device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

DEV void store_word(void* p, u64 v) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEV u64 load_word(const void* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Two words of 8 bytes. Each of them is written and read whole, but they come in any order.
struct Words { u64 first, second; };
DEV void store_words(void* p, Words v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.first), "l"(v.second)
               : "memory");
}
DEV Words load_words(const void* p) {
  Words v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second) : "l"(p) : "memory");
  return v;
}
