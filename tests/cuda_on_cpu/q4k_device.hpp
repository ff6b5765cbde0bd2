// What packed_ptx.cuh gives, for one processor; behind device.hpp.
//
// A copy to shared memory arrives when its thread waits for it; until then its place holds 0xEE.

typedef long long i64;
struct Place { int x, y; };
static Place block_at, grid_size;
#undef blockIdx
#define blockIdx block_at
#define gridDim grid_size
#define __shared__
#define __align__(n)
#define __forceinline__
#define THREADS (32 * PARTS * GROUPS)
using std::min;
alignas(128) static u8 memory[SMEM];

struct Pending { u32 to; int size; u8 data[16]; };
typedef List<List<Pending>> Groups;  // of a thread; the last is open
constexpr int MOST_THREADS = 1024;  // of a CTA
static List<Groups> groups;  // by CTA and thread
DEV Groups& own_groups() { return groups[current->cta * MOST_THREADS + current->tid]; }

DEV void copy16_of(u32 to, const void* from, int bytes) {
  if (bytes && (u64)from % 16) fail("alignment of a copy");
  Pending copy = {to, 16, {}};
  std::memcpy(copy.data, from, bytes);
  std::memset(shared(to, 16), 0xEE, 16);
  own_groups().back().push_back(copy);
}
DEV void copy4(u32 to, const void* from) {
  if ((u64)from % 4) fail("alignment of a copy");
  Pending copy = {to, 4, {}};
  std::memcpy(copy.data, from, 4);
  std::memset(shared(to, 4), 0xEE, 4);
  own_groups().back().push_back(copy);
}
DEV void copy16(u32 to, const void* from) { copy16_of(to, from, 16); }
DEV void copy_commit() { own_groups().push_back({}); }
template <int N> DEV void copy_wait() {
  Groups& own = own_groups();
  for (; own.size() > N + 1; own.pop_front())
    for (const Pending& copy : own.front()) std::memcpy(shared(copy.to, copy.size), copy.data, copy.size);
}
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_add(c, {{a0, a1, a2, a3}, {b0, b1}}, 2);
}
DEV u32 __byte_perm(u32 a, u32 b, u32 places) {
  const u64 bytes = a | (u64)b << 32;
  u32 v = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 place = places >> (4 * i) & 15;
    if (place & 8) fail("a sign is spread");
    v |= (u32)(bytes >> (8 * place) & 255) << (8 * i);
  }
  return v;
}
DEV float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
DEV void __threadfence() {}
template <class T> DEV T __ldcg(const T* p) { return *p; }
template <class T> DEV void __stcg(T* p, T v) { *p = v; }
DEV u32 atomicInc(u32* p, u32 most) {
  const u32 v = *p;
  *p = v >= most ? 0 : v + 1;
  return v;
}
