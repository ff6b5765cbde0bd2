// y = x W^T for m <= 8 NT tokens and a quantised W, at the speed of reading W; a header of units
// (q4k_units*.cuh) before it. Macros besides its own: TAIL (of a row's last unit the groups of 32
// columns that it has, 0 for all 8), SLOT (bytes of a unit), PARTS (warps that share a tile of 16
// rows: 8, or 4 where a row has no more units), GROUPS (tiles at a time in a CTA), STAGES (units of
// a warp in flight), EARLY (of them, before x is asked for), BUFFERS (of sums), OUT (0 fp16, 1 bf16,
// 2 float32), IS_SPLIT, CTAS (an SM, for the registers).
//
// A warp owns every PARTS-th unit of its group's tiles and streams them through a ring of its own:
// a unit is copied, used and given back by one warp, so nothing waits for another warp but the sum
// at the end of a tile. Copies run ahead over tiles. With dependent launch the first ones overlap
// the kernel before; few of them, because x queues behind them.
//
// Order of a row's sum, the same for every m, launch and layout, so that a token's bits depend on
// none: a unit's 256 columns in the tensor core; slices of 16 units; in a slice, parts 0 to 7, each
// its unit and the one 8 further; then the slices. Parts' sums meet in shared memory: of each pair
// of tokens 128 bytes, 16 for each of the eight lanes that hold it. IS_SPLIT: a CTA has one slice (grid.y), slices' sums go
// through `partial`, and the last CTA of some tiles adds them.
#define WARPS (PARTS * GROUPS)
#define SLICE 16

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
DEV void group_sync(int group) { bar_sync(group + 1, 32 * PARTS); }

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) q4k_matvec(
    Planes planes,    // of W
    const uint4* x,   // (m, blocks * 256) fp16
    void* out,        // (m, >= rows), out_stride elements from row to row
    float* partial,   // (slices, m, tiles * 16), IS_SPLIT
    u32* tickets,     // (tiles,) zero, and zero again at the end: of each group's tiles, IS_SPLIT
    int rows, int blocks, int m, int x_stride, int out_stride) {
  extern __shared__ __align__(128) u8 memory[];
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  const int group = warp / PARTS, part = warp % PARTS;
  const int tiles = (rows + 15) / 16;
#if IS_SPLIT
  const int first = blockIdx.y * SLICE, last = min(first + SLICE, blocks);
  const int slices = (blocks + SLICE - 1) / SLICE;
#else
  const int first = 0, last = blocks;
#endif
  const int units = last - first;
  const u32 smem = shared_address(memory);
  const u32 unit_step = m * (512 + MEANS), sums = smem + units * unit_step;
  const u32 part_step = (m + 1) / 2 * 128;                            // of a part's sums
  const u32 sum_step = (units + SLICE - 1) / SLICE * PARTS * part_step;  // of a group's buffer
  const u32 mine = sums + group * BUFFERS * sum_step;
  const u32 ring = sums + GROUPS * BUFFERS * sum_step + warp * STAGES * SLOT;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif

  const int step = gridDim.x * GROUPS, start = blockIdx.x * GROUPS + group;
  const int of_tile = part < units ? (units - 1 - part) / PARTS + 1 : 0;  // units of this warp
  int to_fetch = start < tiles ? ((tiles - 1 - start) / step + 1) * of_tile : 0;
  const int next_tile = step * blocks - (of_tile - 1) * PARTS;
  int left = of_tile, fetch_slot = 0;
  Source source(planes, (i64)start * blocks + first + part, blocks, rows, lane);
  auto fetch_next = [&]() {
    if (to_fetch > 0) {
      source.fetch(ring + fetch_slot * SLOT);
      --to_fetch, --left;
      source.advance(left ? PARTS : next_tile);
      if (left == 0) left = of_tile;
    }
    copy_commit();
    fetch_slot = fetch_slot + 1 == STAGES ? 0 : fetch_slot + 1;
  };
#pragma unroll
  for (int i = 0; i < EARLY; ++i) fetch_next();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int pieces = m * units * 8;  // of 32 columns
  // With many tokens CTAs begin at different pieces: all want the same few lines of the L2 at once
  // (16 tokens 0.4 us faster; one token 0.2 slower, docs/notes/q4k.md).
  const int turn = NT > 1 ? (int)((i64)pieces * blockIdx.x / gridDim.x) & ~31 : 0;
  auto place = [&](int i) { return i + turn < pieces ? i + turn : i + turn - pieces; };
  uint4 v[4];
  auto ask = [&](int i) {
    const int n = place(i) / (units * 8), at = place(i) - n * units * 8;
    const uint4* from = x + ((i64)n * x_stride + first * 256 + at * 32) / 8;
    const bool is_inside = TAIL == 0 || 8 * (first - blocks) + at < TAIL - 8;
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = is_inside ? from[k] : make_uint4(0, 0, 0, 0);
  };
  if (tid < pieces) ask(tid);
#pragma unroll
  for (int i = EARLY; i < STAGES; ++i) fetch_next();
  for (int i = tid; i < pieces; i += 32 * WARPS) {
    const int n = place(i) / (units * 8), at = place(i) - n * units * 8;
    if (i != tid) ask(i);
    stage(smem + (at >> 3) * unit_step, v, m, at & 7, n);
  }
  __syncthreads();

  int slot = 0, buffer = 0;
  for (int tile = start; tile < tiles; tile += step) {
    const u32 here = mine + buffer * sum_step;
    for (int s = 0, b = part; s * SLICE < units; ++s) {
      float sum[NT][4] = {};
      for (; b < min((s + 1) * SLICE, units); b += PARTS) {
        const Tokens tokens(smem + b * unit_step, m, lane);
        copy_wait<STAGES - 1>();
        __syncwarp();
        multiply(sum, ring + slot * SLOT, tokens, lane);
        __syncwarp();
        fetch_next();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
        if (8 * nt + 2 * (lane & 3) < m)
          sts16(here + (s * PARTS + part) * part_step + (4 * nt + (lane & 3)) * 128 + 4 * (lane & ~3),
                __float_as_uint(sum[nt][0]), __float_as_uint(sum[nt][1]),
                __float_as_uint(sum[nt][2]), __float_as_uint(sum[nt][3]));
    }
    group_sync(group);
    for (int i = part * 32 + lane; i < 16 * m; i += 32 * PARTS) {
      const int n = i >> 4, row = tile * 16 + (i & 15);
      u32 at = here + (n >> 1) * 128 + 16 * (i & 7) + (i & 8) + 4 * (n & 1);
      float y = 0;
      for (int s = 0; s < units; s += SLICE) {
        float of_slice = 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p, at += part_step) of_slice += ldsf(at);
        y += of_slice;
      }
#if IS_SPLIT
      __stcg(partial + ((i64)blockIdx.y * m + n) * tiles * 16 + row, y);
#else
      if (row < rows) store(out, (i64)n * out_stride + row, y * 16777216.f);
#endif
    }
#if BUFFERS == 1
    group_sync(group);
#else
    buffer ^= 1;
#endif
  }
#if IS_SPLIT
  if (start >= tiles) return;
  // The order of the threads' stores and the ticket: fence, barrier, ticket, barrier, fence.
  __threadfence();
  group_sync(group);
  u32* flag = (u32*)(memory + (mine - smem));  // all sums were read
  if (part == 0 && lane == 0) *(volatile u32*)flag = atomicInc(tickets + start, slices - 1);
  group_sync(group);
  if (*(volatile u32*)flag != slices - 1) return;
  __threadfence();
  for (int tile = start; tile < tiles; tile += step) {
    for (int i = part * 32 + lane; i < 16 * m; i += 32 * PARTS) {
      const int n = i >> 4, row = tile * 16 + (i & 15);
      float y = 0;
      for (int s = 0; s < slices; ++s) y += __ldcg(partial + ((i64)s * m + n) * tiles * 16 + row);
      if (row < rows) store(out, (i64)n * out_stride + row, y * 16777216.f);
    }
  }
#endif
}
