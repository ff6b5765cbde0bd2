// Runs fused_layer_tail on one processor; behind device.hpp, its sources and run_ctas.hpp.
static const Args* chain_args;
static void enter_kernel() { fused_layer_tail(*chain_args); }

extern "C" int struct_bytes() { return sizeof(Args); }
extern "C" int smem_bytes() { return Layout::TOTAL; }
static void make_late(void* at, size_t size) {
  late.push_back({(u8*)at, {(u8*)at, (u8*)at + size}});
  std::memset(at, 0xFF, size);
}
extern "C" int run_chain(const Args* args, int seed, int first_late_cta) {
  chain_args = args;
  late.clear(), num_waiting = has_ended = 0;
  if (first_late_cta == CTAS) {
    make_late((void*)args->attended, args->m * ATTENDED * sizeof(u16));
    make_late(args->x, args->m * HIDDEN * sizeof(float));
  } else {
    has_ended = 1;
  }
  groups.assign(CTAS * MOST_THREADS, Groups(1));
  clusters.assign(CTAS / 2, NamedBarrier());
  return run_all(seed, first_late_cta);
}
