// Runs a kernel whose CTAs do not wait for each other, one after another in any order, warps in
// random order; behind its source and what defines THREADS. The file behind this one defines
// `enter_kernel`, which calls the kernel, and `start_cta`.
static void start_cta();
static void enter_kernel();
static void enter() {
  enter_kernel();
  current->is_done = true, --current->warp->live, ++events;
  give_way();
}
constexpr size_t STACK = 64 << 10;
static int run_cta(u8* stacks, Random& random, u32 smem_bytes) {
  List<Thread> threads(THREADS);
  List<Warp> warps(THREADS / WARP);
  ctas.assign(1, Cta());
  ctas[0].smem = memory;
  std::memset(memory, 0xEE, SMEM);
  groups.assign(THREADS, Groups(1));
  for (int i = 0; i < THREADS; ++i) {
    u64* top = (u64*)(stacks + (i + 1) * STACK) - 1;  // as a call leaves it
    *--top = (u64)enter;
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    threads[i] = {top, i, 0, &warps[i / WARP], false};
    warps[i / WARP].threads[i % WARP] = &threads[i], warps[i / WARP].live = WARP;
  }
  u64 seen = events;
  for (int idle = 0; idle < 20000 && !failure[0];) {
    deliver(ctas[0], random);
    int live = 0;
    for (Warp& warp : warps) {
      live += warp.live;
      if (warp.live && random() % 4) resume(warp, random);
    }
    if (live == 0) return is_untouched(memory, smem_bytes) ? DONE : BEYOND_SHARED_MEMORY;
    idle = events == seen ? idle + 1 : 0, seen = events;
  }
  return HANG;
}

static int run_grid(int grid_x, int grid_y, int smem_bytes, int seed) {
  Random random(seed);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  u8* stacks = (u8*)mmap(nullptr, THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
  int result = 0;
  grid_size = {grid_x, grid_y};
  List<int> order(grid_x * grid_y);
  for (int i = 0; i < (int)order.size(); ++i) order[i] = i;
  shuffle(order, random);
  result = guard([&] {
    for (int i : order) {
      block_at = {i % grid_x, i / grid_x};
      start_cta();
      result = result ? result : run_cta(stacks, random, smem_bytes);
    }
    return result;
  });
  munmap(stacks, THREADS * STACK);
  return result;
}
