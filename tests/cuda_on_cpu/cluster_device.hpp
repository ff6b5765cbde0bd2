// What cluster_ptx.cuh gives, for one processor: the CTAs of a cluster run side by side, each with
// shared memory of its own; behind attention_device.hpp. Macro: CLUSTER.
static Place cluster_at;  // its first CTA
static Place place_in_grid() { return {cluster_at.x + current->cta, cluster_at.y}; }
#undef blockIdx
#define blockIdx place_in_grid()
#define __cluster_dims__(...)

DEV u32 shared_base() { return 0; }
static NamedBarrier cluster_barrier;
static int cluster_threads;
DEV void cluster_sync() {
  const u32 turn = cluster_barrier.turn;
  if (++cluster_barrier.arrived == cluster_threads)
    cluster_barrier.arrived = 0, ++cluster_barrier.turn, ++events;
  wait_while(cluster_barrier.turn, turn);
}
template <class T> DEV T from_remote(u32 address, int rank) {
  if (address % sizeof(T) || address + sizeof(T) > SMEM || rank < 0 || rank >= CLUSTER)
    fail("an address in shared memory of a cluster");
  T v;
  std::memcpy(&v, ctas[rank].smem + address, sizeof v);
  return v;
}
DEV float4 load_remote_floats(u32 address, int rank) { return from_remote<float4>(address, rank); }
DEV float load_remote_float(u32 address, int rank) { return from_remote<float>(address, rank); }
DEV uint2 load_remote_words(u32 address, int rank) { return from_remote<uint2>(address, rank); }
DEV float load_float(u32 address) { return from_shared<float>(address); }
DEV u32 load_word(u32 address) { return from_shared<u32>(address); }
DEV u64 load_long(u32 address) { return from_shared<u64>(address); }
DEV uint2 load_words(u32 address) { return from_shared<uint2>(address); }
DEV void store_word(u32 address, u32 x) { std::memcpy(shared(address, 4), &x, 4); }
DEV void store_long(u32 address, u64 x) { std::memcpy(shared(address, 8), &x, 8); }
DEV void store_words(u32 address, uint2 x) { std::memcpy(shared(address, 8), &x, 8); }
DEV void add_shared(u32 address, u32 x) { store_word(address, load_word(address) + x); }
DEV u32 transpose(u32 x) {
  const auto lanes = collect(x);
  const int lane = threadIdx.x & 31, column = lane >> 2;
  u32 y = 0;
  for (int i = 0; i < 2; ++i)
    y |= (lanes[4 * (2 * (lane & 3) + i) + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * i;
  return y;
}
DEV float fmaxf(float a, float b) { return a != a ? b : b != b ? a : std::max(a, b); }
DEV u32 __popc(u32 x) { return __builtin_popcount(x); }
DEV int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
