// Units of 16 rows x 256 columns of experts' weights as operands of products over many tokens:
// whole weights, rounded to bfloat16, 2^-64 of them. Layouts: quant_tiles.py. Reads of fields, and
// which columns a lane holds: moe_experts_units.cuh, moe_experts_groups.cuh.
//
// A unit is 16 steps of 16 columns. A type has
//   decode  steps 4 q .. 4 q + 3 of a unit, a[4 s .. 4 s + 3] of step s
//   place   of 8 columns from a multiple of 8 on: their first step and lane t. A step's 16 columns
//           are 4 of each lane: two in the first 8, two in the last.
//   split   8 columns into the four pairs of a lane
// Pairs 0 and 1 are of the step and lane of `place`, pairs 2 and 3 of the next step, or of the next
// lane (HAS_TWO_LANES).
#pragma once

#define COLUMNS 8  // of moe_experts_units.cuh, whose products are not used
#include "moe/moe_experts_groups.cuh"

#define LOWERED 5.42101086242752217e-20f  // 2^-64
struct Place {
  int step, lane;
};
DEV u32 both_bf16(float v) { return pack_bf16(v, v); }
DEV void split_fours(u32 (&pairs)[4], const uint4& v) {  // 0 2, 1 3 of each four
  pairs[0] = __byte_perm(v.x, v.y, 0x5410), pairs[1] = __byte_perm(v.x, v.y, 0x7632);
  pairs[2] = __byte_perm(v.z, v.w, 0x5410), pairs[3] = __byte_perm(v.z, v.w, 0x7632);
}
DEV Place place_in_halves(int c) {  // of Q2_K and Q3_K
  return {4 * (c >> 5 & 3) + (c >> 2 & 3), 2 * (c >> 7) + (c >> 4 & 1)};
}

struct WholeQ2K : Q2K {
  static constexpr bool HAS_TWO_LANES = false;
  struct Factors {  // of group i
    u32 scale, least;
    DEV Factors(u32 slot, int row, int t, int i) {
      const u32 four = load_shared<u32>(slot + 1024 + 16 * row + 8 * (t >> 1) + 4 * (i >> 1));
      const u32 byte = four >> (16 * (i & 1) + 8 * (t & 1)), dm = load_shared<u32>(slot + 1280 + 4 * row);
      const float d = half_to_float(dm & 0xffff) * (RAISED * 32 / (float)(1 << 2 * i));
      scale = both_bf16(d * (__uint_as_float((byte & 15) | 0x4b000000u) - 8388608.f));
      const float m = __uint_as_float((byte >> 4 & 15) | 0x4b000000u) - 8388608.f;
      least = both_bf16(half_to_float(dm >> 16) * -LOWERED * m);
    }
    DEV u32 operand(u32 qs, int i) const { return fma_bf16x2(qs & 0x00030003u << 2 * i, scale, least); }
  };
  static DEV void decode(u32 (&a)[16], u32 slot, int q, int lane, u32) {
    const int g = lane >> 2, t = lane & 3;
    const uint4 x = load_shared<uint4>(slot + 16 * lane), y = load_shared<uint4>(slot + 512 + 16 * lane);
    const Factors r0(slot, g, t, q), r1(slot, g + 8, t, q);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      a[4 * s] = r0.operand(word(x, s), q), a[4 * s + 1] = r1.operand(word(y, s), q);
      a[4 * s + 2] = r0.operand(word(x, s) >> 8, q), a[4 * s + 3] = r1.operand(word(y, s) >> 8, q);
    }
  }
  static DEV Place place(int c) { return place_in_halves(c); }
  static DEV void split(u32 (&pairs)[4], const uint4& v) { split_fours(pairs, v); }
};

struct WholeQ3K : Q3K {
  static constexpr bool HAS_TWO_LANES = false;
  static DEV void decode(u32 (&a)[16], u32 slot, int q, int lane, u32) {
    const int g = lane >> 2, t = lane & 3, shift = 4 * (t >> 1);
    const uint4 x = load_shared<uint4>(slot + 16 * lane), y = load_shared<uint4>(slot + 512 + 16 * lane);
    const u32 masks = slot + 1024 + 32 * g + 16 * (t & 1);
    const uint4 m = load_shared<uint4>(masks), n = load_shared<uint4>(masks + 256);
    const Row r0(slot, g, t), r1(slot, g + 8, t);
    const u32 d0 = both_bf16(r0.d * LOWERED), d1 = both_bf16(r1.d * LOWERED);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 w0 = r0.operand(word(x, s), word(m, s) >> shift, q, odd);
        const u32 w1 = r1.operand(word(y, s), word(n, s) >> shift, q, odd);
        a[4 * s + 2 * odd] = fma_bf16x2(w0, d0, MINUS_ZERO);
        a[4 * s + 2 * odd + 1] = fma_bf16x2(w1, d1, MINUS_ZERO);
      }
  }
  static DEV Place place(int c) { return place_in_halves(c); }
  static DEV void split(u32 (&pairs)[4], const uint4& v) { split_fours(pairs, v); }
};

template <int GROUP> struct WholeE2M1 : E2M1<GROUP> {  // exact
  static constexpr bool HAS_TWO_LANES = false;
  typedef typename E2M1<GROUP>::Row Row;
  static DEV void decode(u32 (&a)[16], u32 slot, int q, int lane, u32) {
    const int g = lane >> 2, t = lane & 3, i = 16 * q / GROUP;
    const u32 at = slot + 1024 * (q >> 1) + 16 * lane + 8 * (q & 1);
    const uint2 x = load_shared<uint2>(at), y = load_shared<uint2>(at + 512);
    const Row r0(slot, g, t), r1(slot, g + 8, t);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const u32 v = s < 2 ? x.x : x.y, w = s < 2 ? y.x : y.y;
      const int o = 2 * (s & 1);
      a[4 * s] = r0.operand(v, o, i), a[4 * s + 1] = r1.operand(w, o, i);
      a[4 * s + 2] = r0.operand(v, o + 1, i), a[4 * s + 3] = r1.operand(w, o + 1, i);
    }
  }
  static DEV Place place(int c) { return {8 * (c >> 5 & 1) + 2 * (c >> 3 & 3), c >> 6}; }
  static DEV void split(u32 (&pairs)[4], const uint4& v) {  // 0 4, 1 5, 2 6, 3 7
    pairs[0] = __byte_perm(v.x, v.z, 0x5410), pairs[1] = __byte_perm(v.x, v.z, 0x7632);
    pairs[2] = __byte_perm(v.y, v.w, 0x5410), pairs[3] = __byte_perm(v.y, v.w, 0x7632);
  }
};

template <class Row> struct WholeGrouped : Grouped<Row> {
  static constexpr bool HAS_TWO_LANES = Row::IN_HALVES;
  static DEV void decode(u32 (&a)[16], u32 slot, int q, int lane, u32 grid) {
    const int g = lane >> 2, t = lane & 3;
    const Row r0(slot, g, t, grid), r1(slot, g + 8, t, grid);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = 2 * q + h;
      u32 x[4], y[4];
      r0.operands(x, j), r1.operands(y, j);
      u32 least0 = MINUS_ZERO, least1 = MINUS_ZERO;
      if constexpr (Row::MEANS > 0)
        least0 = both_bf16(r0.least(j) * LOWERED), least1 = both_bf16(r1.least(j) * LOWERED);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const u32 d0 = both_bf16(r0.scale(j, s) * LOWERED), d1 = both_bf16(r1.scale(j, s) * LOWERED);
#pragma unroll
        for (int o = 0; o < 2; ++o) {
          a[8 * h + 4 * s + 2 * o] = fma_bf16x2(x[2 * s + o], d0, least0);
          a[8 * h + 4 * s + 2 * o + 1] = fma_bf16x2(y[2 * s + o], d1, least1);
        }
      }
    }
  }
  static DEV Place place(int c) {
    if constexpr (Row::IN_HALVES) return {2 * (c >> 5) + (c >> 4 & 1), c >> 2 & 3};
    return {2 * (c >> 5), c >> 3 & 3};
  }
  static DEV void split(u32 (&pairs)[4], const uint4& v) { split_fours(pairs, v); }
};

template <int TYPE> struct WholeOf;  // by the codes of moe_experts_tiles.py
template <> struct WholeOf<2> : WholeQ2K {};
template <> struct WholeOf<3> : WholeQ3K {};
template <> struct WholeOf<4> : WholeGrouped<Q4KRow> {};
template <> struct WholeOf<5> : WholeGrouped<Q5KRow> {};
template <> struct WholeOf<6> : WholeGrouped<Q6KRow> {};
template <> struct WholeOf<8> : WholeGrouped<Q80Row> {};
template <> struct WholeOf<12> : WholeGrouped<IQ2XXSRow> {};
template <> struct WholeOf<32> : WholeE2M1<32> {};
template <> struct WholeOf<16> : WholeE2M1<16> {};

// ---- images of tokens in tiles: a tile's columns in units, a unit in quarters of 64, each with 128
// bytes of each token, chunks of 16 bytes swizzled as products read them.
#define TOKEN_STEP 16  // tokens of a tile are a multiple
DEV i64 chunk_of_image(int unit, int chunk, int n, int tokens) {  // of 32 in a unit; byte in a tile
  return (i64)(4 * unit + (chunk >> 3)) * (tokens * 128) + n * 128 + ((chunk & 7) ^ (n & 7)) * 16;
}
// Chunk of pair p of 8 columns, and its byte in it.
template <class Unit> DEV int pair_chunk(Place at, int p) {
  return 2 * (at.step + (Unit::HAS_TWO_LANES ? 0 : p >> 1)) + (p & 1);
}
template <class Unit> DEV int pair_byte(Place at, int p) {
  return 4 * (at.lane + (Unit::HAS_TWO_LANES ? p >> 1 : 0));
}
