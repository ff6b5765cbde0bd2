// What packed_ptx.cuh, hopper.cuh, packed_gemm_ptx.cuh and CUDA itself give kernels that run by
// `run_products.cpp`, for one processor; behind q4k_device.hpp. The CTAs of a cluster run together.
//
// What the kernel ahead writes is NaN until a CTA waits for it. A product of a warpgroup reads its
// operands as late as it may: when its group is waited for.
#undef blockIdx
#undef gridDim
#undef THREADS
#undef __shared__
#define __shared__ static
#define __cluster_dims__(...)
struct Box { int x, y, z; };
static Box grid, first_block;  // of the launch; of the cluster, whose CTAs differ in y
static int num_threads;        // of a CTA
#define blockIdx (Box{first_block.x, first_block.y + current->cta, first_block.z})
#define gridDim grid
#define blockDim (Index{num_threads})
#define THREADS num_threads

DEV float __fadd_rn(float a, float b) { return a + b; }
DEV float __fsub_rn(float a, float b) { return a - b; }
DEV float __fmul_rn(float a, float b) { return a * b; }

// ---- products of bytes: fragments as PTX deals them
struct ByteOperands { u32 a[4], b[2]; };
template <class Weight>
DEV void multiply_bytes(int (&c)[4], const ByteOperands& own, int halves, int start) {
  const auto lanes = collect(own);
  for (int i = 0; i < 4; ++i) {
    const int row = lane_id() / 4, column = 2 * (lane_id() % 4) + i % 2;
    c[i] = start;
    for (int k = 0; k < 16 * halves; ++k) {
      const u32 a = lanes[4 * row + k % 16 / 4].a[2 * (k / 16) + i / 2];
      const u32 b = lanes[4 * column + k % 16 / 4].b[k / 16];
      c[i] += (int)(Weight)(a >> 8 * (k % 4)) * (int)(signed char)(b >> 8 * (k % 4));
    }
  }
}
DEV void mma_unsigned(int (&c)[4], const u32 (&a)[4], uint2 b, int start) {
  multiply_bytes<u8>(c, {{a[0], a[1], a[2], a[3]}, {b.x, b.y}}, 2, start);
}
DEV void mma_signed(int (&c)[4], const u32 (&a)[2], u32 b, int start) {
  multiply_bytes<signed char>(c, {{a[0], a[1]}, {b}}, 1, start);
}

// ---- products of a warpgroup: m64n(N)k16, weights in registers, tokens in shared memory
struct Product { float* sums; const u32* weights; u32 tokens; int columns; bool is_bf16; };
typedef List<List<Product>> ProductGroups;  // of a thread; the last is open
static List<ProductGroups> products;              // by CTA and thread
DEV ProductGroups& own_products() { return products[current->cta * MOST_THREADS + current->tid]; }
constexpr u32 NO_OFFSET = 0, DESC_HI = 0;
DEV u32 mdesc(u32 address, u32 stride) {
  if (address % 1024 || stride != NO_OFFSET) fail("a matrix descriptor");
  return address >> 4;
}
template <int N> DEV void product(float (&sums)[N], const u32* weights, u64 tokens) {
  own_products().back().push_back({sums, weights, (u32)tokens, 2 * N, false});
}
DEV float of_bits(u16 v, bool is_bf16) { return is_bf16 ? bits<float>((u32)v << 16) : half_to_float(v); }
DEV u16 swizzled(u32 at) { return load_shared<u16>(at ^ (at >> 7 & 7) << 4); }
DEV void multiply(const Product& p) {
  Matrices& m = current->warp->matrices[current->warp->turn & 1];
  const int g = lane_id() / 4, column = 2 * (lane_id() % 4);
  for (int i = 0; i < 8; ++i)
    m.a[g + 8 * (i / 2 % 2)][8 * (i / 4) + column + i % 2] =
        of_bits(p.weights[i / 2] >> 16 * (i % 2), p.is_bf16);
  __syncwarp();
  for (int n = 2 * (lane_id() % 4); n < p.columns; n += n % 2 ? 7 : 1) {
    const u32 row = (p.tokens << 4) + 128 * n;  // 64 columns, chunks of 16 bytes swizzled
    alignas(32) float token[16];
    for (int k = 0; k < 16; ++k) token[k] = of_bits(swizzled(row + 2 * k), p.is_bf16);
    for (int half = 0; half < 2; ++half)
      p.sums[n / 8 * 4 + 2 * half + n % 2] += dot(m.a[g + 8 * half], token, 2);
  }
}
DEV void wg_fence() {}
DEV void wg_commit() { own_products().push_back({}); }
template <int N> DEV void wg_wait() {
  auto& own = own_products();
  for (; own.size() > N + 1; own.pop_front())
    for (const Product& p : own.front()) multiply(p);
  __syncwarp();
}
template <int N> DEV void pin(float (&)[N]) {}
DEV int uni(int x) { return __shfl_sync(~0u, x, 0); }
DEV u32 uniform(u32 x) {
  if (__reduce_max_sync(~0u, x) != x) fail("lanes differ");
  return x;
}

// ---- memory and barriers
// The thread's copies arrive late, each counted in bytes beside its arrival.
DEV void mbar_arrive_copied(u32 at) {
  for (const Pending& copy : own_groups().back()) {
    mbarrier(at).bytes += copy.size;
    here().copies.push_back({copy.to, at, {copy.data, copy.data + copy.size}});
  }
  own_groups().back().clear();
  mbar_arrive(at);
}
static List<u64> prefetched;  // addresses and bytes
DEV void prefetch_bulk(const void* from, u32 bytes) {
  if ((size_t)from % 16 || bytes % 16 || !bytes) fail("a prefetch");
  prefetched.push_back((u64)from), prefetched.push_back(bytes);
}
DEV u32 hidden(u32 v) { return v; }
DEV u32 merge(u32 v, u32 mask, u32 other) { return (v & mask) | other; }
static NamedBarrier cluster;
DEV void cluster_sync() {
  const u32 turn = cluster.turn;
  if (++cluster.arrived == num_threads * (int)ctas.size())
    cluster.arrived = 0, ++cluster.turn, ++events;
  wait_while(cluster.turn, turn);
}

// ---- dependent launch
struct Late { u8* at; List<u8> data; };
static List<Late> late;
static bool has_waited;
DEV void launch_dependents() {}
DEV void wait_for_inputs() {
  if (!has_waited)
    for (const Late& one : late) std::memcpy(one.at, one.data.data(), one.data.size());
  has_waited = true;
}
