// Runs launches of KERNELS on one processor, clusters one after another in any order and warps in
// random order; behind their sources and products_device.hpp.

static void** arguments;
template <class... A, size_t... I>
static void call(void (*kernel)(A...), std::index_sequence<I...>) {
  kernel(*(A*)arguments[I]...);
}
template <class... A> static void call(void (*kernel)(A...)) {
  call(kernel, std::index_sequence_for<A...>());
}
template <auto KERNEL> static void call_one() { call(KERNEL); }
static void (*const kernels[])() = {KERNELS};
static void (*kernel)();
static void enter() {
  kernel();
  current->is_done = true, --current->warp->live, ++events;
  give_way();
}

constexpr size_t STACK = 64 << 10;
struct Cluster {
  List<Thread> threads;
  List<Warp> warps;
  Random& random;
  List<u8*> memories;

  Cluster(int size, u8* stacks, Random& random)
      : threads(size * num_threads), warps(threads.size() / WARP), random(random) {
    ctas.assign(size, Cta()), cluster = NamedBarrier(), events = 0;
    groups.assign(size * MOST_THREADS, Groups(1)), products.assign(size * MOST_THREADS, ProductGroups(1));
    for (Cta& cta : ctas) {
      memories.push_back(cta.smem = (u8*)aligned_alloc(1024, SMEM));
      std::memset(cta.smem, 0xEE, SMEM);
    }
    for (int i = 0; i < (int)threads.size(); ++i) {
      Warp& warp = warps[i / WARP];
      u64* top = (u64*)(stacks + (i + 1) * STACK) - 1;  // as a call leaves it
      *--top = (u64)enter;
      for (int saved = 0; saved < 6; ++saved) *--top = 0;
      threads[i] = {top, i % num_threads, i / num_threads, &warp, false};
      warp.threads[i % WARP] = &threads[i], warp.live = WARP;
    }
  }
  ~Cluster() {
    for (u8* memory : memories) std::free(memory);
  }
  void deliver(Cta& cta) {  // some copies arrive, in any order
    current = nullptr;
    for (int n = random() % 3; n > 0 && !cta.copies.empty(); --n) {
      std::swap(cta.copies[random() % cta.copies.size()], cta.copies.back());
      const Copy& copy = cta.copies.back();
      std::memcpy(cta.smem + copy.to, copy.data.data(), copy.data.size());
      MBarrier& b = mbarrier_of(cta, copy.bar);
      b.bytes -= (long)copy.data.size();
      advance(b);
      cta.copies.pop_back(), ++events;
    }
  }
  int run(u32 smem_bytes) {
    u64 seen = events;
    List<int> slowness(warps.size());
    int idle = 0;
    for (u64 round = 0; idle < 2000 && !failure[0]; ++round) {
      if (round % 32 == 0)  // a quarter of the warps runs in few rounds only
        for (int& slow : slowness) slow = random() % 4 ? 1 : 2 + random() % 30;
      int live = 0;
      const int first = random() % warps.size();
      for (size_t n = 0; n < warps.size(); ++n) {
        const size_t i = (first + n) % warps.size();
        live += warps[i].live;
        if (warps[i].live && random() % slowness[i] == 0) resume(warps[i], random);
      }
      if (live == 0) {
        for (u8* memory : memories)
          if (!is_untouched(memory, smem_bytes)) return BEYOND_SHARED_MEMORY;
        return check_ends();
      }
      for (Cta& cta : ctas) deliver(cta);
      idle = events == seen ? idle + 1 : 0, seen = events;
    }
    return HANG;
  }
};

// What the kernel ahead of the next one writes.
extern "C" void add_late(u8* at, size_t size) { late.push_back({at, {at, at + size}}); }
// What kernels have prefetched since the last call; returns how many numbers there are.
extern "C" size_t take_prefetched(u64* to, size_t most) {
  const size_t count = prefetched.size();
  if (count <= most) std::memcpy(to, prefetched.data(), count * sizeof(u64));
  prefetched.clear();
  return count;
}
extern "C" int run(int number, void** given, const int* sizes, int threads, int cluster_size,
                   int smem_bytes, int seed) {
  arguments = given, kernel = kernels[number], num_threads = threads;
  grid = {sizes[0], sizes[1], sizes[2]};
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const size_t room = cluster_size * threads * STACK;
  u8* stacks = (u8*)mmap(nullptr, room, PROT_READ | PROT_WRITE, flags, -1, 0);
  const int result = guard([=] {
    Random random(seed);
    List<Box> order;
    for (int z = 0; z < grid.z; ++z)
      for (int y = 0; y < grid.y; y += cluster_size)
        for (int x = 0; x < grid.x; ++x) order.push_back({x, y, z});
    shuffle(order, random);
    int result = DONE;
    for (const Box& block : order) {
      first_block = block, has_waited = false;
      for (const Late& one : late) std::memset(one.at, 0xFF, one.data.size());
      if (result == DONE) result = Cluster(cluster_size, stacks, random).run(smem_bytes);
    }
    return result;
  });
  for (const Late& one : late) std::memcpy(one.at, one.data.data(), one.data.size());
  late.clear(), munmap(stacks, room);
  return result;
}
