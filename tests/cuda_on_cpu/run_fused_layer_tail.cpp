// Runs fused_layer_tail on one processor, for all GPUs that share a model; behind device.hpp, its sources and
// run_ctas.hpp.
static const Args* chain_args;  // of each GPU
static void enter_kernel() { fused_layer_tail(chain_args[current->cta / CTAS]); }

extern "C" int struct_bytes() { return sizeof(Args); }
extern "C" int smem_bytes() { return Layout::TOTAL; }
static void make_late(Ahead& own, void* at, size_t size) {
  own.late.push_back({(u8*)at, {(u8*)at, (u8*)at + size}});
  std::memset(at, 0xFF, size);
}
extern "C" int run_chain(const Args* args, int seed, int first_late_cta) {
  chain_args = args;
  for (int rank = 0; rank < RANKS; ++rank) {
    ahead[rank] = Ahead();
    ahead[rank].has_ended = first_late_cta < ALL_CTAS;
    if (ahead[rank].has_ended) continue;
    make_late(ahead[rank], (void*)args[rank].attended, args->m * ATTENDED * sizeof(u16));
    make_late(ahead[rank], args[rank].x, args->m * HIDDEN * sizeof(float));
  }
  groups.assign(ALL_CTAS * MOST_THREADS, Groups(1));
  clusters.assign(ALL_CTAS / 2, NamedBarrier());
  stores.clear();  // what a lost rank did not wait for
  return run_all(seed, first_late_cta);
}
