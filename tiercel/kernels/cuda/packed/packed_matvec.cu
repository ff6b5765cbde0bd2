// packed_matvec: y = x W^T for m <= TOKENS tokens and a quantised W, at the speed of reading W.
// Layouts: at the parameters; of W quant.py and packed_units*.cuh.
//
// Macros: QTYPE, IN_FILE and IN_STEP (layout of W), TOKENS and MEANS (packed_tokens.cuh), TAIL (groups of 32
// columns in a row's last unit, 0 for all 8), SLOT (bytes of a unit), PARTS (warps that share a
// tile of 16 rows: 8, or 4 where a row has no more units), GROUPS (tiles at a time in a CTA),
// STAGES (units of a warp in flight), EARLY (of them, before x is loaded), BUFFERS (of sums), OUT
// (0 fp16, 1 bf16, 2 float32), IS_SPLIT, CTAS (an SM, for the registers).
//
// A warp owns every PARTS-th unit of its group's tiles and streams them through a ring of its own:
// a unit is copied, used and given back by one warp, so nothing waits for another warp but the sum
// at the end of a tile. Copies run ahead over tiles. With dependent launch the first ones overlap
// the kernel before; few of them, because x queues after them.
//
// Order of a row's sum, the same for every m, launch and layout, so that a token's bits depend on
// none: a unit's 256 columns in the tensor core; slices of 16 units; in a slice, parts 0 to 7, each
// its unit and the one 8 further; then the slices. Parts' sums meet in shared memory: of each pair
// of tokens 128 bytes, 16 for each of the eight lanes that hold it. IS_SPLIT: a CTA has one slice
// (grid.y), slices' sums go through `partial`, and the last CTA of some tiles adds them.
#if QTYPE == 4 || QTYPE == 6
#include "packed/packed_units.cuh"
#elif QTYPE == 2 || QTYPE == 3
#include "packed/packed_units16.cuh"
#else
#include "packed/packed_units32.cuh"
#endif
#if QTYPE == 4
using namespace q4;
#elif QTYPE == 6
using namespace q6;
#endif

#define WARPS (PARTS * GROUPS)
#define SLICE 16
constexpr u32 PART_STEP = (TOKENS + 1) / 2 * 128;  // of a part's sums
static_assert(GROUPS + PARTS < 16, "named barriers");

DEV void store(void* out, i64 at, float y) {
#if OUT == 0
  ((u16*)out)[at] = float_to_half(y);
#elif OUT == 1
  ((u16*)out)[at] = float_to_bf16(y);
#else
  ((float*)out)[at] = y;
#endif
}
DEV void group_sync(int group) { bar_sync(group + 1, 32 * PARTS); }
DEV void part_sync(int part) { bar_sync(GROUPS + 1 + part, 32 * GROUPS); }

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) packed_matvec(
    Planes planes,    // of W
    const uint4* x,   // (m, blocks * 256) fp16
    void* out,        // (m, >= rows), out_stride elements from row to row
    float* partial,   // (slices, m, tiles * 16), IS_SPLIT
    u32* tickets,     // (tiles,) zero, and zero again at the end: of each group's tiles, IS_SPLIT
    int rows, int blocks, int m, int x_stride, int out_stride) {
  SHARED_MEMORY(memory);
  const u32 tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  const u32 group = warp / PARTS, part = warp % PARTS;
  const int tiles = (u32)(rows + 15) / 16;
#if IS_SPLIT
  const int first = blockIdx.y * SLICE, last = min(first + SLICE, blocks);
  const int slices = (blocks + SLICE - 1) / SLICE;
#else
  const int first = 0, last = blocks;
#endif
  const int units = last - first;
  const u32 smem = shared_address(memory), ring = smem + warp * STAGES * SLOT;
  const u32 sum_step = (u32)(units + SLICE - 1) / SLICE * PARTS * PART_STEP;  // of a group's buffer
  const u32 mine = smem + WARPS * STAGES * SLOT + group * BUFFERS * sum_step;
  const u32 placed = smem + WARPS * STAGES * SLOT + GROUPS * BUFFERS * sum_step;
  launch_dependents();

  const int step = gridDim.x * GROUPS, start = blockIdx.x * GROUPS + group;
  const int of_tile = (units + PARTS - 1 - part) / PARTS;  // units of this warp
  const int next_tile = step * blocks - (of_tile - 1) * PARTS;
  int to_fetch = of_tile ? start : tiles, left = of_tile, fetch_slot = 0;  // a tile, its units
  Source source(planes, (i64)start * blocks + first + part, blocks, rows, lane);
  auto fetch_next = [&]() {
    if (to_fetch < tiles) {
      source.fetch(ring + fetch_slot * SLOT);
      --left;
      source.advance(left ? PARTS : next_tile);
      if (left == 0) left = of_tile, to_fetch += step;
    }
    copy_commit();
    fetch_slot = fetch_slot + 1 == STAGES ? 0 : fetch_slot + 1;
  };
#pragma unroll
  for (int i = 0; i < EARLY; ++i) fetch_next();
  wait_for_inputs();
  // The warps of a part, one in each group, place what they use: 32 columns of a token a lane.
  // Neighbours take groups of a unit, then tokens, which are in different banks.
  const int pieces = TOKENS * of_tile * 8;
  // With many tokens CTAs begin at different pieces: all want the same few lines of the L2 together
  // (16 tokens 0.4 us faster; one token 0.2 slower, docs/notes/packed_products.md).
  const int turn = NT > 1 ? (int)((i64)pieces * blockIdx.x / gridDim.x) & ~31 : 0;
  uint4 v[4];
  int b, n;  // unit of the row and token of a piece
  auto ask = [&](int i) {
    if (i >= pieces) return;
    const u32 at = (i + turn < pieces ? i + turn : i + turn - pieces) / 8u;
    b = part + at / TOKENS * PARTS, n = at % TOKENS;
    const int j = lane & 7;
    const uint4* from = x + ((i64)n * x_stride + (first + b) * 256 + 32 * j) / 8;
    const bool is_inside = TAIL == 0 || first + b < blocks - 1 || j < TAIL;
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = n < m && is_inside ? from[k] : make_uint4(0, 0, 0, 0);
  };
  int i = 32 * group + lane;
  ask(i);
#pragma unroll
  for (int k = EARLY; k < STAGES; ++k) fetch_next();
  for (; i < pieces; ask(i += 32 * GROUPS)) stage(placed + b * UNIT_TOKENS, v, lane & 7, n);
  part_sync(part);

  int slot = 0, buffer = 0;
  for (int tile = start; tile < tiles; tile += step) {
    const u32 here = mine + buffer * sum_step;
    for (int s = 0, b = part; s * SLICE < units; ++s) {
      float sum[NT][4] = {};
      for (; b < min((s + 1) * SLICE, units); b += PARTS) {
        const Tokens tokens(placed + b * UNIT_TOKENS, m, lane);
        copy_wait<STAGES - 1>();
        __syncwarp();
#if STAGES == 1  // nothing else of the warp is in flight: its next copies run beside the products
        multiply(sum, ring + slot * SLOT, tokens, lane, [&] {
          __syncwarp();
          fetch_next();
        });
#else  // 24576 x 4096 (Q4_K), one token: 1 us faster than the above (docs/notes/packed_products.md)
        multiply(sum, ring + slot * SLOT, tokens, lane, [] {});
        __syncwarp();
        fetch_next();
#endif
        slot = slot + 1 == STAGES ? 0 : slot + 1;
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const u32 pair = 4 * nt + (lane & 3);
        if (2 * pair < m)
          store_shared(here + (s * PARTS + part) * PART_STEP + 128 * pair + 16 * (lane >> 2),
                       make_uint4(__float_as_uint(sum[nt][0]), __float_as_uint(sum[nt][1]),
                                  __float_as_uint(sum[nt][2]), __float_as_uint(sum[nt][3])));
      }
    }
    group_sync(group);
    for (int i = part * 32 + lane; i < 16 * m; i += 32 * PARTS) {
      const int n = i >> 4, row = tile * 16 + (i & 15);
      u32 at = here + (n >> 1) * 128 + 16 * (i & 7) + (i & 8) + 4 * (n & 1);
      float y = 0;
      for (int s = 0; s < units; s += SLICE) {
        float of_slice = 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p, at += PART_STEP) of_slice += load_shared<float>(at);
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
