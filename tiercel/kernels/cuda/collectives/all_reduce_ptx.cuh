// PTX instructions of all_reduce.cu besides those of peers_ptx.cuh. On a processor
// tests/cuda_on_cpu/ranks_device.hpp replaces this file.
#pragma once

#include "include/clock_ptx.cuh"
#include "include/types.cuh"

#define SHARED_FLOATS(name, count) __shared__ float name[count]
DEV void give_up() { __trap(); }
