// Runs a kernel whose CTAs wait for each other; behind its source, which defines CTAs and THREADS.
// The file behind this one defines `enter_kernel`, which calls the kernel. A kernel of several GPUs
// defines RANKS, and what its device header calls `deliver_stores` arrives between them.
#ifdef RANKS
constexpr int ALL_CTAS = RANKS * CTAS;
static void deliver_between(Random& random) { deliver_stores(random); }
#else
constexpr int ALL_CTAS = CTAS;
static void deliver_between(Random&) {}
#endif
static void enter_kernel();
static void enter() {
  enter_kernel();
  current->is_done = true, --current->warp->live, ++events;
  give_way();
}

struct Step {
  static constexpr size_t STACK = 32 << 10;
  static constexpr int THREADS_ALL = ALL_CTAS * THREADS;
  List<Thread> threads = List<Thread>(THREADS_ALL);
  List<Warp> warps = List<Warp>(THREADS_ALL / WARP);
  Random random;
  u8* stacks;

  explicit Step(int seed) : random(seed) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = (u8*)mmap(nullptr, THREADS_ALL * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    ctas.assign(ALL_CTAS, Cta());
    for (Cta& cta : ctas) std::memset(cta.smem = (u8*)aligned_alloc(1024, SMEM), 0xEE, SMEM);
    for (int i = 0; i < THREADS_ALL; ++i) {
      Warp& warp = warps[i / WARP];
      u64* top = (u64*)(stacks + (i + 1) * STACK) - 1;  // as a call leaves it
      *--top = (u64)enter;
      for (int saved = 0; saved < 6; ++saved) *--top = 0;
      threads[i] = {top, i % THREADS, i / THREADS, &warp, false};
      warp.threads[i % WARP] = &threads[i], warp.live = WARP;
    }
  }
  ~Step() {
    for (Cta& cta : ctas) std::free(cta.smem);
    munmap(stacks, THREADS_ALL * STACK);
  }
  // Warps that live among some CTAs.
  int run(int first, int last) {
    const int per_cta = THREADS / WARP;
    List<int> order, slowness(warps.size(), 1);
    for (int i = first * per_cta; i < last * per_cta; ++i) order.push_back(i);
    u64 seen = events, idle = 0;
    int lagging = -1;  // a GPU of several, as a whole
    for (u64 round = 0; idle < 1500; ++round) {
      if (round % 8 == 0) {  // an eighth of the warps runs in few rounds only
        shuffle(order, random);
        for (int& slow : slowness) slow = random() % 8 ? 1 : 2 + random() % 6;
      }
      if (ALL_CTAS > CTAS && round % 64 == 0) lagging = random() % (2 * ALL_CTAS / CTAS);
      int live = 0;
      for (int i : order) {
        live += warps[i].live;
        const int slow = slowness[i] * (i / (CTAS * per_cta) == lagging ? 8 : 1);
        if (warps[i].live && random() % slow == 0) resume(warps[i], random);
      }
      if (live == 0) return check_ends();
      for (int i = first; i < last; ++i) deliver(ctas[i], random);
      deliver_between(random);
      if (failure[0]) return FAILED;
      idle = events == seen ? idle + 1 : 0, seen = events;
      // Nothing moves: time passes. Kernels wait longer for other GPUs.
      if (idle && idle % 150 == 0) clock_turns += ALL_CTAS > CTAS ? 64 : 1;
    }
    return HANG;
  }
};

// The CTAs from `late` on start when the others have ended.
static int run_all(int seed, int late) {
  events = 0, clock_turns = 1;
  return guard([=] {
    Step step(seed);
    const int result = step.run(0, late);
    return result || late == ALL_CTAS ? result : step.run(late, ALL_CTAS);
  });
}
