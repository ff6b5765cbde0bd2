// What linear_group.cu is made of: formats, x in shared memory, products of a unit, results.
//
// A tile is 16 rows of a matrix, the rows of a 16 x 8 tensor core product whose columns are tokens.
// Lanes 4 g + t hold rows g and g + 8. A lane has 16 bytes (Q8_0: 8) of consecutive columns of a row
// and takes the same columns of x, whichever the product's order of columns would be: a sum has no
// order of its operands, so neither x nor weights are rearranged.
//
// Macros: IS_BF16 (1), HALF_X (1: E4M3 is multiplied in float16), WARPS (of a CTA).
#pragma once

#include "block/linear_group_ptx.cuh"
#include "include/attention_ptx.cuh"

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

// ---- x
// Rows of x in shared memory lie 16 bytes further apart than they are long: no bank conflicts.
DEV int row_of_x(int columns) { return 2 * columns + 16; }
// The bits of a token's largest magnitude, behind its row.
DEV u32* peak_of(const Input& in, u8* memory, int token) {
  return (u32*)(memory + token * row_of_x(in.columns) + 2 * in.columns);
}

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
  if (HALF_X && (int)threadIdx.x < in.num_tokens) *peak_of(in, memory, threadIdx.x) = 0;
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

// ---- x in float16, for E4M3 that an instruction widens to it: shifts and masks of integers, which
// have half of the rate of others, take four times as long. A token's x is multiplied by a power of
// two, by which its largest number is below 2^15: what is lost of others is below 2^-39 of it.
template <int KIND> DEV constexpr bool is_half() { return HALF_X && KIND == FP8; }
DEV u32 top_exponent(u32 peak) { return max(peak >> 7, 15u); }
template <class Visit> DEV void each_run_of_x(const Input& in, Visit visit) {  // by whole warps
  const int runs = in.columns / 8, num = in.num_tokens * runs, lane = threadIdx.x % 32;
#pragma unroll 1  // units of weights are in registers meanwhile
  for (int i = threadIdx.x; i - lane < num; i += 32 * WARPS)
    visit(min(i, num - 1) / runs, min(i, num - 1) % runs, i < num);
}
// x in shared memory, whose peaks are zeros, where it is; for all threads of a CTA.
DEV void halve_x(const Input& in, u8* memory) {
  each_run_of_x(in, [&](int token, int run, bool is_run) {
    const uint4 v = *(const uint4*)(memory + token * row_of_x(in.columns) + 16 * run);
    u32 peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 both = word_of(v, i);
      peak = max(peak, max(both & 0x7fffu, both >> 16 & 0x7fffu));
    }
    // Half of a warp has runs of one token: columns are a multiple of 128.
#pragma unroll
    for (int step = 8; step; step /= 2) peak = max(peak, __shfl_xor_sync(~0u, peak, step));
    if (threadIdx.x % 16 == 0 && is_run) atomicMax(peak_of(in, memory, token), peak);
  });
  __syncthreads();
  each_run_of_x(in, [&](int token, int run, bool is_run) {
    if (!is_run) return;
    uint4* at = (uint4*)(memory + token * row_of_x(in.columns) + 16 * run);
    const float scale = __uint_as_float((268 - top_exponent(*peak_of(in, memory, token))) << 23);
    const uint4 v = *at;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a, b;
      unpack(word_of(v, i), a, b);
      words[i] = pack_fp16(a * scale, b * scale);
    }
    *at = make_uint4(words[0], words[1], words[2], words[3]);
  });
  __syncthreads();
}
// Sums of a lane, which are those of x divided by the power of two below its largest number.
DEV void scale_sums(const Input& in, u8* memory, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = min(2 * (int)(threadIdx.x % 4) + i % 2, in.num_tokens - 1);
    sums[i] *= __uint_as_float(top_exponent(*peak_of(in, memory, token)) << 23);
  }
}
template <int KIND>
DEV void multiply_unit(float (&sums)[4], const Matrix& m, const Unit& unit, const Input& in,
                       const u8* memory, int at) {
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
        if constexpr (is_half<KIND>()) {
#if HALF_X
          halves_of_e4m3(bytes, a[half], a[half + 2]);
#endif
        } else if (KIND == FP8) {
          widen_e4m3(bytes, a[half], a[half + 2]);
        }
        if (KIND == Q8_0) widen_int8(bytes, a[half], a[half + 2]);
      }
      const u32 low = word_of(x, 2 * step), high = word_of(x, 2 * step + 1);
      if (KIND == BF16)
        mma_bf16(sums, a, low, high);
      else if (is_half<KIND>())
        mma_half(part, a, low, high);
      else  // columns 0 and 2, then 1 and 3, as weights are widened
        mma_bf16(part, a, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
    if (KIND == BF16) continue;
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 s = unit.scales[half];
      if (KIND == FP8) scales[half] = m.is_wide_scale ? __uint_as_float(s.x) : e8m0_to_float(s.x);
      if (is_half<KIND>()) scales[half] *= 1.f / (1 << 14);  // x has 2^14 more
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
