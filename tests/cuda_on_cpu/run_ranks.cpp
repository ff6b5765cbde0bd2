// Runs the launches of several ranks on one processor; behind ranks_device.hpp and a kernel's source, KERNEL, which
// takes Args. Ranks run at random speeds, and for a while one of them not at all. On a rank a launch may begin once the
// one two before it has ended, and passes wait_for_inputs once the one before it has, after which its input is
// there.
struct Launch {
  Args args;
  const u8* x;  // what the kernel ahead writes to args.x
  int ctas;
};
static const Launch* launches;  // [rank][launch]
static int num_launches;
static const Launch& launch_of(const PlaceOfCta& place) {
  return launches[place.rank * num_launches + place.launch];
}
static void enter() {
  KERNEL(launch_of(places_of_ctas[current->cta]).args);
  current->is_done = true, --current->warp->live, ++events;
  give_way();
}

// One launch under way. Its CTAs have numbers from `first_cta` on.
struct Running {
  static constexpr size_t STACK = 32 << 10;
  List<Thread> threads;
  List<Warp> warps;
  bool is_live = false;

  void start(const PlaceOfCta& place, int ctas, int first_cta, u8* stacks) {
    threads.assign(ctas * THREADS, Thread()), warps.assign(ctas * WARPS, Warp()), is_live = true;
    for (int i = 0; i < ctas * THREADS; ++i) {
      u64* top = (u64*)(stacks + (i + 1) * STACK) - 1;  // as a call leaves it
      *--top = (u64)enter;
      for (int saved = 0; saved < 6; ++saved) *--top = 0;
      const int cta = first_cta + i / THREADS;
      places_of_ctas[cta] = {place.rank, place.launch, i / THREADS};
      threads[i] = {top, i % THREADS, cta, &warps[i / WARP], false};
      warps[i / WARP].threads[i % WARP] = &threads[i], warps[i / WARP].live = WARP;
    }
  }
  bool has_ended() const {
    for (const Warp& warp : warps)
      if (warp.live) return false;
    return is_live;
  }
};

struct Rank {
  Running running[2];  // by the number of the launch
  int started = 0, slowness = 1;
};

static int run_launches(int num_ranks, int most_ctas, Random& random, u8* stacks) {
  List<Rank> ranks(num_ranks);
  ctas.assign(2 * num_ranks * most_ctas, Cta());
  shared_floats.assign(2 * num_ranks * most_ctas * 32, NAN);
  ended.assign(num_ranks, 0), places_of_ctas.assign(2 * num_ranks * most_ctas, PlaceOfCta());
  auto write_input = [&](int rank) {
    if ((int)ended[rank] == num_launches) return;
    const Launch& next = launch_of({rank, (int)ended[rank], 0});
    std::memcpy((void*)next.args.x, next.x, next.args.num_bytes);
  };
  for (int rank = 0; rank < num_ranks; ++rank) write_input(rank);
  u64 seen = events;
  for (int turn = 0, idle = 0; idle < 20000; ++turn) {
    if (turn % 64 == 0) {
      for (Rank& rank : ranks) rank.slowness = random() % 3 ? 1 : 2 + random() % 6;
      if (random() % 4 == 0) ranks[random() % num_ranks].slowness = 1 << 30;
    }
    int live = 0;
    for (int r = 0; r < num_ranks; ++r) {
      Rank& rank = ranks[r];
      live += (int)ended[r] < num_launches;
      if (random() % rank.slowness) continue;
      if (rank.started < num_launches && rank.started <= (int)ended[r] + 1 && random() % 2) {
        const PlaceOfCta place = {r, rank.started, 0};
        const int number = 2 * r + rank.started++ % 2, first_cta = number * most_ctas;
        rank.running[number % 2].start(place, launch_of(place).ctas, first_cta,
                                       stacks + first_cta * THREADS * Running::STACK);
      }
      for (Running& one : rank.running)
        for (Warp& warp : one.warps)
          if (warp.live && random() % 2) resume(warp, random);
      current = nullptr;
      Running& oldest = rank.running[ended[r] % 2];
      if (oldest.has_ended()) oldest.is_live = false, ++ended[r], ++events, write_input(r);
    }
    deliver_stores(random);
    if (failure[0]) return FAILED;
    if (live == 0) return stores.empty() ? DONE : HANG;
    idle = events == seen ? idle + 1 : 0, seen = events;
    if (idle && idle % 50 == 0) ++clock_turns;  // nothing moves: time passes
  }
  return HANG;
}

extern "C" int launch_bytes() { return sizeof(Launch); }
extern "C" int run(const Launch* given, int num_ranks, int launches_of_each, int seed) {
  launches = given, num_launches = launches_of_each, stores.clear(), events = 0;
  clock_turns = 1;
  int most_ctas = 1;
  for (int i = 0; i < num_ranks * num_launches; ++i) most_ctas = std::max(most_ctas, given[i].ctas);
  const size_t size = 2 * num_ranks * most_ctas * THREADS * Running::STACK;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  u8* stacks = (u8*)mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  Random random(seed);
  const int result = guard([&] { return run_launches(num_ranks, most_ctas, random, stacks); });
  munmap(stacks, size);
  return result;
}
