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
// Macros: IS_BF16 (1), HALF_X, KINDS (1: FP8 in blocks, 2: bfloat16, 4: Q8_0, added), PARTS, TILES, STAGES,
// CTAS (an SM), INPUT (0: x as it is, 1: normed, 2: heads rotated back, and groups).
#define WARPS (PARTS * TILES)
#include "block/linear_group_tiles.cuh"

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
      const int column = at * 128 / m.scale_columns;
      unit.scales[half].x = m.is_wide_scale ? load_read_only<u32>(rows.scales[half] + 4 * column)
                                            : load_read_only_byte(rows.scales[half] + column);
    }
    if (KIND == Q8_0) unit.scales[half] = load_no_allocate<uint2>(rows.scales[half] + 8 * at);
  }
}

// A run of blocks of one matrix; a warp has units part, part + PARTS, ... of its tile of each. x is
// there after the wait.
template <int KIND> DEV void multiply(const Matrix& m, const Input& in, u8* memory) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % PARTS;
  const int units = in.columns / Shape<KIND>::COLUMNS;
  const int cta = blockIdx.x - m.first_cta;
  const int last = (cta + 1) * m.num_blocks / m.num_ctas;
  int block = cta * m.num_blocks / m.num_ctas;
  float* all_sums = (float*)(memory + in.num_tokens * row_of_x(in.columns));
  Rows rows = find_rows<KIND>(m, block * TILES + warp / PARTS, lane);
  Unit ring[STAGES];
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage)
    if (part + stage * PARTS < units)
      fetch<KIND>(ring[stage], m, rows, part + stage * PARTS, lane % 4);
  wait_for_inputs();
  int staged = -1;
  if constexpr (INPUT != ROTATED) {
    stage_x<INPUT>(in, memory, 0);
    if constexpr (is_half<KIND>()) halve_x(in, memory);
  }
  for (; block < last; ++block) {
    if constexpr (INPUT == ROTATED) {
      // Rows of a block have one part of x: groups are multiples of 8 tiles.
      const int first_row = 16 * TILES * block;
      const int first_column = (first_row < m.rows ? first_row : 0) / m.group_rows * in.columns;
      if (first_column != staged) {
        if (staged >= 0) __syncthreads();
        stage_x<INPUT>(in, memory, first_column);
        if constexpr (is_half<KIND>()) halve_x(in, memory);
        staged = first_column;
      }
    }
    const int tile = block * TILES + warp / PARTS;
    float sums[4] = {};
    for (int first = 0; first * PARTS < units; first += STAGES) {
      // What is fetched from here on is of the next block.
      const bool is_end = (first + STAGES) * PARTS >= units;
      if (is_end && block + 1 < last) rows = find_rows<KIND>(m, tile + TILES, lane);
#pragma unroll
      for (int stage = 0; stage < STAGES; ++stage) {
        const int at = part + (first + stage) * PARTS;
        if (at < units) multiply_unit<KIND>(sums, m, ring[stage], in, memory, at);
        const int next = is_end ? part + stage * PARTS : at + STAGES * PARTS;
        if (next < units && (!is_end || block + 1 < last))
          fetch<KIND>(ring[stage], m, rows, next, lane % 4);
      }
    }
    if constexpr (PARTS > 1) {
      // Two buffers in turn: one barrier a block.
      float* own = all_sums + ((block % 2 * WARPS + warp) * 32 + lane) * 4;
      *(float4*)own = make_float4(sums[0], sums[1], sums[2], sums[3]);
      __syncthreads();
      if (part) continue;
#pragma unroll
      for (int other = 1; other < PARTS; ++other) {
        const float4 v = *(const float4*)(own + other * 128);
        sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
      }
    }
    if constexpr (is_half<KIND>()) scale_sums(in, memory, sums);
    store_tile(m, in, tile, sums);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS)
    linear_group(const __grid_constant__ Group group, const __grid_constant__ Input in) {
  launch_dependents();
  SHARED_MEMORY(memory);
  int index = 0;
  for (int i = 1; i < group.count; ++i) index += (int)blockIdx.x >= group.matrices[i].first_cta;
  const Matrix& m = group.matrices[index];
  if constexpr (KINDS & 1)
    if (m.kind == FP8) multiply<FP8>(m, in, memory);
  if constexpr (KINDS & 2)
    if (m.kind == BF16) multiply<BF16>(m, in, memory);
  if constexpr (KINDS & 4)
    if (m.kind == Q8_0) multiply<Q8_0>(m, in, memory);
}
