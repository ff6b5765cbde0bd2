// What fused_layer_tail_ptx.cuh gives, for one processor; behind peers_device.hpp. An address in a cluster has the
// CTA's rank and one above its lower 24 bits.
#undef THREADS
#define __cluster_dims__(...)

static List<NamedBarrier> clusters;
struct InCta {  // for a while this thread is in that CTA of its cluster
  int own = current->cta;
  explicit InCta(u32 a) { current->cta = (own & ~1) + (int)(a >> 24) - 1; }
  ~InCta() { current->cta = own; }
};
constexpr u32 PLACE = 0xffffff;

DEV void bar_wait(u32 bar, u32 parity) { slot_wait(bar, parity); }
DEV u32 remote_address(u32 a, u32 rank) { return a | (rank + 1) << 24; }
DEV void send_there(u32 a, const float (&v)[4], u32 bar) {
  const InCta there(a);
  shared(a & PLACE, 16);
  send(a & PLACE, bar & PLACE, List<u8>((const u8*)v, (const u8*)v + 16));
}
DEV void bar_arrive_there(u32 a) {
  const InCta there(a);
  mbar_arrive(a & PLACE);
}
DEV void cluster_sync() {
  NamedBarrier& b = clusters[current->cta / 2];
  const u32 turn = b.turn;
  if (++b.arrived == 2 * 640) b.arrived = 0, ++b.turn, ++events;
  wait_while(b.turn, turn);
}
DEV void add_release(u32* p, u32 v = 1) { *p += v, ++events; }
DEV uint2 load_relaxed2(const u32* p) {
  give_way();
  if ((u64)p % 8) fail("alignment of a load");
  return make_uint2(p[0], p[1]);
}
DEV void copy_fence() {}
// What the kernel ahead on a GPU writes is NaN until all threads there wait for it.
struct Late { u8* at; List<u8> data; };
struct Ahead { List<Late> late; u32 num_waiting = 0, has_ended = 0; };
static Ahead ahead[RANKS];
DEV void wait_for_inputs() {
  Ahead& own = ahead[current->cta / CTAS];
  if (++own.num_waiting == CTAS * 640) {
    for (const Late& one : own.late) std::memcpy(one.at, one.data.data(), one.data.size());
    own.has_ended = 1, ++events;
  }
  wait_while(own.has_ended, 0);
}
DEV void launch_dependents() {}
DEV int __ffs(u32 v) { return __builtin_ffs((int)v); }
DEV bool __all_sync(u32, bool v) { return !__reduce_max_sync(~0u, !v); }
