// Runs fused_batch_step on one processor; behind device.hpp, its sources and run_ctas.hpp.
static const Args* step_args;
static void enter_kernel() { fused_batch_step(*step_args); }

extern "C" int struct_bytes() { return sizeof(Args); }
extern "C" int layer_bytes() { return sizeof(Layer); }
extern "C" int smem_bytes() { return Layout::TOTAL; }
extern "C" int run_step(const Args* args, int seed, int first_late_cta) {
  step_args = args;
  ahead[0] = Ahead();
  ahead[0].has_ended = first_late_cta < ALL_CTAS;
  groups.assign(ALL_CTAS * MOST_THREADS, Groups(1));
  clusters.assign(ALL_CTAS / 2, NamedBarrier());
  return run_all(seed, first_late_cta);
}
