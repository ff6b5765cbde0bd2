// PTX instructions of mhc_mix_finish.cu. On a processor tests/cuda_on_cpu/device.hpp and
// attention_device.hpp replace this file.
#pragma once

#include "include/attention_ptx.cuh"
#include "include/barrier_ptx.cuh"

#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
