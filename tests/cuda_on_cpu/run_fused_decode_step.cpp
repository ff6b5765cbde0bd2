// Runs fused_decode_step on one processor; after device.hpp, the source and run_ctas.hpp.
static const Args* step_args;
static const Caches* step_caches;
static void enter_kernel() { fused_decode_step(*step_args, *step_caches); }

extern "C" int struct_bytes(int i) { return i ? sizeof(Caches) : sizeof(Args); }
extern "C" int run_step(const Args* args, const Caches* caches, int seed, int late) {
  step_args = args, step_caches = caches;
  return run_all(seed, late);
}
