// What hopper.cuh and CUDA itself give a kernel that run_launch.cpp runs, for one processor; after
// attention_device.hpp. A CTA's shared memory of fixed size holds 0xEE when it starts.
//
// Products of a warpgroup are made at once, each thread its own part; no lane of a warp passes a wait
// for them before all have made theirs. Boxes of TMA arrive late, as in device.hpp.
#undef THREADS
#define THREADS NTHR
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#undef __shared__
#define __shared__ static __attribute__((section("shared_memory")))
#define DYNAMIC_SHARED(name) u8* const name = here().smem
#define __restrict__

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static int2 make_int2(int x, int y) { return {x, y}; }
DEV int atomicAdd(int* p, int v) {
  const int old = *p;
  *p += v;
  return old;
}

DEV int uni(int x) { return __shfl_sync(~0u, x, 0); }
DEV u32 uniform(u32 x) {
  const auto lanes = collect(x);
  for (int i = 0; i < WARP; ++i)
    if (lanes[i] != x) fail("a value that lanes do not share");
  return x;
}
template <int N> DEV void lower_registers() {}
template <int N> DEV void raise_registers() {}
template <int N> DEV void pin(float (&)[N]) {}

// ---- TMA: a map is an address, sizes and steps of the outer dimensions in bytes, and a box, as
// `encode_tensor_map` of launches_on_cpu.py writes it.
struct Map { u64 address, sizes[3], steps[2], box[3]; };
DEV u32 swizzled_128(u32 at) { return at ^ (at >> 7 & 7) << 4; }
DEV void tma_box(u32 to, const TMap* of, u32 bar, int x, int y, int z) {
  Map map;
  std::memcpy(&map, of, sizeof map);
  if (to % 1024) fail("alignment of a box");
  List<u8> data(128 * map.box[1] * map.box[2]);
  for (u64 row = 0; row < map.box[1] * map.box[2]; ++row) {
    const u64 at_y = y + row % map.box[1], at_z = z + row / map.box[1];
    if (x < 0 || y < 0 || z < 0) fail("a box before its view");
    if (at_y >= map.sizes[1] || at_z >= map.sizes[2]) continue;  // zeros
    const u8* from = (const u8*)map.address + at_y * map.steps[0] + at_z * map.steps[1] + 2 * x;
    for (int c = 0; c < 8; ++c) std::memcpy(&data[swizzled_128(128 * row + 16 * c)], from + 16 * c, 16);
  }
  send(to, bar, std::move(data));
}
#define tma3 tma_box

// ---- wgmma
#define DESC_HI ((1024u >> 4) | (1u << 30))
DEV u32 mdesc(u32 address, u32 lbo) { return (address & 0x3FFFF) >> 4 | (lbo >> 4) << 16; }
DEV float operand(u32 desc, u32 row, u32 column) {  // 128-byte rows, groups of 8 after 1024 bytes
  const u32 at = ((desc & 0x3FFF) << 4) + row / 8 * 1024 + row % 8 * 128 + column * 2;
  u16 v;
  std::memcpy(&v, here().smem + swizzled_128(at), 2);
  return of_16(v);
}
DEV int first_row() { return current->tid / WARP % 4 * 16 + lane_id() / 4; }
template <int ACC, int N> DEV void wgmma_ss(float (&d)[N], u32 a, u32 ah, u32 b, u32 bh) {
  if (ah != DESC_HI || bh != DESC_HI) fail("a matrix descriptor");
  float x[2][16];
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) x[h][k] = operand(a, first_row() + 8 * h, k);
  for (int j = 0; j < N / 4; ++j)
    for (int e = 0; e < 2; ++e) {
      float sum[2] = {ACC ? d[4 * j + e] : 0.f, ACC ? d[4 * j + 2 + e] : 0.f};
      for (int k = 0; k < 16; ++k) {
        const float y = operand(b, 8 * j + 2 * (lane_id() % 4) + e, k);
        sum[0] += x[0][k] * y, sum[1] += x[1][k] * y;
      }
      d[4 * j + e] = sum[0], d[4 * j + 2 + e] = sum[1];
    }
}
struct Fragment { u32 a[4]; };
DEV void wgmma_rs(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, u32 bh) {
  if (bh != DESC_HI) fail("a matrix descriptor");
  const auto lanes = collect(Fragment{{a0, a1, a2, a3}});
  float x[2][16];
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) {
      const Fragment of = lanes[lane_id() / 4 * 4 + k % 8 / 2];
      x[h][k] = of_16((u16)(of.a[2 * (k / 8) + h] >> 16 * (k % 2)));
    }
  for (int j = 0; j < 16; ++j)
    for (int e = 0; e < 2; ++e) {
      const u32 column = 8 * j + 2 * (lane_id() % 4) + e;
      const u32 half = b + (column / 64) * (b >> 16 & 0x3FFF);  // in 16 bytes
      for (int k = 0; k < 16; ++k) {
        const float y = operand(half, k, column % 64);
        d[4 * j + e] += x[0][k] * y, d[4 * j + 2 + e] += x[1][k] * y;
      }
    }
}
DEV void wg_fence() {}
DEV void wg_commit() {}
template <int N> DEV void wg_wait() { __syncwarp(); }
