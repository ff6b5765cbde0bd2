// linear_group: up to 8 tokens times matrices of several formats that read the same x, in one
// launch. Layouts: at the parameters. Host side, floor: kernels/block/linear_group.py.
//
// A tile is 16 rows of a matrix, the rows of a 16 x 8 tensor core product whose columns are tokens.
// PARTS warps share a tile's columns and add their sums in order; a CTA has TILES tiles of one
// matrix at a time and goes through a run of such blocks. Lanes 4 g + t hold rows g and g + 8. A
// lane loads 16 bytes (Q8_0: 8) of consecutive columns of a row and takes the same columns of x,
// whichever the product's order of columns would be: a sum has no order of its operands, so neither
// x nor weights are rearranged.
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
// Macros: IS_BF16 (1), KINDS (1: FP8 in blocks, 2: bfloat16, 4: Q8_0, added), PARTS, TILES, STAGES,
// CTAS (an SM), INPUT (0: x as it is, 1: normed, 2: heads rotated back, and groups); NEXT_KINDS, NEXT_PARTS,
// NEXT_STAGES and NEXT_INPUT of a second group, 0 parts for none.
#include "block/linear_group_ptx.cuh"
#include "include/attention_ptx.cuh"
#include "include/counters_ptx.cuh"

#define WARPS (PARTS * TILES)
#define COUNTED 0  // tickets: CTAs that have finished the first group, and that have left
#define GONE 1
#define MOST_MATRICES 8
#define FP8 0
#define BF16 1
#define Q8_0 2

struct Matrix {
  const u8* weights;    // rows of row_bytes
  const u8* scales;     // FP8: E8M0 bytes or float32; Q8_0: fp16, one for 32 columns
  void* out;            // (tokens, rows), rows of out_stride elements
  const float* addend;  // (tokens, rows), rows of addend_stride: added to the product; or null
  i64 row_bytes;
  int kind, rows;
  int first_cta, num_ctas, num_blocks;  // of TILES tiles, in equal runs of the CTAs
  int group_rows;    // rows with one part of x; all rows without groups
  int scale_stride;  // elements from one row of scales to the next
  int scale_rows, scale_columns;  // FP8: of a scale
  int is_wide_scale;              // float32
  int out_stride, is_float_out, addend_stride;
  int is_pair;  // rows are gate rows, as many up rows follow: SwiGLU of the two
};
struct Group {
  Matrix matrices[MOST_MATRICES];
  int count;
};
struct Input {
  const u16* x;  // (num_tokens, ...) bf16, rows of stride elements
  i64 stride;
  int num_tokens, columns;  // of a matrix
  // NORMED: of the norm. ROTATED: positions of tokens, (positions, 2, rotary / 2) cosines and sines.
  const float* norm_weight;
  const void* positions;
  const float* table;
  float eps;
  int head, rotary;  // channels of a head, of them the last that rotate
  float limit;       // of the clamped SwiGLU; 0 for none
  int has_long_positions;  // of 64 bits, not of 32
};

enum { PLAIN, NORMED, ROTATED };
// How the warps of a CTA share the work of a group.
template <int KINDS_, int PARTS_, int STAGES_, int INPUT_> struct Work {
  static constexpr int SHARED = PARTS_, BLOCK = WARPS / PARTS_;  // warps of a tile, tiles of a block
  static constexpr int FORMATS = KINDS_, AHEAD = STAGES_, GIVEN = INPUT_;
};
typedef Work<KINDS, PARTS, STAGES, INPUT> First;

// Registers of a lane for a unit of its two rows: 128 bytes a row among four lanes.
struct Unit {
  uint4 weights[2][2];  // [row][piece]
  uint2 scales[2];      // [row]
};

DEV u32 word_of(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }

template <int KIND> struct Shape {
  static constexpr int COLUMNS = KIND == BF16 ? 64 : 128;  // of a unit
  static constexpr int RUNS = KIND == BF16 ? 2 : 4;        // of 8 columns of x that a lane takes
};
// The first of 8 columns of a lane's run within a unit.
template <int KIND> DEV int run_column(int run, int t) {
  if (KIND == FP8) return 64 * (run / 2) + 16 * t + 8 * (run % 2);
  return 32 * run + 8 * t;
}

// Two bf16 of E4M3 in the bytes 0 and 2, and of those in the bytes 1 and 3. NaN counts as 480.
DEV void widen_e4m3(u32 bytes, u32& even, u32& odd) {
  // E4M3 as bf16 bits is its value times 2^-120.
  const u32 low = bytes << 8;
  const u32 a = (low & 0x80008000u) | (low >> 4 & 0x07F007F0u);
  const u32 b = (bytes & 0x80008000u) | (bytes >> 4 & 0x07F007F0u);
  even = fma_bf16x2(a, 0x7B807B80u, 0x80008000u), odd = fma_bf16x2(b, 0x7B807B80u, 0x80008000u);
}
// The same of signed bytes: 128 + (low 7 bits) less 128, or 256 if the byte is negative.
DEV void widen_int8(u32 bytes, u32& even, u32& odd) {
  const u32 high = bytes >> 8;
  const u32 minus_one = 0xBF80BF80u;
  even = fma_bf16x2((bytes & 0x00800080u) | 0x43004300u, minus_one,
                    (bytes & 0x007F007Fu) | 0x43004300u);
  odd = fma_bf16x2((high & 0x00800080u) | 0x43004300u, minus_one,
                   (high & 0x007F007Fu) | 0x43004300u);
}
DEV float e8m0_to_float(u32 byte) {
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 1u << 22 : byte << 23);
}

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

// ---- x
// Rows of x in shared memory lie 16 bytes further apart than they are long: no bank conflicts.
DEV int row_of_x(int columns) { return 2 * columns + 16; }

// A warp norms a row in place.
DEV void norm_rows(const Input& in, u8* memory) {
  const int lane = threadIdx.x % 32;
  for (int token = (int)threadIdx.x / 32; token < in.num_tokens; token += WARPS) {
    uint4* row = (uint4*)(memory + token * row_of_x(in.columns));
    float squares = 0.f;
    for (int run = lane; run < in.columns / 8; run += 32) {
      const uint4 v = row[run];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float a, b;
        unpack(word_of(v, i), a, b);
        squares += a * a + b * b;
      }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float scale = rsqrtf(squares / in.columns + in.eps);
    for (int run = lane; run < in.columns / 8; run += 32) {
      const uint4 v = row[run];
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float a, b;
        unpack(word_of(v, i), a, b);
        const float* weight = in.norm_weight + 8 * run + 2 * i;
        words[i] = pack(a * scale * weight[0], b * scale * weight[1]);
      }
      row[run] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
DEV i64 position_of(const Input& in, int token) {
  return in.has_long_positions ? ((const i64*)in.positions)[token]
                               : ((const int*)in.positions)[token];
}
// Pairs of the last channels of a head, turned by the negative angle.
DEV uint4 rotate_back(uint4 v, const Input& in, int column, int token) {
  const int channel = column % in.head - (in.head - in.rotary);
  if (channel < 0) return v;
  const float* angles = in.table + position_of(in, token) * in.rotary + channel / 2;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a, b;
    unpack(word_of(v, i), a, b);
    const float cos = angles[i], sin = angles[in.rotary / 2 + i];
    words[i] = pack(a * cos + b * sin, b * cos - a * sin);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Columns of x to shared memory, from `first_column` on; for all threads of a CTA.
template <int GIVEN> DEV void stage_x(const Input& in, u8* memory, int first_column) {
  const int runs = in.columns / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < in.num_tokens * runs; i += 32 * WARPS) {
    const int token = i / runs, column = first_column + 8 * (i - token * runs);
    uint4 v = __ldcg((const uint4*)(in.x + token * in.stride + column));
    if constexpr (GIVEN == ROTATED) v = rotate_back(v, in, column, token);
    *(uint4*)(memory + token * row_of_x(in.columns) + 2 * (column - first_column)) = v;
  }
  __syncthreads();
  if constexpr (GIVEN == NORMED) {
    norm_rows(in, memory);
    __syncthreads();
  }
}

template <int KIND> DEV void multiply_unit(float (&sums)[4], const Matrix& m, const Unit& unit,
                                           const Input& in, const u8* memory, int at) {
  const int lane = threadIdx.x % 32;
  const u8* row = memory + lane / 4 * row_of_x(in.columns) + 2 * at * Shape<KIND>::COLUMNS;
#pragma unroll
  for (int run = 0; run < Shape<KIND>::RUNS; ++run) {
    const int piece = KIND == BF16 ? run : run / 2;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (lane / 4 < in.num_tokens) x = *(const uint4*)(row + 2 * run_column<KIND>(run, lane % 4));
    float part[4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32 a[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& w = unit.weights[half][piece];
        if (KIND == BF16) a[half] = word_of(w, 2 * step), a[half + 2] = word_of(w, 2 * step + 1);
        const u32 bytes = word_of(w, 2 * (run % 2) + step);
        if (KIND == FP8) widen_e4m3(bytes, a[half], a[half + 2]);
        if (KIND == Q8_0) widen_int8(bytes, a[half], a[half + 2]);
      }
      const u32 low = word_of(x, 2 * step), high = word_of(x, 2 * step + 1);
      if (KIND == BF16)
        mma_bf16(sums, a, low, high);
      else  // columns 0 and 2, then 1 and 3, as weights are widened
        mma_bf16(part, a, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
    if (KIND == BF16) continue;
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 s = unit.scales[half];
      if (KIND == FP8) scales[half] = m.is_wide_scale ? __uint_as_float(s.x) : e8m0_to_float(s.x);
      if (KIND == Q8_0) scales[half] = half_to_float((run / 2 ? s.y : s.x) >> 16 * (run % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part[i] * scales[i / 2];
  }
}

// ---- results
DEV void store(const Matrix& m, int token, int row, float value) {
  const i64 at = (i64)token * m.out_stride + row;
  if (m.addend) value += __ldcg(m.addend + (i64)token * m.addend_stride + row);
  if (m.is_float_out)
    ((float*)m.out)[at] = value;
  else
    ((u16*)m.out)[at] = (u16)pack(value, 0.f);
}
DEV float swiglu(float gate, float up, float limit) {
  if (limit > 0.f) {  // NaN stays NaN
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1.f + __expf(-gate)) * up;
}
DEV void store_tile(const Matrix& m, const Input& in, int tile, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const int token = 2 * (lane % 4) + column, row = lane / 4;
    if (token >= in.num_tokens) continue;
    const float first = sums[column], second = sums[2 + column];
    if (m.is_pair) {
      if (8 * tile + row < m.rows)
        store(m, token, 8 * tile + row, swiglu(first, second, in.limit));
      continue;
    }
    if (16 * tile + row < m.rows) store(m, token, 16 * tile + row, first);
    if (16 * tile + row + 8 < m.rows) store(m, token, 16 * tile + row + 8, second);
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
  if constexpr (W::GIVEN != ROTATED) stage_x<W::GIVEN>(in, memory, 0);
  for (; block < last; ++block) {
    if constexpr (W::GIVEN == ROTATED) {
      // Rows of a block have one part of x: groups are multiples of 8 tiles.
      const int first_row = 16 * W::BLOCK * block;
      const int first_column = (first_row < m.rows ? first_row : 0) / m.group_rows * in.columns;
      if (first_column != staged) {
        if (staged >= 0) __syncthreads();
        stage_x<W::GIVEN>(in, memory, first_column);
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
    store_tile(m, in, tile, sums);
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
