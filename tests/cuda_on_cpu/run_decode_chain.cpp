// Runs decode_chain on one processor; behind device.hpp, its sources and run_ctas.hpp.
static const Args* chain_args;
static void enter_kernel() { decode_chain(*chain_args); }

extern "C" int struct_bytes() { return sizeof(Args); }
extern "C" int smem_bytes() { return Layout::TOTAL; }
extern "C" int run_chain(const Args* args, int seed) {
  chain_args = args;
  groups.assign(CTAS * MOST_THREADS, Groups(1));
  clusters.assign(CTAS / 2, NamedBarrier());
  return run_all(seed, CTAS);
}
