// CTAs of a cluster, which read each other's shared memory: Hopper and later. On a processor
// tests/cuda_on_cpu/ replaces this file.
#pragma once

#include "include/types.cuh"

// Ends when all threads of the cluster are here; what they wrote before can be read after it.
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// An address of the shared memory of a CTA of the cluster.
DEV u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
template <class T> DEV T load_remote(u32 address, u32 rank);
template <> DEV float4 load_remote(u32 address, u32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote_address(address, rank)));
  return v;
}
template <> DEV float load_remote(u32 address, u32 rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(v) : "r"(remote_address(address, rank)));
  return v;
}
template <> DEV uint2 load_remote(u32 address, u32 rank) {
  uint2 v;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "r"(remote_address(address, rank)));
  return v;
}
