// Units of types whose scales are float32 factors of sums: codes alone are exact in bfloat16. As
// moe_experts_units.cuh, but lane 4 g + t holds 8 columns of each group j of 32, so that a product
// is of one group, in whose order pieces are. A type has rows with
//   operands  of a group: codes of 8 columns, 2^-64 of them, as four operands
//   scale     of a group, or of half h of it (IN_HALVES: a lane holds 4 columns of each half)
//   least     of a group, times the tokens' sum over it (MEANS: 8 sums of a token, float32)
#pragma once

#include "moe/moe_experts_units.cuh"

#define TO_2_69 0x62006200u  // a byte in a half is 2^-133 of its value
DEV u32 of_bytes(u32 pair, u32 offset) { return fma_bf16x2(pair, TO_2_69, offset); }
DEV float byte_to_float(u32 word, int k) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | k)) - 8388608.f;
}

// 6-bit scales and minima of 8 groups of Q4_K and Q5_K.
struct KHeader {
  u32 sc[2], mins[2];
  float d, dmin;
  DEV explicit KHeader(u32 at) {
    const uint4 v = load_shared<uint4>(at);
    d = half_to_float(v.x & 0xffff) * RAISED, dmin = -half_to_float(v.x >> 16);
    sc[0] = v.y & 0x3f3f3f3fu, mins[0] = v.z & 0x3f3f3f3fu;
    sc[1] = (v.w & 0x0f0f0f0fu) | (v.y >> 2 & 0x30303030u);
    mins[1] = (v.w >> 4 & 0x0f0f0f0fu) | (v.z >> 2 & 0x30303030u);
  }
  DEV float scale(int j, int) const { return d * byte_to_float(sc[j >> 2], j & 3); }
  DEV float least(int j) const { return dmin * byte_to_float(mins[j >> 2], j & 3); }
};
struct Q4KRow : KHeader {
  static constexpr int CODES = 2304, MEANS = 32;
  static constexpr bool IN_HALVES = false;
  u32 at;
  DEV Q4KRow(u32 slot, int row, int t, u32)
      : KHeader(slot + 2048 + 16 * row), at(slot + 32 * row + 8 * t) {}
  DEV void operands(u32 (&w)[4], int j) const {
    const uint2 v = load_shared<uint2>(at + 512 * (j >> 1));
    const int shift = 4 * (j & 1);
#pragma unroll
    for (int o = 0; o < 4; ++o)
      w[o] = of_bytes((o < 2 ? v.x : v.y) >> (shift + 8 * (o & 1)) & 0x000f000fu, MINUS_ZERO);
  }
};
struct Q5KRow : KHeader {
  static constexpr int CODES = 2816, MEANS = 32;
  static constexpr bool IN_HALVES = false;
  u32 at;
  DEV Q5KRow(u32 slot, int row, int t, u32)
      : KHeader(slot + 2560 + 16 * row), at(slot + 32 * row + 8 * t) {}
  DEV void operands(u32 (&w)[4], int j) const {
    const uint2 v = load_shared<uint2>(at + 512 * (j >> 1)), high = load_shared<uint2>(at + 2048);
    const int shift = 4 * (j & 1);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const u32 low = (o < 2 ? v.x : v.y) >> (shift + 8 * (o & 1)) & 0x000f000fu;
      const u32 bit = (o < 2 ? high.x : high.y) >> (j + 8 * (o & 1)) & 0x00010001u;
      w[o] = of_bytes(low | bit << 4, MINUS_ZERO);
    }
  }
};
// Columns of a lane: 4 of each group of 16, so that a product is of one scale.
struct Q6KRow {
  static constexpr int CODES = 3360, MEANS = 0;
  static constexpr bool IN_HALVES = true;
  u32 at, high, scales;
  float d;
  DEV Q6KRow(u32 slot, int row, int t, u32)
      : at(slot + 64 * row + 16 * t),
        high(slot + 2048 + 32 * row + 8 * t),
        scales(slot + 3072 + 16 * row),
        d(half_to_float(load_shared<u16>(slot + 3328 + 2 * row)) * RAISED) {}
  DEV void operands(u32 (&w)[4], int j) const {
    const int h = j >> 2, i = j & 3;
    const uint2 low = load_shared<uint2>(at + 1024 * h + 8 * (i & 1)),
                two = load_shared<uint2>(high + 512 * h);
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const u32 four = (o < 2 ? low.x : low.y) >> (4 * (i >> 1) + 8 * (o & 1)) & 0x000f000fu;
      const u32 more = (o < 2 ? two.x : two.y) >> (2 * i + 8 * (o & 1)) & 0x00030003u;
      w[o] = of_bytes(four | more << 4, 0xa200a200u);  // - 32
    }
  }
  DEV float scale(int j, int h) const {
    const u32 both = load_shared<u16>(scales + 2 * j);
    return d * (float)(signed char)(both >> 8 * h);
  }
};
struct Q80Row {
  static constexpr int CODES = 4352, MEANS = 0;
  static constexpr bool IN_HALVES = false;
  u32 at, d;
  DEV Q80Row(u32 slot, int row, int t, u32) : at(slot + 32 * row + 8 * t), d(slot + 4096 + 16 * row) {}
  DEV void operands(u32 (&w)[4], int j) const {
    const uint2 v = load_shared<uint2>(at + 512 * j);
#pragma unroll
    for (int o = 0; o < 4; ++o)  // 128 more, and less
      w[o] = of_bytes(((o < 2 ? v.x : v.y) ^ 0x80808080u) >> 8 * (o & 1) & 0x00ff00ffu, 0xa300a300u);
  }
  DEV float scale(int j, int) const { return half_to_float(load_shared<u16>(d + 2 * j)) * RAISED; }
};
// Of a group: four indices of 8 magnitudes, then four of signs of 7 bits, and a scale. The eighth sign
// makes their number even. `grid` has the magnitudes of an index as 4 bits each: 0, 1 or 2.
struct IQ2XXSRow {
  static constexpr int CODES = 1056, MEANS = 0;
  static constexpr bool IN_HALVES = false;
  u32 at, grid;
  int t;
  float d;
  DEV IQ2XXSRow(u32 slot, int row, int t, u32 grid)
      : at(slot + 8 * row),
        grid(grid),
        t(t),
        d(half_to_float(load_shared<u16>(slot + 1024 + 2 * row)) * (RAISED / 8)) {}
  DEV void operands(u32 (&w)[4], int j) const {
    const uint2 v = load_shared<uint2>(at + 128 * j);
    const u32 places = load_shared<u32>(grid + 4 * (v.x >> 8 * t & 255)), seven = v.y >> 7 * t & 127;
    const u32 signs = seven | (__popc(seven) & 1) << 7;
#pragma unroll
    for (int o = 0; o < 4; ++o) {  // weights 0 2, 1 3, 4 6, 5 7
      const int first = 4 * (o >> 1) + (o & 1);
      const u32 four = __byte_perm(0x002b1908u, 0, places >> 16 * (o >> 1) & 0x3333);
      const u32 sign = signs * ((1u << (15 - first)) + (1u << (29 - first))) & 0x80008000u;
      w[o] = fma_bf16x2(four >> 8 * (o & 1) & 0x00ff00ffu, TO_2_69 ^ sign, MINUS_ZERO);
    }
  }
  DEV float scale(int j, int) const {
    return d * (float)(2 * (load_shared<u32>(at + 128 * j + 4) >> 28) + 1);
  }
};

template <class Row> struct Grouped {
  static constexpr int CODES = Row::CODES, SCALES = 0, MEANS = Row::MEANS;
  static constexpr int TILE_TOKENS = 8, TILES = NT, LANE_SUMS = 4;

  static DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n, u32) {
    if constexpr (Row::IN_HALVES) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {  // 4 columns of each half
        const uint4 &a = v[t >> 1], &b = v[2 + (t >> 1)];
        stage_pairs(unit, t & 1 ? make_uint4(a.z, a.w, b.z, b.w) : make_uint4(a.x, a.y, b.x, b.y),
                    j, t, n);
      }
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t) stage_pairs(unit, v[t], j, t, n);
    }
    if constexpr (MEANS > 0) {
      const float sum = (sum8_bf16(v[0]) + sum8_bf16(v[1])) + (sum8_bf16(v[2]) + sum8_bf16(v[3]));
      store_shared<u32>(unit + COLUMNS * 512 + n * MEANS + 4 * j, __float_as_uint(sum));
    }
  }
  template <int SLOT, int N>
  static DEV void multiply(float (&sum)[2][N][4], u32 slot, u32 unit, int m, int lane, u32 grid) {
    const int g = lane >> 2, t = lane & 3;
    const Columns<MEANS, N> tokens(unit, m, lane);
    float own[2][N][4] = {};
    const Row rows[2][2] = {{Row(slot, g, t, grid), Row(slot, g + 8, t, grid)},
                            {Row(slot + SLOT, g, t, grid), Row(slot + SLOT, g + 8, t, grid)}};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint4 v[N];
#pragma unroll
      for (int nt = 0; nt < N; ++nt) v[nt] = tokens.piece(nt, j);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        u32 a[4], b[4];
        rows[s][0].operands(a, j), rows[s][1].operands(b, j);
#pragma unroll
        for (int nt = 0; nt < N; ++nt) {
          float part[4] = {};
          mma_bf16(part, a[0], b[0], a[1], b[1], v[nt].x, v[nt].y);
          if constexpr (Row::IN_HALVES) {
            add(own[s][nt], part, rows[s][0].scale(j, 0), rows[s][1].scale(j, 0));
#pragma unroll
            for (int c = 0; c < 4; ++c) part[c] = 0;
          }
          mma_bf16(part, a[2], b[2], a[3], b[3], v[nt].z, v[nt].w);
          add(own[s][nt], part, rows[s][0].scale(j, 1), rows[s][1].scale(j, 1));
          if constexpr (MEANS > 0) {
            const int n = 8 * nt + 2 * t;  // tokens of the sums; those from m on are never stored
            const u32 means = unit + COLUMNS * 512 + 4 * j;
            const float x = load_shared<float>(means + min(n, m - 1) * MEANS);
            const float y = load_shared<float>(means + min(n + 1, m - 1) * MEANS);
            const float l0 = rows[s][0].least(j), l1 = rows[s][1].least(j);
            own[s][nt][0] = fmaf(l0, x, own[s][nt][0]), own[s][nt][1] = fmaf(l0, y, own[s][nt][1]);
            own[s][nt][2] = fmaf(l1, x, own[s][nt][2]), own[s][nt][3] = fmaf(l1, y, own[s][nt][3]);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int nt = 0; nt < N; ++nt)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[s][nt][c] = __fadd_rn(sum[s][nt][c], own[s][nt][c]);
  }
  static DEV void add(float (&sum)[4], const float (&part)[4], float s0, float s1) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = fmaf(c < 2 ? s0 : s1, part[c], sum[c]);
  }
};

template <int TYPE> struct UnitOf;  // by the codes of moe_experts_tiles.py
template <> struct UnitOf<2> : Q2K {};
template <> struct UnitOf<3> : Q3K {};
template <> struct UnitOf<4> : Grouped<Q4KRow> {};
template <> struct UnitOf<5> : Grouped<Q5KRow> {};
template <> struct UnitOf<6> : Grouped<Q6KRow> {};
template <> struct UnitOf<8> : Grouped<Q80Row> {};
template <> struct UnitOf<12> : Grouped<IQ2XXSRow> {};
template <> struct UnitOf<32> : E2M1<32> {};
template <> struct UnitOf<16> : E2M1<16> {};
