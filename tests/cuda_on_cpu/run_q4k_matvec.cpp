// Runs q4k_matvec on one processor; behind its sources and run_each_cta.hpp.
struct Call {
  Planes planes;
  const uint4* x;
  void* out;
  float* partial;
  u32* tickets;
  int rows, blocks, m, x_stride, out_stride;
};
static Call call;
static void start_cta() {}
static void enter_kernel() {
  q4k_matvec(call.planes, call.x, call.out, call.partial, call.tickets, call.rows, call.blocks,
             call.m, call.x_stride, call.out_stride);
}

extern "C" int run(const Call* given, int grid_x, int grid_y, int smem_bytes, int seed) {
  call = *given;
  return run_grid(grid_x, grid_y, smem_bytes, seed);
}
