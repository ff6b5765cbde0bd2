// Integer types by their width, and the mark of device functions, for all kernels. NVRTC has no
// standard headers. On a processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#define DEV __device__ __forceinline__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
