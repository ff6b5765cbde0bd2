// linear_group: up to 8 tokens times matrices of several formats that read the same x, in one
// launch. Layouts: at the parameters. Host side, floor: kernels/block/linear_group.py.
//
// PARTS warps share the columns of a tile (linear_group_tiles.cuh) and add their sums in order; a CTA
// has TILES tiles of one matrix at a time and goes through a run of such blocks.
//
// x, normed or rotated back, is in shared memory. Weights are requested before the wait for the
// kernel ahead, and a warp keeps STAGES units of 128 bytes a row in flight, across blocks too. Sums
// are float32 in an order that follows from the matrix and PARTS alone: a token's bits depend on no
// other token.
//
// A second group may follow, whose x is a result of the first (NEXT_PARTS > 0). Its CTAs are those of
// the first: each counts what it has finished, requests its first weights of the second group, and
// waits until all have counted. So all run at once (a cooperative launch), and weights do not wait.
//
// Macros: IS_BF16 (1), HALF_X, KINDS (1: FP8 in blocks, 2: bfloat16, 4: Q8_0, added), PARTS, TILES, STAGES,
// CTAS (an SM), INPUT (0: x as it is, 1: normed, 2: heads rotated back, and groups); NEXT_KINDS, NEXT_PARTS,
// NEXT_STAGES and NEXT_INPUT of a second group, 0 parts for none.
#define WARPS (PARTS * TILES)
#define X_WARPS WARPS
#define MEET_AT_X __syncthreads
#include "block/linear_group_tiles.cuh"
#include "include/counters_ptx.cuh"

#define COUNTED 0  // tickets: CTAs that have finished the first group, and that have left
#define GONE 1

// How the warps of a CTA share the work of a group.
template <int KINDS_, int PARTS_, int STAGES_, int INPUT_> struct Work {
  static constexpr int SHARED = PARTS_, BLOCK = WARPS / PARTS_;  // warps of a tile, tiles of a block
  static constexpr int FORMATS = KINDS_, AHEAD = STAGES_, GIVEN = INPUT_;
};
typedef Work<KINDS, PARTS, STAGES, INPUT> First;

// ---- what a lane reads
struct Rows {
  const u8* weights[2];
  const u8* scales[2];
};
template <int KIND> DEV Rows find_rows(const Matrix& m, int tile, int lane) {
  Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Rows after the last one are read as the last one, and not stored.
    const int row = m.is_pair ? min(8 * tile + lane / 4, m.rows - 1) + half * m.rows
                              : min(16 * tile + lane / 4 + 8 * half, m.rows - 1);
    rows.weights[half] = m.weights + row * m.row_bytes;
    if (KIND == FP8)
      rows.scales[half] =
          m.scales + (i64)(row / m.scale_rows) * m.scale_stride * (m.is_wide_scale ? 4 : 1);
    if (KIND == Q8_0) rows.scales[half] = m.scales + (i64)row * m.scale_stride * 2;
  }
  return rows;
}
template <int KIND> DEV void fetch(Unit& unit, const Matrix& m, const Rows& rows, int at, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u8* from = rows.weights[half] + at * 128;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      if (KIND == Q8_0) {
        const uint2 first = load_no_allocate<uint2>(from + 64 * piece + 8 * t);
        const uint2 second = load_no_allocate<uint2>(from + 64 * piece + 32 + 8 * t);
        unit.weights[half][piece] = make_uint4(first.x, first.y, second.x, second.y);
      } else {
        unit.weights[half][piece] = load_no_allocate<uint4>(from + 64 * piece + 16 * t);
      }
    }
    if (KIND == FP8) {
      const int column = m.scale_columns == 128 ? at : at * 128 / m.scale_columns;
      unit.scales[half].x = m.is_wide_scale ? load_read_only<u32>(rows.scales[half] + 4 * column)
                                            : load_read_only_byte(rows.scales[half] + column);
    }
    if (KIND == Q8_0) unit.scales[half] = load_no_allocate<uint2>(rows.scales[half] + 8 * at);
  }
}

// A run of blocks of one matrix; a warp has units part, part + W::SHARED, ... of its tile of each. x is
// there after the wait.
template <class W, int KIND, class Wait>
DEV void multiply(const Matrix& m, const Input& in, u8* memory, Wait wait) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % W::SHARED;
  const int units = in.columns / Shape<KIND>::COLUMNS;
  const int cta = blockIdx.x - m.first_cta;
  const int last = (cta + 1) * m.num_blocks / m.num_ctas;
  int block = cta * m.num_blocks / m.num_ctas;
  float* all_sums = (float*)(memory + in.num_tokens * row_of_x(in.columns));
  Rows rows = find_rows<KIND>(m, block * W::BLOCK + warp / W::SHARED, lane);
  Unit ring[W::AHEAD];
#pragma unroll
  for (int stage = 0; stage < W::AHEAD; ++stage)
    if (part + stage * W::SHARED < units)
      fetch<KIND>(ring[stage], m, rows, part + stage * W::SHARED, lane % 4);
  wait();
  int staged = -1;
  if constexpr (W::GIVEN != ROTATED) {
    stage_x<W::GIVEN>(in, in.norm_weight, memory, 0);
    if constexpr (is_half<KIND>()) halve_x(in, memory);
  }
  for (; block < last; ++block) {
    if constexpr (W::GIVEN == ROTATED) {
      // Rows of a block have one part of x: groups are multiples of 8 tiles.
      const int first_row = 16 * W::BLOCK * block;
      const int first_column = (first_row < m.rows ? first_row : 0) / m.group_rows * in.columns;
      if (first_column != staged) {
        if (staged >= 0) __syncthreads();
        stage_x<W::GIVEN>(in, in.norm_weight, memory, first_column);
        if constexpr (is_half<KIND>()) halve_x(in, memory);
        staged = first_column;
      }
    }
    const int tile = block * W::BLOCK + warp / W::SHARED;
    float sums[4] = {};
    for (int first = 0; first * W::SHARED < units; first += W::AHEAD) {
      // What is fetched from here on is of the next block.
      const bool is_end = (first + W::AHEAD) * W::SHARED >= units;
      if (is_end && block + 1 < last) rows = find_rows<KIND>(m, tile + W::BLOCK, lane);
#pragma unroll
      for (int stage = 0; stage < W::AHEAD; ++stage) {
        const int at = part + (first + stage) * W::SHARED;
        if (at < units) multiply_unit<KIND>(sums, m, ring[stage], in, memory, at);
        const int next = is_end ? part + stage * W::SHARED : at + W::AHEAD * W::SHARED;
        if (next < units && (!is_end || block + 1 < last))
          fetch<KIND>(ring[stage], m, rows, next, lane % 4);
      }
    }
    if constexpr (W::SHARED > 1) {
      // Two buffers in turn: one barrier a block.
      float* own = all_sums + ((block % 2 * WARPS + warp) * 32 + lane) * 4;
      *(float4*)own = make_float4(sums[0], sums[1], sums[2], sums[3]);
      __syncthreads();
      if (part) continue;
#pragma unroll
      for (int other = 1; other < W::SHARED; ++other) {
        const float4 v = *(const float4*)(own + other * 128);
        sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
      }
    }
    if constexpr (is_half<KIND>()) scale_sums(in, memory, sums);
    store_tile(m, in, rows_of_tile(m) * tile, m.rows, sums);
  }
}
// What this CTA has of a group: blocks of one matrix, or nothing.
template <class W, class Wait>
DEV void multiply_group(const Group& group, const Input& in, u8* memory, Wait wait) {
  int index = 0;
  for (int i = 1; i < group.count; ++i) index += (int)blockIdx.x >= group.matrices[i].first_cta;
  const Matrix& m = group.matrices[index];
  if ((int)blockIdx.x >= m.first_cta + m.num_ctas) return wait();
  if constexpr (W::FORMATS & 1)
    if (m.kind == FP8) multiply<W, FP8>(m, in, memory, wait);
  if constexpr (W::FORMATS & 2)
    if (m.kind == BF16) multiply<W, BF16>(m, in, memory, wait);
  if constexpr (W::FORMATS & 4)
    if (m.kind == Q8_0) multiply<W, Q8_0>(m, in, memory, wait);
}

struct AfterPredecessor {
  DEV void operator()() const { wait_for_inputs(); }
};
#if NEXT_PARTS
typedef Work<NEXT_KINDS, NEXT_PARTS, NEXT_STAGES, NEXT_INPUT> Next;
struct AfterAllCtas {
  u32* tickets;
  DEV void operator()() const {
    if (threadIdx.x == 0) wait_for_count(tickets + COUNTED, gridDim.x);
    __syncthreads();
  }
};
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS)
    linear_group(const __grid_constant__ Group group, const __grid_constant__ Input in
#if NEXT_PARTS
                 , const __grid_constant__ Group next, const __grid_constant__ Input next_in,
                 u32* tickets  // zeros, and zeros again at the end
#endif
    ) {
  launch_dependents();
  SHARED_MEMORY(memory);
  multiply_group<First>(group, in, memory, AfterPredecessor());
#if NEXT_PARTS
  __syncthreads();  // results are written, and x has been read
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(tickets + COUNTED, 1);
  }
  multiply_group<Next>(next, next_in, memory, AfterAllCtas{tickets});
  if (threadIdx.x == 0 && atomicInc(tickets + GONE, gridDim.x - 1) == gridDim.x - 1)
    tickets[COUNTED] = 0;
#endif
}
