// Named barriers. On a processor tests/cuda_on_cpu/device.hpp replaces this file.
#pragma once

#include "include/types.cuh"

DEV void bar_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
