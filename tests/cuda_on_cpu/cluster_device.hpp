// What cluster_ptx.cuh and CUDA itself give, for one processor: the CTAs of a cluster run side by side, each with
// shared memory of its own; behind attention_device.hpp. Macro: CLUSTER.
static Place cluster_at;  // its first CTA
static Place place_in_grid() { return {cluster_at.x + current->cta, cluster_at.y}; }
#undef blockIdx
#define blockIdx place_in_grid()
#define __cluster_dims__(...)

static NamedBarrier cluster_barrier;
static int cluster_threads;
DEV void cluster_sync() {
  const u32 turn = cluster_barrier.turn;
  if (++cluster_barrier.arrived == cluster_threads)
    cluster_barrier.arrived = 0, ++cluster_barrier.turn, ++events;
  wait_while(cluster_barrier.turn, turn);
}
DEV u32 transpose(u32 x) {
  const auto lanes = collect(x);
  const int lane = threadIdx.x & 31, column = lane >> 2;
  u32 y = 0;
  for (int i = 0; i < 2; ++i)
    y |= (lanes[4 * (2 * (lane & 3) + i) + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * i;
  return y;
}
DEV float fmaxf(float a, float b) { return a != a ? b : b != b ? a : std::max(a, b); }
DEV u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEV u32 __popc(u32 x) { return __builtin_popcount(x); }
DEV int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
