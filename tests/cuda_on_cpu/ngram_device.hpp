// What ngram_ptx.cuh and CUDA itself give the n-gram kernels, for one processor; after
// attention_device.hpp. A CTA's shared memory holds 0xEE when it starts.
#undef __align__
#define __align__(n) alignas(n)
#undef __shared__
#define __shared__ static __attribute__((section("shared_memory")))
// The kernels have structures of these names.
typedef Index ThreadIndex;
#undef threadIdx
#define threadIdx (ThreadIndex{current->tid})
#define Index IndexOfKernel
#define Copy CopyOfKernel

struct alignas(8) int2 { int x, y; };

// ---- ngram_ptx.cuh
DEV u64 read_key(const u64* key) { return *key; }
DEV void load_words(int (&word)[4], const void* from) {
  if ((u64)from % 16) fail("alignment of a load");
  std::memcpy(word, from, sizeof word);
}
DEV void load_constant(int (&word)[4], const void* from) { load_words(word, from); }
DEV void load_volatile(int (&word)[4], const int* from) {
  load_words(word, from);
  ++events, give_way();  // others change it before it is looked at
}
DEV int2 load_pair(const int* from) {
  if ((u64)from % 8) fail("alignment of a load");
  return {from[0], from[1]};
}
DEV void prefetch(const void*) {}

// ---- CUDA
DEV int __clz(int v) { return v ? __builtin_clz((u32)v) : 32; }
DEV u32 __reduce_min_sync(u32, u32 v) {
  const auto lanes = collect(v);
  for (int i = 0; i < WARP; ++i) v = std::min(v, lanes[i]);
  return v;
}
template <class T> DEV T atomicMin(T* p, T v) {
  const T old = *p;
  *p = std::min(old, v);
  return old;
}
template <class T> DEV T atomicMax(T* p, T v) {
  const T old = *p;
  *p = std::max(old, v);
  return old;
}
template <class T> DEV T atomicAdd(T* p, T v) {
  const T old = *p;
  *p += v;
  return old;
}
DEV int atomicCAS(int* p, int expected, int v) {
  const int old = *p;
  if (old == expected) *p = v;
  return old;
}
static int tally;
DEV int tally_threads(bool is, int threads) {
  tally += is;
  bar_sync(0, threads);
  const int all = tally;
  bar_sync(0, threads);
  tally = 0;
  bar_sync(0, threads);
  return all;
}
#define __syncthreads_count(is) tally_threads(is, THREADS)
#define __syncthreads_or(is) (tally_threads(is, THREADS) > 0)
