// What hopper.cuh, fused_decode_step_ptx.cuh and CUDA itself give a kernel, for one processor: a thread of the
// device is a coroutine, and run_fused_decode_step.cpp resumes warps in random order. So a kernel's
// indices, waits and reuse of shared memory are checked without a GPU; the order of its memory
// accesses between CTAs, and speed, are not.
//
// A warp's collective waits for all its lanes. Copies to shared memory arrive late and in any
// order; until then their place holds 0xEE. Wrong alignment, addresses and arrivals end the run with
// a message, and so does an access outside memory.
#include <sys/mman.h>
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdio>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(64) TMap { unsigned char b[128]; };  // here: address and number of tokens
#define DEV inline
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED_MEMORY(name) u8* name = here().smem
#define ALIGNED_MEMORY SHARED_MEMORY
#define threadIdx (Index{current->tid})
#define blockIdx (Index{current->cta})

constexpr u32 SMEM = 227 << 10;
constexpr int WARP = 32;
struct Index { int x; };
struct Warp;
struct Thread {
  void* stack;
  int tid, cta;
  Warp* warp;
  bool is_done;
  const u32* word = nullptr;  // it waits while this word has this value
  u32 value = 0;
};
struct Matrices { float a[16][16], b[8][16]; };  // rows of A, columns of B
struct Warp {
  Thread* threads[WARP];
  int arrived;
  u32 turn, clock;
  int live;
  u8 values[2][WARP][32];
  alignas(32) Matrices matrices[2];
};
struct NamedBarrier { int arrived = 0; u32 turn = 0; };
struct MBarrier { int count = 0, pending = 0; long bytes = 0; u32 phase = 0; bool was_seen = true; };
struct Copy { u32 to, bar; List<u8> data; };
struct MBarriers {  // who waits for one holds its address: they do not move
  u32 places[256];
  MBarrier barriers[256];
  int count = 0;
  MBarrier* find(u32 at) {
    for (int i = 0; i < count; ++i)
      if (places[i] == at) return &barriers[i];
    return nullptr;
  }
};
struct Cta {
  u8* smem;
  NamedBarrier named[16];
  MBarriers mbarriers;
  List<Copy> copies;
};
static Thread* current;
static void* scheduler;
static List<Cta> ctas;
static u64 events;      // whatever may let a waiting thread go on
static u32 clock_turns;

static char failure[128];  // what ended the run

extern "C" const char* failure_of_run() { return failure; }
extern "C" void switch_stack(void** from, void* to);
asm(R"(
switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
DEV void give_way() { switch_stack(&current->stack, scheduler); }
DEV void wait_while(const u32& word, u32 value) {
  current->word = &word, current->value = value;
  while (word == value) give_way();
  current->word = nullptr;
}
// Lets a warp run, through some collectives of it; its first lane first, or its last.
static void resume(Warp& warp, Random& random) {
  const int turn = random() % 2 * (WARP - 1);
  for (int left = 1 + random() % 16; left; --left) {
    bool has_run = false;
    for (int i = 0; i < WARP; ++i) {
      Thread* thread = warp.threads[i ^ turn];
      if (thread->is_done || (thread->word && *thread->word == thread->value)) continue;
      current = thread, has_run |= thread->word != nullptr;
      switch_stack(&scheduler, thread->stack);
    }
    if (!has_run) return;
  }
}
// A thread does not go on; the scheduler (no current thread) does, and looks at `failure`.
static void fail(const char* what) {
  if (!failure[0])
    std::snprintf(failure, sizeof failure, "thread %d of CTA %d: %s", current ? current->tid : -1,
                  current ? current->cta : -1, what);
  while (current) give_way();
}
enum { DONE, HANG, BEYOND_SHARED_MEMORY, FAILED };  // how a run ends
static sigjmp_buf before_run;
static void on_fault(int) { siglongjmp(before_run, 1); }
// Runs; an address outside memory ends the run, not the process.
template <class Run> static int guard(Run run) {
  static u8 stack_of_handler[64 << 10];
  stack_t stack = {}, old_stack;
  stack.ss_sp = stack_of_handler, stack.ss_size = sizeof stack_of_handler;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_fault, old_bus;
  action.sa_handler = on_fault, action.sa_flags = SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_fault), sigaction(SIGBUS, &action, &old_bus);
  failure[0] = 0;
  int result = FAILED;
  if (sigsetjmp(before_run, 1))
    std::snprintf(failure, sizeof failure, "thread %d of CTA %d: an address outside memory",
                  current ? current->tid : -1, current ? current->cta : -1);
  else
    result = run();
  sigaction(SIGSEGV, &old_fault, nullptr), sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  return failure[0] ? (int)FAILED : result;
}
// Whether shared memory beyond what a launch requests holds what it held at the start.
static bool is_untouched(const u8* memory, u32 smem_bytes) {
  const u8* from = memory + smem_bytes;
  return smem_bytes >= SMEM || (*from == 0xEE && !std::memcmp(from, from + 1, SMEM - smem_bytes - 1));
}
DEV Cta& here() { return ctas[current->cta]; }
DEV int lane_id() { return current->tid % WARP; }

// ---- collectives of a warp
template <class T> struct Lanes {
  const u8* values;
  T operator[](int lane) const {
    T v;
    std::memcpy(&v, values + 32 * lane, sizeof v);
    return v;
  }
};
template <class T> DEV Lanes<T> collect(const T& v) {
  static_assert(sizeof(T) <= 32, "of a lane");
  Warp& w = *current->warp;
  const u32 turn = w.turn;
  std::memcpy(w.values[turn & 1][lane_id()], &v, sizeof v);
  // No event: warps that poll have collectives too.
  if (++w.arrived == WARP) w.arrived = 0, ++w.turn, w.clock = clock_turns;
  wait_while(w.turn, turn);
  return {w.values[turn & 1][0]};
}
template <class T> DEV T __shfl_sync(u32, T v, int lane) { return collect(v)[lane % WARP]; }
template <class T> DEV T __shfl_xor_sync(u32, T v, int mask) {
  return collect(v)[lane_id() ^ mask];
}
template <class T> DEV T __shfl_down_sync(u32, T v, int step) {
  const auto lanes = collect(v);
  return lane_id() + step < WARP ? lanes[lane_id() + step] : v;
}
template <class T> DEV T __shfl_up_sync(u32, T v, int step) {
  const auto lanes = collect(v);
  return lane_id() < step ? v : lanes[lane_id() - step];
}
DEV u32 __ballot_sync(u32, bool v) {
  const auto lanes = collect(v);
  u32 all = 0;
  for (int i = 0; i < WARP; ++i) all |= (u32)lanes[i] << i;
  return all;
}
DEV u32 __reduce_max_sync(u32, u32 v) {
  const auto lanes = collect(v);
  for (int i = 0; i < WARP; ++i) v = std::max(v, lanes[i]);
  return v;
}
DEV int __reduce_add_sync(u32, int v) {
  const auto lanes = collect(v);
  int sum = 0;
  for (int i = 0; i < WARP; ++i) sum += lanes[i];
  return sum;
}
DEV bool __any_sync(u32, bool v) { return __reduce_max_sync(~0u, v); }
DEV void __syncwarp() { collect(0); }

// ---- barriers
DEV u32 arrive(int id, int count) {
  NamedBarrier& b = here().named[id];
  const u32 turn = b.turn;
  if (++b.arrived == count) b.arrived = 0, ++b.turn, ++events;
  return turn;
}
DEV void bar_arrive(int id, int count) { arrive(id, count); }
DEV void bar_sync(int id, int count) {
  const u32 turn = arrive(id, count);
  wait_while(here().named[id].turn, turn);
}
#define __syncthreads() bar_sync(0, THREADS)
static MBarrier& mbarrier_of(Cta& cta, u32 at) {
  static MBarrier none;
  MBarrier* found = cta.mbarriers.find(at);
  if (!found) fail("an mbarrier before its start");
  return found ? *found : none;
}
DEV MBarrier& mbarrier(u32 at) { return mbarrier_of(here(), at); }
DEV void advance(MBarrier& b) {
  if (b.pending < 0) fail("too many arrivals");
  if (b.pending || b.bytes) return;
  // Waits tell a phase from its neighbours alone.
  if (!b.was_seen) fail("a phase of an mbarrier ends before the one before it was waited for");
  b.phase ^= 1, b.pending = b.count, b.was_seen = false, ++events;
}
// After a kernel: no barrier has arrivals that ended no phase.
static int check_ends() {
  current = nullptr;
  for (const Cta& cta : ctas)
    for (int i = 0; i < cta.mbarriers.count; ++i) {
      const MBarrier& b = cta.mbarriers.barriers[i];
      if (b.pending != b.count || b.bytes) fail("an mbarrier ends within a phase");
    }
  return DONE;
}
DEV void mbar_init(u32 at, u32 count) {
  if (at % 8) fail("alignment of an mbarrier");
  MBarriers& all = here().mbarriers;
  if (!all.find(at)) {
    if (all.count == 256) fail("more than 256 mbarriers");
    all.places[all.count++] = at;
  }
  MBarrier& b = mbarrier(at);
  b.count = b.pending = (int)count;
}
DEV void mbar_expect(u32 at, u32 bytes) {
  MBarrier& b = mbarrier(at);
  b.bytes += bytes, --b.pending;
  advance(b);
}
DEV void mbar_arrive(u32 at) {
  --mbarrier(at).pending;
  advance(mbarrier(at));
}
DEV bool mbar_has_passed(u32 at, u32 parity) {
  give_way();  // who polls waits for others
  MBarrier& b = mbarrier(at);
  return b.phase != parity && (b.was_seen = true);
}
DEV void mbar_wait(u32 at, u32 parity) {
  MBarrier& b = mbarrier(at);
  wait_while(b.phase, parity);
  b.was_seen = true;
}
DEV void slot_wait(u32 at, u32 parity) { mbar_wait(at, parity); }
DEV void mbar_fence() {}
DEV void fence_shared_writes() {}
DEV void drop_registers() {}
DEV void take_registers() {}
// A warp's lanes, which go on one by one, see one time behind a collective.
DEV u32 clock_high() { return std::max(current->warp->clock, clock_turns - 1); }
DEV int unknown(int x) { return x; }

// ---- memory
DEV u8* shared(u32 at, u32 size) {
  if (at % size || at + size > SMEM) fail("an address in shared memory");
  return here().smem + at;
}
template <class T> DEV T load_shared(u32 at) {
  T v;
  std::memcpy(&v, shared(at, sizeof v), sizeof v);
  return v;
}
DEV u32 load_shared_half(u32 at) { return load_shared<u16>(at); }
template <class T> DEV void store_shared(u32 at, T v) { std::memcpy(shared(at, sizeof v), &v, sizeof v); }
DEV void store_shared_byte(u32 at, u32 v) { *shared(at, 1) = (u8)v; }
DEV u32 shared_address(const void* p) { return (u32)((const u8*)p - here().smem); }
DEV u32 shared_base() { return 0; }
DEV u32 aligned_base() { return 0; }
template <class T> DEV T load_remote(u32 at, u32 rank) {  // from a CTA of the cluster
  T v;
  shared(at, sizeof v);
  if (rank >= ctas.size()) fail("a rank in the cluster");
  std::memcpy(&v, ctas[rank].smem + at, sizeof v);
  return v;
}
DEV void add_shared(u32 at, u32 v) { store_shared(at, load_shared<u32>(at) + v); }
template <class T> DEV T load_read_only(const void* from) {
  if ((u64)from % sizeof(T)) fail("alignment of a load");
  return *(const T*)from;
}
DEV u32 load_read_only_byte(const void* from) { return *(const u8*)from; }
template <class T> DEV T load_no_allocate(const void* from) { return load_read_only<T>(from); }
DEV uint4 load_relaxed(const void* p) {
  give_way();
  if ((u64)p % 16) fail("alignment of a load");
  return *(const uint4*)p;
}
DEV void store_relaxed(void* p, uint4 v) {
  if ((u64)p % 16) fail("alignment of a store");
  *(uint4*)p = v, ++events;
}
DEV void store_relaxed_word(u32* p, u32 v) {
  if ((u64)p % 4) fail("alignment of a store");
  *p = v, ++events;
}
DEV void send(u32 to, u32 bar, List<u8> data) {
  if (to + data.size() > SMEM) fail("a copy leaves shared memory");
  std::memset(here().smem + to, 0xEE, data.size());
  here().copies.push_back({to, bar, std::move(data)});
}
// Some copies arrive, in any order.
static void deliver(Cta& cta, Random& random) {
  current = nullptr;
  for (int n = random() % (3 + cta.copies.size() / 8); n > 0 && !cta.copies.empty(); --n) {
    std::swap(cta.copies[random() % cta.copies.size()], cta.copies.back());
    const Copy& copy = cta.copies.back();
    std::memcpy(cta.smem + copy.to, copy.data.data(), copy.data.size());
    MBarrier& b = mbarrier_of(cta, copy.bar);
    b.bytes -= (long)copy.data.size();
    advance(b);
    cta.copies.pop_back(), ++events;
  }
}
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  if (to % 16 || (u64)from % 16 || bytes % 16) fail("alignment of a bulk copy");
  send(to, bar, List<u8>((const u8*)from, (const u8*)from + bytes));
}
DEV void load_once(u32 to, const void* from, u32 bytes, u32 bar) { copy_bulk(to, from, bytes, bar); }
// A box of 32 tokens x 1 head x 64 dimensions of (tokens, heads, width) 16-bit values, 128-byte
// swizzle; of the map come the address, tokens, heads and width.
DEV void tma3(u32 to, const TMap* map, u32 bar, int x, int y, int z) {
  u64 words[4];
  std::memcpy(words, map, sizeof words);
  if (to % 1024 || z < 0 || (u64)z + 32 > words[1] || (u64)y >= words[2] || (u64)x + 64 > words[3])
    fail("a TMA box");
  List<u8> box(4096);
  for (int t = 0; t < 32; ++t)
    for (int c = 0; c < 8; ++c) {
      const u64 from = words[0] + 2 * ((((u64)z + t) * words[2] + y) * words[3] + x) + 16 * c;
      std::memcpy(&box[128 * t + ((c ^ (t & 7)) << 4)], (const void*)from, 16);
    }
  send(to, bar, std::move(box));
}

// ---- arithmetic
template <class To, class From> DEV To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "bits");
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}
DEV float __uint_as_float(u32 v) { return bits<float>(v); }
DEV float __int_as_float(int v) { return bits<float>(v); }
DEV u32 __float_as_uint(float v) { return bits<u32>(v); }
DEV float __fdividef(float a, float b) { return a / b; }
DEV float __expf(float x) { return std::exp(x); }
DEV float rsqrtf(float x) { return 1.f / std::sqrt(x); }
DEV float exp2_approx(float x) { return std::exp2(x); }
DEV float log2_approx(float x) { return std::log2(x); }
DEV float rcp_approx(float x) { return std::nextafter(1.f / x, 2.f); }  // as wrong as approximate
DEV int __float2int_rn(float x) { return x == x ? (int)std::nearbyint(x) : 0; }
template <class T> DEV T __ldg(const T* p) { return *p; }
// Without <immintrin.h>, which takes a third of a compilation.
typedef short Halves __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
DEV float half_to_float(u16 h) { return __builtin_ia32_vcvtph2ps(Halves{(short)h})[0]; }
DEV u16 float_to_half(float f) { return (u16)__builtin_ia32_vcvtps2ph(Floats{f}, 0)[0]; }
DEV u16 float_to_bf16(float f) {
  const u32 v = bits<u32>(f);
  return f != f ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
DEV u32 pack_fp16(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }
DEV u32 pack_bf16(float low, float high) { return float_to_bf16(low) | (u32)float_to_bf16(high) << 16; }
DEV void unpack_fp16(u32 both, float& low, float& high) {
  low = half_to_float((u16)both), high = half_to_float((u16)(both >> 16));
}
DEV void unpack_bf16(u32 both, float& low, float& high) {
  low = bits<float>(both << 16), high = bits<float>(both & 0xffff0000u);
}
DEV u32 fma_fp16x2(u32 a, u32 b, u32 c) {
  const auto wide = [](u32 v) { return __builtin_ia32_vcvtph2ps(Halves{(short)v, (short)(v >> 16)}); };
  // The product is exact in float32.
  const Halves d = __builtin_ia32_vcvtps2ph(wide(a) * wide(b) + wide(c), 0);
  return (u16)d[0] | (u32)(u16)d[1] << 16;
}
DEV u32 mul_fp16x2(u32 a, u32 b) { return fma_fp16x2(a, b, 0x80008000u); }
DEV u32 add_fp16x2(u32 a, u32 b) { return fma_fp16x2(a, 0x3c003c00u, b); }
DEV u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  float x[2], y[2], z[2];
  unpack_bf16(a, x[0], x[1]), unpack_bf16(b, y[0], y[1]), unpack_bf16(c, z[0], z[1]);
  return pack_bf16(std::fma(x[0], y[0], z[0]), std::fma(x[1], y[1], z[1]));
}
DEV u32 mul_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000u); }
DEV float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : std::max(a, b); }
// What products and `pack` take 16 bits for.
#if IS_BF16
DEV float of_16(u16 v) { return bits<float>((u32)v << 16); }
DEV u32 to_16(float f) {
  const u32 v = bits<u32>(f);
  return f != f ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
#else
DEV float of_16(u16 v) { return half_to_float(v); }
DEV u32 to_16(float f) { return float_to_half(f); }
#endif
DEV u32 pack(float lo, float hi) { return to_16(lo) | to_16(hi) << 16; }
DEV int dp4a_us(u32 w, u32 a, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(u8)(w >> i) * (int)(signed char)(a >> i);
  return c;
}
DEV int dp4a_ss(u32 w, u32 a, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(w >> i) * (int)(signed char)(a >> i);
  return c;
}
DEV u32 permute(u32 a, u32 b, u32 places) {
  const u64 bytes = a | (u64)b << 32;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 place = places >> (4 * i) & 15, byte = (u32)(bytes >> (8 * (place & 7))) & 255;
    d |= (place & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * i);
  }
  return d;
}
template <bool TRANSPOSED> DEV void load_matrices(u32 (&r)[4], u32 a) {
  const auto rows = collect(a);
  const int outer = lane_id() / 4, inner = 2 * (lane_id() % 4);
  for (int i = 0; i < 4; ++i) {
    const u32 first =
        TRANSPOSED ? rows[8 * i + inner] + 2 * outer : rows[8 * i + outer] + 2 * inner;
    const u32 second = TRANSPOSED ? rows[8 * i + inner + 1] + 2 * outer : first + 2;
    r[i] = load_shared<u16>(first) | (u32)load_shared<u16>(second) << 16;
  }
  __syncwarp();  // nobody writes there before all lanes have read
}
struct Operands { u32 a[4], b[2]; };
DEV void widen(float* to, u32 both) {
  to[0] = of_16((u16)both), to[1] = of_16((u16)(both >> 16));
}
typedef float Floats8 __attribute__((vector_size(32)));
DEV float dot(const float* a, const float* b, int halves) {
  Floats8 sums = {};
  for (int half = 0; half < halves; ++half) sums += ((const Floats8*)a)[half] * ((const Floats8*)b)[half];
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[i];
  return sum;
}
// m16n8k(8 halves): fragments as PTX deals them.
DEV void multiply_add(float (&d)[4], const Operands& own, int halves) {
  Matrices& m = current->warp->matrices[current->warp->turn & 1];
  const int row = lane_id() / 4, column = 2 * (lane_id() % 4);
  for (int i = 0; i < 2 * halves; ++i)
    widen(&m.a[row + 8 * (i % 2)][8 * (i / 2) + column], own.a[i]);
  for (int i = 0; i < halves; ++i) widen(&m.b[row][8 * i + column], own.b[i]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) d[i] += dot(m.a[row + 8 * (i / 2)], m.b[column + i % 2], halves);
}
DEV void mma_k16(float (&d)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  multiply_add(d, {{a0, 0, a2, 0}, {b0, b1}}, 2);
}
DEV void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) { multiply_add(d, {{a0, a1}, {b}}, 1); }
