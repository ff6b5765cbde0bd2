// y = x W^T for m <= 8 NT tokens and a K-quantised W, at the speed of reading W; q4k_units.cuh
// before it. Macros besides its own: PARTS (warps that share a tile of 16 rows: 8, or 4 where a row
// has no more units), GROUPS (tiles at a time in a CTA), STAGES (units of a warp in flight), EARLY
// (of them, before x is asked for), BUFFERS (of sums), OUT (0 fp16, 1 bf16, 2 float32), IS_SPLIT,
// CTAS (an SM, for the registers).
//
// A warp owns every PARTS-th unit of its group's tiles and streams them through a ring of its own:
// a unit is copied, used and given back by one warp, so nothing waits for another warp but the sum
// at the end of a tile. Copies run ahead over tiles. With dependent launch the first ones overlap
// the kernel before; few of them, because x queues behind them.
//
// Order of a row's sum, the same for every m, launch and layout, so that a token's bits depend on
// none: a unit's 256 columns in the tensor core; slices of 16 units; in a slice, parts 0 to 7, each
// its unit and the one 8 further; then the slices. Parts' sums meet in shared memory as the lanes
// hold them, 16 bytes of lane l at 16 l. IS_SPLIT: a CTA has one slice (grid.y), slices' sums go
// through `partial`, and the last CTA of a tile adds them.
#define WARPS (PARTS * GROUPS)
#define SLICE 16
#define SUM_BYTES (PARTS * NT * 512)  // of a tile
#define ITEMS ((4 * NT + PARTS - 1) / PARTS)  // of a thread, of 16 rows x 8 NT tokens

DEV void store(void* out, i64 at, float y) {
#if OUT == 0
  ((u16*)out)[at] = float_to_half(y);
#elif OUT == 1
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(y));
  ((u16*)out)[at] = h;
#else
  ((float*)out)[at] = y;
#endif
}
DEV void group_sync(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * PARTS) : "memory");
}

// act(gate) * up, as kernels/act_mul.py; float32 sums, so nothing is rounded between.
DEV float gated(float gate, float up) {
  const float u = ACTIVATION == 2 ? 1.5957691f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate / (1.f + __expf(-u)) * up;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) q4k_matvec(
    Planes planes,    // of W
    const uint4* x,   // (m, blocks * 256) fp16
    void* out,        // (m, >= rows), out_stride elements from row to row
    float* partial,   // (slices, m, tiles * 16), IS_SPLIT
    u32* tickets,     // (>= groups of a slice,) zero, and zero again at the end, IS_SPLIT
    int rows, int blocks, int m, int x_stride, int out_stride) {
  extern __shared__ __align__(128) u8 memory[];
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  const int group = warp / PARTS, part = warp % PARTS;
  const int tiles = (rows + 15) / 16, spans = tiles / TILES;
#if IS_SPLIT
  const int first = blockIdx.y * SLICE, last = min(first + SLICE, blocks);
  const int slices = (blocks + SLICE - 1) / SLICE;
#else
  const int first = 0, last = blocks;
#endif
  const int units = last - first;
  const u32 smem = shared_address(memory);
  const u32 means = smem + units * 8 * STEP(m), sums = means + (QTYPE == 4 ? units * m * 32 : 0);
  const u32 mine = sums + group * BUFFERS * SUM_BYTES;
  const u32 ring = sums + GROUPS * BUFFERS * SUM_BYTES + warp * STAGES * TILES * SLOT;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif

  const int step = gridDim.x * GROUPS, start = blockIdx.x * GROUPS + group;  // spans
  // Tile i of a span: neighbours, or row by row a gate and what it gates.
  auto tile_of = [&](int span, int i) { return ACTIVATION ? span + i * spans : span * TILES + i; };
  const int of_span = part < units ? (units - 1 - part) / PARTS + 1 : 0;  // units of this warp
  int to_fetch = start < spans ? ((spans - 1 - start) / step + 1) * of_span : 0;
  const int next_span = (ACTIVATION ? step : step * TILES) * blocks - (of_span - 1) * PARTS;
  int left = of_span, fetch_slot = 0;
  Source source(planes, (i64)tile_of(start, 0) * blocks + first + part, blocks, rows, lane);
#if TILES > 1
  Source second(planes, (i64)tile_of(start, 1) * blocks + first + part, blocks, rows, lane);
#endif
  auto fetch_next = [&]() {
    if (to_fetch > 0) {
      --to_fetch, --left;
      const u32 to = ring + fetch_slot * TILES * SLOT;
      const int by = left ? PARTS : next_span;
      source.fetch(to), source.advance(by);
#if TILES > 1
      second.fetch(to + SLOT), second.advance(by);
#endif
      if (left == 0) left = of_span;
    }
    copy_commit();
    fetch_slot = fetch_slot + 1 == STAGES ? 0 : fetch_slot + 1;
  };
  // Row r of each tile of a span, token n.
  auto write = [&](const float (&y)[TILES], int span, int n, int r) {
    const i64 line = (i64)n * out_stride;
#if ACTIVATION
    store(out, line + span * 16 + r, gated(y[0] * 16777216.f, y[1] * 16777216.f));
#else
#pragma unroll
    for (int k = 0; k < TILES; ++k) {
      const int row = tile_of(span, k) * 16 + r;
      if (row < rows) store(out, line + row, y[k] * 16777216.f);
    }
#endif
  };
  auto prefetch_span = [&](int span) {
    if (lane == 0 && span < spans)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        prefetch_units(planes, (i64)tile_of(span, i) * blocks + first, units);
  };
#pragma unroll
  for (int i = 0; i < EARLY; ++i) fetch_next();
  if (part < AHEAD) prefetch_span(start + part * step);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  // A warp copies units of tokens in turn, 8 columns a lane. CTAs start at different ones.
  const u32 here = smem + piece_place(lane, STEP(m));
  const int turn = blockIdx.x % units;
  for (int n = warp / units, i = warp % units; n < m;) {
    const int b = i + turn < units ? i + turn : i + turn - units;
    copy16(here + b * 8 * STEP(m) + n * 64, x + ((i64)n * x_stride + (first + b) * 256) / 8 + lane);
    n += WARPS / units, i += WARPS % units;
    if (i >= units) i -= units, ++n;
  }
  copy_commit();
#pragma unroll
  for (int i = EARLY; i < STAGES; ++i) fetch_next();
  copy_wait<STAGES - EARLY>();
  __syncthreads();
#if QTYPE == 4
  for (int b = warp; b < units; b += WARPS) {
    const Tokens tokens(smem, means, m, b, lane);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) put_means(tokens, means + b * m * 32, m, nt, lane);
  }
  __syncthreads();
#endif

  int slot = 0, buffer = 0;
  for (int span = start; span < spans; span += step) {
    if (AHEAD > 0 && part == 0) prefetch_span(span + AHEAD * step);
    float y[ITEMS][TILES] = {};  // items: token and row in a tile
    for (int s = 0, b = part; s * SLICE < units; ++s) {
      float sum[TILES][NT][4] = {};
      for (; b < min((s + 1) * SLICE, units); b += PARTS) {
        const Tokens tokens(smem, means, m, b, lane);
        copy_wait<STAGES - 1>();
        __syncwarp();
        multiply(sum, ring + slot * TILES * SLOT, tokens, lane);
        __syncwarp();
        fetch_next();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
#pragma unroll
      for (int k = 0; k < TILES; ++k) {
        const u32 here = mine + buffer * SUM_BYTES;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          if (8 * nt + 2 * (lane & 3) < m)
            sts16(here + (part * NT + nt) * 512 + 16 * lane, __float_as_uint(sum[k][nt][0]),
                  __float_as_uint(sum[k][nt][1]), __float_as_uint(sum[k][nt][2]),
                  __float_as_uint(sum[k][nt][3]));
        group_sync(group);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
          const int i = (item * PARTS + part) * 32 + lane, n = i >> 4;
          const int holder = 4 * (i & 7) + ((n & 7) >> 1);
          const u32 at = here + (n >> 3) * 512 + 16 * holder + (i & 8) + 4 * (n & 1);
          float of_slice = 0;
          if (i < 16 * m)
#pragma unroll
            for (int p = 0; p < PARTS; ++p) of_slice += ldsf(at + p * NT * 512);
          y[item][k] += of_slice;
        }
#if BUFFERS == 1
        group_sync(group);
#else
        buffer ^= 1;
#endif
      }
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int i = (item * PARTS + part) * 32 + lane, n = i >> 4, r = i & 15;
      if (i >= 16 * m) break;
#if IS_SPLIT
      float* to = partial + ((i64)blockIdx.y * m + n) * tiles * 16 + r;
#pragma unroll
      for (int k = 0; k < TILES; ++k) __stcg(to + tile_of(span, k) * 16, y[item][k]);
#else
      write(y[item], span, n, r);
#endif
    }
  }
#if IS_SPLIT
  if (start >= spans) return;
  // The order of the threads' stores and the ticket: fence, barrier, ticket, barrier, fence.
  __threadfence();
  group_sync(group);
  u32* flag = (u32*)(memory + (mine - smem));  // sums were read
  if (part == 0 && lane == 0) *(volatile u32*)flag = atomicInc(tickets + start, slices - 1);
  group_sync(group);
  if (*(volatile u32*)flag != slices - 1) return;
  __threadfence();
  for (int span = start; span < spans; span += step) {
    for (int i = part * 32 + lane; i < 16 * m; i += 32 * PARTS) {
      const int n = i >> 4, r = i & 15;
      float y[TILES] = {};
#pragma unroll
      for (int k = 0; k < TILES; ++k)
        for (int s = 0; s < slices; ++s)
          y[k] += __ldcg(partial + ((i64)s * m + n) * tiles * 16 + tile_of(span, k) * 16 + r);
      write(y, span, n, r);
    }
  }
#endif
}
