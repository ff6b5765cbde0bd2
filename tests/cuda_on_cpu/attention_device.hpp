// What attention_ptx.cuh, decode_attention_ptx.cuh and CUDA itself give kernels that run by `run_launch.cpp`, for one
// processor; behind q4k_device.hpp. What the kernel ahead writes is there when a CTA waits for it, and NaN until then.
#undef THREADS
#define THREADS (32 * WARPS)
using std::max;

DEV float __fadd_rn(float a, float b) { return a + b; }
DEV float __fsub_rn(float a, float b) { return a - b; }
DEV float __fmul_rn(float a, float b) { return a * b; }
DEV float __fdiv_rn(float a, float b) { return a / b; }
DEV float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
DEV int __ffs(u32 v) { return __builtin_ffs((int)v); }
DEV void unpack(u32 both, float& low, float& high) {
  low = of_16((u16)both), high = of_16((u16)(both >> 16));
}

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
DEV void load_matrices(u32 (&x)[4], u32 address) { load_matrices<false>(x, address); }
DEV void load_transposed(u32 (&x)[4], u32 address) { load_matrices<true>(x, address); }
DEV void store_transposed(u32 address, u32 x0, u32 x1) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) {
    const u32 row = __shfl_sync(~0u, address, i / 2 * 8 + 2 * (lane & 3) + i % 2);
    store_shared<u16>(row + 2 * (lane >> 2), (u16)((i < 2 ? x0 : x1) >> 16 * (i % 2)));
  }
}
DEV void prefetch_line(const void*) {}

struct Late { u8* at; List<u8> data; };
static List<Late> late;
static Place late_for;  // the CTA that has not waited yet
DEV void launch_dependents() {}
DEV void wait_for_inputs() {
  if (late_for.x == block_at.x && late_for.y == block_at.y)
    for (const Late& one : late) std::memcpy(one.at, one.data.data(), one.data.size());
  late_for = {-1, -1};
}
// Shared memory of fixed size, if a source has some; the linker knows where it is.
extern "C" __attribute__((weak)) u8 __start_shared_memory[], __stop_shared_memory[];
static void poison_shared_memory() {
  if (__start_shared_memory)
    std::memset(__start_shared_memory, 0xEE, __stop_shared_memory - __start_shared_memory);
}
