// Units of 16 rows x 256 columns of experts' weights, as operands of bfloat16 tensor cores.
//
// A type has a struct (others: moe_experts_groups.cuh): CODES and SCALES, the bytes of a unit in its planes (layout: quant_tiles.py;
// here codes, then scales), MEANS, the bytes of a token's sums beside 256 columns of it, and
//   stage     places 32 columns of a token where `multiply` reads them; `peak`: the largest magnitude
//             of the unit's columns, its bits as float32
//   multiply  sum[s] += unit s of two x tokens, both with the same columns of the tokens; a unit's sum
//             is rounded before it is added, so that it does not matter which warp adds it
//   TILE_TOKENS, TILES  tokens of a tile, and tiles of COLUMNS tokens; N tiles are at hand
//   LANE_SUMS  of a tile: of rows g and g + 8, of tokens 2 t and 2 t + 1, or of t alone
// Lane 4 g + t holds rows g and g + 8 and, of a unit, 64 columns of its own t, whole groups of a
// scale: so it unpacks a quarter of the scales. A token's columns are in 8 pieces of 8 for each
// t: piece p of token n at (p * COLUMNS + n) * 64 + 16 t, its sums after all pieces.
// Operands are exact: code * scale has 8 significant bits at most. They are 2^-64 of the weights:
// codes become operands by a mask and one product, as subnormal numbers or small exponents.
// Macro: COLUMNS (tokens of a pass at most).
#pragma once

#include "moe/moe_experts_ptx.cuh"

#define NT ((COLUMNS + 7) / 8)  // tiles of 8 tokens
#define RAISED 18446744073709551616.f  // 2^64
#define MINUS_ZERO 0x80008000u
DEV u32 max_or_nan(u32 a, u32 b) { return a > b ? a : b; }
DEV float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
DEV float sum2_bf16(u32 v) { return bf16_to_float(v & 0xffff) + __uint_as_float(v & 0xffff0000u); }
DEV float sum8_bf16(const uint4& v) {
  return (sum2_bf16(v.x) + sum2_bf16(v.y)) + (sum2_bf16(v.z) + sum2_bf16(v.w));
}
// Piece p of lane t: of each four columns 0 2, 1 3.
DEV void stage_pairs(u32 unit, const uint4& v, int p, int t, int n) {
  store_shared(unit + (p * COLUMNS + n) * 64 + 16 * t,
               make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                          __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)));
}
template <int MEANS, int N> struct Columns {  // of a unit: what a lane reads of its tokens
  u32 x[N], means[N];
  DEV Columns(u32 unit, int m, int lane) {  // columns n >= m repeat the last: never stored
#pragma unroll
    for (int nt = 0; nt < N; ++nt) {
      const int n = min(8 * nt + (lane >> 2), m - 1);
      x[nt] = unit + n * 64 + 16 * (lane & 3);
      means[nt] = unit + COLUMNS * 512 + n * MEANS + MEANS / 4 * (lane & 3);
    }
  }
  DEV uint4 piece(int nt, int p) const { return load_shared<uint4>(x[nt] + p * COLUMNS * 64); }
};

// ---- Q2_K. Columns of a lane, with h = t / 2 and e = t % 2: 128 h + 32 i + 16 e + l, i < 4, l < 16,
// bits 2 i and up of qs[32 h + 16 e + l]: the bits of subnormal numbers. Scales are divided by 4^i.
DEV void stage_halves(u32 unit, const uint4 (&v)[4], int j, int n) {  // of Q2_K and Q3_K
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int t = 2 * (j >> 2) + (q >> 1), p = 2 * (j & 3) + (q & 1);
    stage_pairs(unit, v[q], p, t, n);
  }
}
// Integers throughout: code * scale fits a byte, and a token's column is two digits, 256 high + low, of
// 2^-15 of its unit's largest power of two. A tile of 8 columns is both digits of 4 tokens.
struct Q2K {
  static constexpr int CODES = 1344, SCALES = 0, MEANS = 48;
  static constexpr int TILE_TOKENS = 4, TILES = (COLUMNS + 3) / 4, LANE_SUMS = 2;
  static constexpr u32 SUMS = COLUMNS * 512, FACTORS = COLUMNS * 544;  // of a unit's tokens

  struct Row {
    u32 scale[4], mins;  // scales of the codes that stay in their place, bits 2 and 3, else 4 times
    float d, dmin;
    DEV Row(u32 slot, int row, int t) {
      const uint2 half = load_shared<uint2>(slot + 1024 + 16 * row + 8 * (t >> 1));
      const u32 bytes = __byte_perm(half.x, half.y, t & 1 ? 0x7531 : 0x6420);
      const u32 dm = load_shared<u32>(slot + 1280 + 4 * row);
      const u32 even = bytes << 2 & 0x003c003cu, odd = bytes >> 8 & 0x000f000fu;
      scale[0] = even & 0xffff, scale[1] = odd & 0xffff, scale[2] = even >> 16, scale[3] = odd >> 16;
      mins = bytes >> 4 & 0x0f0f0f0fu;
      d = half_to_float(dm & 0xffff), dmin = half_to_float(dm >> 16) * -64.f;
    }
    DEV u32 operand(u32 qs, int i) const {  // 4 * code * scale; qs: codes 0 and 1 of it, or 2 and 3
      return (qs & (i & 1 ? 0x0c0c0c0cu : 0x03030303u)) * scale[i];
    }
  };
  static DEV u32 digits(float x, float to_int) {  // and 128: so the low one is signed, but for its top bit
    const float y = fmaf(x, to_int, 12582912.f + 128);  // 1.5 * 2^23
    return __float_as_uint(y < 12582912.f + 32767 ? y : 12582912.f + 32767);
  }
  static DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n, u32 peak) {
    const u32 top = max_or_nan(peak >> 23, 20);  // exponent of the largest of the unit's 256 columns
    const float to_int = __uint_as_float((268 - top) << 23);  // 2^14 of it
    const int i = j & 3;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = 2 * (j >> 2) + e;
      u32 high[4], low[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4& four = v[2 * e + k / 2];
        const u32 x = k & 1 ? four.z : four.x, y = k & 1 ? four.w : four.y;
        const u32 a = __byte_perm(digits(bf16_to_float(x & 0xffff), to_int),
                                  digits(__uint_as_float(x & 0xffff0000u), to_int), 0x5410);
        const u32 b = __byte_perm(digits(bf16_to_float(y & 0xffff), to_int),
                                  digits(__uint_as_float(y & 0xffff0000u), to_int), 0x5410);
        high[k] = __byte_perm(a, b, 0x7531), low[k] = __byte_perm(a, b, 0x6420) ^ 0x80808080u;
      }
      const u32 at = unit + i * (COLUMNS * 128) + 16 * t;
      store_shared(at + 128 * n, make_uint4(high[0], high[1], high[2], high[3]));
      store_shared(at + 128 * n + 64, make_uint4(low[0], low[1], low[2], low[3]));
      const u32 sum = digits(sum8_bf16(v[2 * e]) + sum8_bf16(v[2 * e + 1]), to_int / 16);
      store_shared_byte(unit + SUMS + 32 * n + 4 * t + i, sum >> 8);
      store_shared_byte(unit + SUMS + 32 * n + 16 + 4 * t + i, sum ^ 0x80);
    }
    if (j == 0)  // of 4 times code * scale; infinity and NaN become NaN
      store_shared<u32>(unit + FACTORS + 4 * n, top == 255 ? 0x7fc00000u : (top - 16) << 23);
  }
  template <int SLOT, int N>
  static DEV void multiply(float (&sum)[2][N][LANE_SUMS], u32 slot, u32 unit, int m, int lane, u32) {
    const int g = lane >> 2, t = lane & 3;
    const Row rows[2][2] = {{Row(slot, g, t), Row(slot, g + 8, t)},
                            {Row(slot + SLOT, g, t), Row(slot + SLOT, g + 8, t)}};
    u32 column[N];  // of this lane's operands; tokens n >= m repeat the last: never stored
    uint4 qs[2][2];
    int part[2][N][4] = {};
#pragma unroll
    for (int nt = 0; nt < N; ++nt) column[nt] = 2 * min(4 * nt + (g >> 1), m - 1) + (g & 1);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int r = 0; r < 2; ++r) qs[s][r] = load_shared<uint4>(slot + s * SLOT + 512 * r + 16 * lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v[N];
#pragma unroll
      for (int nt = 0; nt < N; ++nt)
        v[nt] = load_shared<uint4>(unit + i * (COLUMNS * 128) + 64 * column[nt] + 16 * t);
#pragma unroll
      for (int k = 0; k < 4; k += 2)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const u32 a = word(qs[s][0], k) >> (i & 2) * 2, b = word(qs[s][1], k) >> (i & 2) * 2;
          const u32 c = word(qs[s][0], k + 1) >> (i & 2) * 2, d = word(qs[s][1], k + 1) >> (i & 2) * 2;
          const u32 w0 = rows[s][0].operand(a, i), w1 = rows[s][1].operand(b, i);
          const u32 w2 = rows[s][0].operand(c, i), w3 = rows[s][1].operand(d, i);
#pragma unroll
          for (int nt = 0; nt < N; ++nt)
            mma_digits(part[s][nt], w0, w1, w2, w3, word(v[nt], k), word(v[nt], k + 1));
        }
    }
#pragma unroll
    for (int nt = 0; nt < N; ++nt) {
      const u32 sums = load_shared<u32>(unit + SUMS + 16 * column[nt] + 4 * t);
      const float factor = load_shared<float>(unit + FACTORS + 4 * min(4 * nt + t, m - 1));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        int least[4];
        const u32 mins[2] = {rows[s][0].mins, rows[s][1].mins};
        mma_signed(least, mins, sums, 0);
#pragma unroll
        for (int r = 0; r < LANE_SUMS; ++r) {  // powers of two: what is added is not rounded again
          const int high = part[s][nt][2 * r], y = 256 * high + part[s][nt][2 * r + 1];
          const int z = 256 * least[2 * r] + least[2 * r + 1];
          const Row& row = rows[s][r];
          sum[s][nt][r] = fmaf(factor, fmaf(row.dmin, (float)z, row.d * (float)y), sum[s][nt][r]);
        }
      }
    }
  }
};

// ---- Q3_K: as Q2_K; the third bit of a code is bit 4 h + i of hmask[16 e + l]. Codes 2 and 3 are
// shifted down by 4: a subnormal number has room for 8 bits.
struct Q3K {
  static constexpr int CODES = 1760, SCALES = 0, MEANS = 0, TILE_TOKENS = 8, TILES = NT, LANE_SUMS = 4;

  struct Row {
    u32 scale[4], offset[4];  // divided by 4^(i % 2); -4 times the scale
    float d;
    DEV Row(u32 slot, int row, int t) {
      const u32 at = slot + 1536 + 12 * row, mine = t & 1 ? 0x7531 : 0x6420;
      const int shift = 4 * (t >> 1);
      const u32 low =
          __byte_perm(load_shared<u32>(at), load_shared<u32>(at + 4), mine) >> shift & 0x0f0f0f0fu;
      const u32 high = __byte_perm(load_shared<u32>(at + 8), 0, t & 1 ? 0x3131 : 0x2020) >> shift;
      const u32 sc = low | (high & 0x0303u) << 4 | (high >> 2 & 0x03030000u) << 4;
      d = half_to_float(load_shared<u16>(slot + 1728 + 2 * row)) * RAISED;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // (128 + v - 160) * 2^69 / 4^(i % 2)
        scale[i] = fma_bf16x2(__byte_perm(sc, 0x43434343u, 0x4040u | i | i << 8),
                            0x62006200u - 0x01000100u * (i & 1), 0xe5a0e5a0u - 0x01000100u * (i & 1));
        offset[i] = fma_bf16x2(scale[i], 0x80008000u | 0x00040004u << 2 * (i & 1), MINUS_ZERO);
      }
    }
    DEV u32 operand(u32 qs, u32 mask, int i, int odd) const {
      const int low = 4 * (i >> 1) + 8 * odd, to = 2 * (i & 1), from = i + 8 * odd - to - 2;
      const u32 high = from > 0 ? mask >> from : mask << -from;
      return fma_bf16x2((qs >> low & 0x00030003u << to) | (high & 0x00040004u << to), scale[i],
                      offset[i]);
    }
  };
  static DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n, u32) {
    stage_halves(unit, v, j, n);
  }
  template <int SLOT, int N>
  static DEV void multiply(float (&sum)[2][N][4], u32 slot, u32 unit, int m, int lane, u32) {
    const int g = lane >> 2, t = lane & 3;
    const Columns<MEANS, N> tokens(unit, m, lane);
#pragma unroll
    for (int s = 0; s < 2; ++s, slot += SLOT) {
      const Row r0(slot, g, t), r1(slot, g + 8, t);
      float part[N][4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 a = load_shared<u32>(slot + 16 * lane + 4 * k),
                  b = load_shared<u32>(slot + 512 + 16 * lane + 4 * k);
        const u32 at = slot + 1024 + 32 * g + 16 * (t & 1) + 4 * k;
        const u32 c = load_shared<u32>(at) >> 4 * (t >> 1),
                  d = load_shared<u32>(at + 256) >> 4 * (t >> 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 w0 = r0.operand(a, c, i, 0), w1 = r1.operand(b, d, i, 0);
          const u32 w2 = r0.operand(a, c, i, 1), w3 = r1.operand(b, d, i, 1);
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
            const uint2 v =
                load_shared<uint2>(tokens.x[nt] + (2 * i + k / 2) * COLUMNS * 64 + 8 * (k & 1));
            mma_bf16(part[nt], w0, w1, w2, w3, v.x, v.y);
          }
        }
      }
#pragma unroll
      for (int nt = 0; nt < N; ++nt)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sum[s][nt][c] = __fadd_rn(sum[s][nt][c], __fmul_rn(c < 2 ? r0.d : r1.d, part[nt][c]));
    }
  }
};

// ---- E2M1 with a scale for GROUP columns: MXFP4 (32, E8M0), NVFP4 (16, E4M3). Columns of a lane:
// 64 t and up, 8 a word, in which the bits of codes lie apart (quant_tiles.py): shifts and masks bring
// them to the sign and to the last bits of the exponent and the first of the fraction.
template <int GROUP> struct E2M1 {
  static constexpr int CODES = 2048, SCALES = 4096 / GROUP, MEANS = 0;
  static constexpr int TILE_TOKENS = 8, TILES = NT, LANE_SUMS = 4;

  struct Row {
    u32 scale[64 / GROUP];  // times 2^62: codes are 2^-126 of their values
    DEV Row(u32 slot, int row, int t) {
      const u32 at = slot + CODES + (SCALES / 16) * row + 64 / GROUP * t;
      const u32 bytes = GROUP == 32 ? load_shared<u16>(at) : load_shared<u32>(at);
#pragma unroll
      for (int i = 0; i < 64 / GROUP; ++i) {
        const u32 both = __byte_perm(bytes, 0, 0x4040u | i | i << 8);
        if (GROUP == 32)
          scale[i] = (both << 7) + 0x1f001f00u;  // exponents up to 192: select_tiles
        else
          scale[i] = fma_bf16x2(fma_bf16x2(both << 4, 0x7b807b80u, MINUS_ZERO), 0x5e805e80u, MINUS_ZERO);
      }
    }
    DEV u32 operand(u32 codes, int o, int i) const {  // o: codes o and o + 4
      u32 bits;
      if (o < 2)
        bits = (o ? codes << 6 : codes) & 0x81c081c0u;
      else
        bits = ((o == 2 ? codes << 3 : codes >> 4) & 0x01c001c0u) | (codes << (o - 1) & 0x80008000u);
      return fma_bf16x2(bits, scale[i], MINUS_ZERO);
    }
  };
  static DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n, u32) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int t = j >> 1, p = 4 * (j & 1) + q;
      store_shared(unit + (p * COLUMNS + n) * 64 + 16 * t,
                   make_uint4(  // columns 0 4, 1 5, 2 6, 3 7
                       __byte_perm(v[q].x, v[q].z, 0x5410), __byte_perm(v[q].x, v[q].z, 0x7632),
                       __byte_perm(v[q].y, v[q].w, 0x5410), __byte_perm(v[q].y, v[q].w, 0x7632)));
    }
  }
  template <int SLOT, int N>
  static DEV void multiply(float (&sum)[2][N][4], u32 slot, u32 unit, int m, int lane, u32) {
    const int g = lane >> 2, t = lane & 3;
    const Columns<MEANS, N> tokens(unit, m, lane);
    const Row rows[2][2] = {{Row(slot, g, t), Row(slot, g + 8, t)},
                            {Row(slot + SLOT, g, t), Row(slot + SLOT, g + 8, t)}};
    float part[2][N][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 codes[2][2];
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          codes[s][r] = load_shared<uint4>(slot + s * SLOT + 1024 * half + 512 * r + 16 * lane);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint4 v[N];
#pragma unroll
        for (int nt = 0; nt < N; ++nt) v[nt] = tokens.piece(nt, 4 * half + k);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int o = 0; o < 4; o += 2) {
            const int i = (32 * half + 8 * k) / GROUP;
            const u32 a = word(codes[s][0], k), b = word(codes[s][1], k);
            const u32 w0 = rows[s][0].operand(a, o, i), w1 = rows[s][1].operand(b, o, i);
            const u32 w2 = rows[s][0].operand(a, o + 1, i), w3 = rows[s][1].operand(b, o + 1, i);
#pragma unroll
            for (int nt = 0; nt < N; ++nt)
              mma_bf16(part[s][nt], w0, w1, w2, w3, word(v[nt], o), word(v[nt], o + 1));
          }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int nt = 0; nt < N; ++nt)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[s][nt][c] = fmaf(RAISED, part[s][nt][c], sum[s][nt][c]);
  }
};
