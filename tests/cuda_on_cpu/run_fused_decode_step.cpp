// Runs fused_decode_step on one processor, for all GPUs that share a model; after device.hpp,
// peers_device.hpp, the source and run_ctas.hpp.
static const Args* step_args;  // of each GPU
static const Caches* step_caches;
static void enter_kernel() {
  const int rank = current->cta / CTAS;
  fused_decode_step(step_args[rank], step_caches[rank]);
}

extern "C" int struct_bytes(int i) { return i ? sizeof(Caches) : sizeof(Args); }
extern "C" int run_step(const Args* args, const Caches* caches, int seed, int late) {
  step_args = args, step_caches = caches;
  stores.clear();  // what a lost rank did not wait for
  return run_all(seed, late);
}
