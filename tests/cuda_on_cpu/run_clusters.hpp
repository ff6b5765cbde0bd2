// Runs a kernel cluster by cluster, in any order, the CTAs of a cluster side by side and warps in
// random order; behind its source and cluster_device.hpp. The file behind this one defines
// `enter_kernel`, which calls the kernel, and `start_cta`.
static void start_cta();
static void enter_kernel();
static void enter() {
  enter_kernel();
  current->is_done = true, --current->warp->live, ++events;
  give_way();
}
constexpr size_t STACK = 64 << 10;
static int run_cluster(u8* stacks, Random& random, u32 smem_bytes) {
  const int all_threads = THREADS * CLUSTER;
  List<Thread> threads(all_threads);
  List<Warp> warps(all_threads / WARP);
  static List<u8> memories;
  memories.assign(CLUSTER * (size_t)SMEM, 0xEE);
  ctas.assign(CLUSTER, Cta());
  cluster_barrier = NamedBarrier(), cluster_threads = all_threads;
  for (int i = 0; i < CLUSTER; ++i) ctas[i].smem = &memories[i * (size_t)SMEM];
  groups.assign(MOST_THREADS * CLUSTER, Groups(1));
  for (int i = 0; i < all_threads; ++i) {
    u64* top = (u64*)(stacks + (i + 1) * STACK) - 1;  // as a call leaves it
    *--top = (u64)enter;
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    threads[i] = {top, i % THREADS, i / THREADS, &warps[i / WARP], false};
    warps[i / WARP].threads[i % WARP] = &threads[i], warps[i / WARP].live = WARP;
  }
  u64 seen = events;
  for (int idle = 0; idle < 20000 && !failure[0];) {
    for (Cta& cta : ctas) deliver(cta, random);
    int live = 0;
    for (Warp& warp : warps) {
      live += warp.live;
      if (warp.live && random() % 4) resume(warp, random);
    }
    if (live == 0) {
      for (Cta& cta : ctas)
        if (!is_untouched(cta.smem, smem_bytes)) return BEYOND_SHARED_MEMORY;
      return DONE;
    }
    idle = events == seen ? idle + 1 : 0, seen = events;
  }
  return HANG;
}

static int run_grid(int grid_x, int grid_y, int smem_bytes, int seed) {
  Random random(seed);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const size_t room = THREADS * CLUSTER * STACK;
  u8* stacks = (u8*)mmap(nullptr, room, PROT_READ | PROT_WRITE, flags, -1, 0);
  int result = 0;
  if (grid_x % CLUSTER) return FAILED;
  grid_size = {grid_x, grid_y};
  const int columns = grid_x / CLUSTER;
  List<int> order(columns * grid_y);
  for (int i = 0; i < (int)order.size(); ++i) order[i] = i;
  shuffle(order, random);
  result = guard([&] {
    for (int i : order) {
      block_at = cluster_at = {i % columns * CLUSTER, i / columns};
      start_cta();
      result = result ? result : run_cluster(stacks, random, smem_bytes);
    }
    return result;
  });
  munmap(stacks, room);
  return result;
}
