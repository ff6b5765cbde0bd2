// Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends. On
// a processor tests/cuda_on_cpu/ replaces this file.
#pragma once

#include "include/types.cuh"

// The next kernel may start as soon as there is room for it.
DEV void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// What the kernel before this one writes may be read after this.
DEV void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
