// PTX instructions of kernels whose CTAs form a cluster and read each other's shared memory: Hopper
// and later. On a processor tests/cuda_on_cpu/cluster_device.hpp replaces this file.
#pragma once

#include "attention/decode_attention_ptx.cuh"

// The address of the dynamic shared memory.
DEV u32 shared_base() {
  extern __shared__ __align__(128) u8 memory[];
  return shared_address(memory);
}
// Ends when all threads of the cluster are here; what they wrote before can be read behind it.
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// An address in the shared memory of a CTA of the cluster.
DEV u32 remote_address(u32 address, int rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEV float4 load_remote_floats(u32 address, int rank) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(remote_address(address, rank)) : "memory");
  return x;
}
DEV float load_remote_float(u32 address, int rank) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(x) : "r"(remote_address(address, rank)) : "memory");
  return x;
}
DEV uint2 load_remote_words(u32 address, int rank) {
  uint2 x;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y) : "r"(remote_address(address, rank)) : "memory");
  return x;
}
DEV float load_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
DEV u32 load_word(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
DEV void store_word(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DEV u64 load_long(u32 address) {
  u64 x;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}
DEV void store_long(u32 address, u64 x) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}
DEV uint2 load_words(u32 address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
DEV void store_words(u32 address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
// Adds to a word of shared memory.
DEV void add_shared(u32 address, u32 x) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
// A warp's 8 x 8 matrix of 16-bit elements, transposed: lane 4 g + t has row g, columns 2 t, 2 t + 1.
DEV u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
