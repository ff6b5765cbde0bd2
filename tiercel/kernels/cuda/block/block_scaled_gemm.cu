// Products of two matrices in FP4 with scales of blocks, multiplied by the tensor cores of
// Blackwell (sm_100a). Compiled, never run.
//
//     warp        does
//     0           copies tiles: 128 rows of 256 columns (16 KB) of x and of the weights, their scales
//     1           scales to tensor memory, then four products of 64 columns each
//     2 to 5      sums from tensor memory, out
//
// Operands rest in tiles as the tensor cores read them (ops/block_scaled_gemm.py), so a tile is one
// bulk copy. Sums are 128 columns of tensor memory; a stage's scales have columns of their own.
//
// Macros: IS_NVFP4 (E4M3 scales of 16 columns, else E8M0 of 32), IS_GATE_UP (rows of the weights are
// 8 of gate, 8 of up, and so on: the result is their clamped SwiGLU), IS_FLOAT_OUT (else bfloat16),
// STAGES.
#include "include/blackwell.cuh"

constexpr int ROWS = 128, COLUMNS = 256;        // of a tile
constexpr int TILE_BYTES = ROWS * COLUMNS / 2;  // of values
constexpr int STEP = 64, STEPS = COLUMNS / STEP;
constexpr int SCALES = COLUMNS / (IS_NVFP4 ? 16 : 32);  // of a row of a tile
constexpr int SCALE_BYTES = ROWS * SCALES, SCALE_TILES = SCALES / 4;
constexpr int SCALE_COLUMNS = 4 * SCALE_TILES;  // of tensor memory, of one operand and stage
constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr u32 TMEM_COLUMNS = 256;  // the sums, and the scales of all stages
static_assert(ROWS + STAGES * 2 * SCALE_COLUMNS <= TMEM_COLUMNS, "scales fit beside the sums");

// E2M1 times E2M1, 128 x 128, both K-major; scales of E4M3 (0) or E8M0 (1).
constexpr u32 INSTRUCTION =
    1 << 7 | 1 << 10 | (ROWS >> 3) << 17 | (IS_NVFP4 ? 0 : 1) << 23 | (ROWS >> 4) << 24;

DEV void multiply(u32 sums, u64 x, u64 weights, u32 instruction, u32 x_scales, u32 weight_scales,
                  bool adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
#if IS_NVFP4
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
#else
      "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X "
#endif
      "[%0], %1, %2, %3, [%4], [%5], p; }" ::"r"(sums),
      "l"(x), "l"(weights), "r"(instruction), "r"(x_scales), "r"(weight_scales), "r"((u32)adds)
      : "memory");
}

DEV u32 as_bf16(float x) {
  u32 y;
  asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, 0}; }" : "=r"(y) : "f"(x));
  return y & 0xFFFF;
}
DEV void store(void* out, i64 place, float value) {
#if IS_FLOAT_OUT
  ((float*)out)[place] = value;
#else
  ((u16*)out)[place] = (u16)as_bf16(value);
#endif
}

struct Operand {
  const u8* values;  // (row tiles, column tiles, 16 KB)
  const u8* scales;  // (row tiles, column tiles, SCALE_BYTES)
};

// 16 sums of a row from column `first` of the result on, or 8 of gate and 8 of up.
DEV void store_columns(void* out, i64 row_start, int first, int num_columns, const u32 (&sums)[16],
                       float gate, float up, float limit) {
#if IS_GATE_UP
  first /= 2;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float a = __uint_as_float(sums[i]) * gate, b = __uint_as_float(sums[8 + i]) * up;
    if (limit > 0) {
      a = fminf(a, limit);
      b = fminf(fmaxf(b, -limit), limit);
    }
    if (first + i < num_columns) store(out, row_start + first + i, a / (1.0f + __expf(-a)) * b);
  }
#else
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (first + i < num_columns) store(out, row_start + first + i, __uint_as_float(sums[i]) * gate);
#endif
}

extern "C" __global__ void __launch_bounds__(192, 1)
    block_scaled_gemm(void* out, Operand x, Operand weights,
                      const float* totals,  // (2,): of x times those of gate and up
                      int num_rows, int num_columns, int out_stride, int column_tiles,
                      float limit) {
  extern __shared__ __align__(1024) u8 stages[];
  __shared__ u64 barriers[2 * STAGES + 1];  // full, empty, done
  __shared__ u32 tmem;
  const int warp = threadIdx.x / 32, row_tile = blockIdx.y, weight_tile = blockIdx.x;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, done = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES + 1; i++) mbar_init(full + 8 * i, 1);
    mbar_fence();
  }
  if (warp == 1) tmem_allocate(shared_address(&tmem), TMEM_COLUMNS);
  fence_before_sync();
  __syncthreads();
  fence_after_sync();
  const u32 sums = tmem, first_stage = shared_address(stages);
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (warp == 0 && threadIdx.x % 32 == 0) {
    const i64 x_tile = (i64)row_tile * column_tiles, w_tile = (i64)weight_tile * column_tiles;
    for (int k = 0; k < column_tiles; k++) {
      const int stage = k % STAGES, turn = k / STAGES;
      if (turn > 0) mbar_wait(empty + 8 * stage, (turn - 1) & 1);
      const u32 to = first_stage + stage * STAGE_BYTES, barrier = full + 8 * stage;
      mbar_expect(barrier, STAGE_BYTES);
      copy_bulk(to, x.values + (x_tile + k) * TILE_BYTES, TILE_BYTES, barrier);
      copy_bulk(to + TILE_BYTES, weights.values + (w_tile + k) * TILE_BYTES, TILE_BYTES, barrier);
      copy_bulk(to + 2 * TILE_BYTES, x.scales + (x_tile + k) * SCALE_BYTES, SCALE_BYTES, barrier);
      copy_bulk(to + 2 * TILE_BYTES + SCALE_BYTES, weights.scales + (w_tile + k) * SCALE_BYTES,
                SCALE_BYTES, barrier);
    }
  } else if (warp == 1 && threadIdx.x % 32 == 0) {
    for (int k = 0; k < column_tiles; k++) {
      const int stage = k % STAGES;
      mbar_wait(full + 8 * stage, (k / STAGES) & 1);
      fence_after_sync();
      const u32 values = first_stage + stage * STAGE_BYTES, scales = values + 2 * TILE_BYTES;
      const u32 x_scales = sums + ROWS + stage * 2 * SCALE_COLUMNS;
      const u32 weight_scales = x_scales + SCALE_COLUMNS;
      for (int i = 0; i < SCALE_TILES; i++) {  // 8 rows of 16 bytes are 128 bytes apart
        copy_scales(x_scales + 4 * i, operand(scales + 512 * i, 0, 128, NO_SWIZZLE));
        copy_scales(weight_scales + 4 * i,
                    operand(scales + SCALE_BYTES + 512 * i, 0, 128, NO_SWIZZLE));
      }
      for (int step = 0; step < STEPS; step++) {
        // A tile of scales is 64 columns of NVFP4, and 128 of MXFP4: its halves are numbers 0, 2.
        const int tile = IS_NVFP4 ? step : step / 2;
        const u32 half = IS_NVFP4 ? 0 : step % 2 * 2;
        const u32 at = values + step * (STEP / 2);
        multiply(sums, operand(at, 16, 1024, SWIZZLE_128),
                 operand(at + TILE_BYTES, 16, 1024, SWIZZLE_128),
                 INSTRUCTION | half << 29 | half << 4, x_scales + 4 * tile,
                 weight_scales + 4 * tile, k + step > 0);
      }
      commit(empty + 8 * stage);
    }
    commit(done);
  } else if (warp >= 2) {
    mbar_wait(done, 0);
    fence_after_sync();
    const int lanes = warp % 4 * 32;  // those that this warp may load
    const int row = row_tile * ROWS + lanes + threadIdx.x % 32;
    const float gate = totals[0], up = totals[1];
    for (int column = 0; column < ROWS; column += 16) {
      u32 part[16];
      tmem_load(part, sums + ((u32)lanes << 16) + column);
      wait_loads();
      if (row < num_rows)
        store_columns(out, (i64)row * out_stride, weight_tile * ROWS + column, num_columns, part,
                      gate, up, limit);
    }
    fence_before_sync();
  }
  __syncthreads();
  if (warp == 1) {
    fence_after_sync();
    tmem_free(sums, TMEM_COLUMNS);
  }
}
