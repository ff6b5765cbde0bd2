// Units of Q2_K and Q3_K for tensor cores, of packed_matvec. Their scales hold for 16 columns.
// Macros: QTYPE (2, 3), TOKENS and MEANS (packed_tokens.cuh).
//
// Columns of a lane as of Q6_K in packed_units.cuh: with h = t / 2, e = t % 2 the weights
// 128 h + 32 i + 16 e + l, i < 4, l < 16. Their two low bits are bits 2 i and up of
// qs[32 h + 16 e + l], the third of Q3_K is bit 4 h + i of hmask[16 e + l]. Integers stay in
// their place in a byte, so scales are divided by 4^i. Operands are exact: |scale * q| <= 45
// (Q2_K), 128 (Q3_K), times 16 or 8 because tensor cores do not shift subnormals up before they cut
// off low bits.
#pragma once

#include "packed/packed_ptx.cuh"
#include "packed/packed_tokens.cuh"
#include "packed/packed_fetch.cuh"

#define OPERAND_SCALE (QTYPE == 2 ? 16 : 8)
static_assert(MEANS == (QTYPE == 2 ? 64 : 0), "MEANS");
constexpr int LAST = SLOT - UNIT_GROUPS * 16 * GROUP * FIELDS[NUM_FIELDS - 1].size;  // d

// Put 32 columns, group j of a unit, of token n into place.
DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int t = 2 * (j >> 2) + (q >> 1), p = 2 * (j & 3) + (q & 1);
    const uint4 r = reorder(v[q]);
    store_shared(unit + (p * TOKENS + n) * 64 + 16 * t, make_uint4(r.x, r.y, r.z, r.w));
  }
#if MEANS
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float mean = (sum8(v[2 * e]) + sum8(v[2 * e + 1])) * (1.f / 16);
    stage_mean(unit, mean, n, 2 * (j >> 2) + e, j & 3, 4);
  }
#endif
}

struct Scales {  // of a row and the lane's four groups: scale / 4^i, -4 scale or the minima
  u32 scale[4], offset[4], mins;
  float d, dmin;
};
DEV Scales unpack(u32 slot, int row, int t) {
  Scales s;
  const u32 mine = t & 1 ? 0x7531 : 0x6420;
#if QTYPE == 2
  const uint2 half = load_shared<uint2>(slot + plane_at(1) + 16 * row + 8 * (t >> 1));
  const u32 bytes = __byte_perm(half.x, half.y, mine), d = load_shared<u32>(slot + LAST + 4 * row);
  const u32 sc = bytes & 0x0f0f0f0fu;
  s.mins = bytes & 0xf0f0f0f0u, s.dmin = half_to_float(d >> 16);  // 16 times them
#else
  const u32 at = slot + plane_at(2) + 12 * row, d = load_shared<u16>(slot + LAST + 2 * row);
  const int shift = 4 * (t >> 1);
  const u32 low =
      __byte_perm(load_shared<u32>(at), load_shared<u32>(at + 4), mine) >> shift & 0x0f0f0f0fu;
  const u32 high = __byte_perm(load_shared<u32>(at + 8), 0, t & 1 ? 0x3131 : 0x2020) >> shift;
  const u32 sc = low | (high & 0x0303u) << 4 | (high >> 2 & 0x03030000u) << 4;
#endif
  s.d = half_to_float(d & 0xffff) * (1.f / OPERAND_SCALE);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // (1024 + v - 1024) * 16 / 4^i, (1024 + v - 1056) * 8 / 4^i
    const u32 over = 0x08000800u * i, zero = QTYPE == 2 ? 0xf400f400u : 0xf020f020u;
    const u32 factor = QTYPE == 2 ? 0x4c004c00u : 0x48004800u;
    s.scale[i] = fma_fp16x2(byte_pair(sc, i), factor - over, zero - over);
    if (QTYPE == 3) s.offset[i] = mul_fp16x2(s.scale[i], 0x80008000u | 0x00040004u << (2 * i));
  }
  return s;
}
// Weights i of four bytes, even or odd ones, to the operand.
DEV u32 operand(u32 qs, u32 mask, int i, int odd, const Scales& s) {
  const u32 low = (odd ? qs >> 8 : qs) & 0x00030003u << (2 * i);
#if QTYPE == 2
  return mul_fp16x2(low, s.scale[i]);
#else
  const int shift = i + 2 - 8 * odd;  // the third bit to its place above the others
  const u32 high = shift > 0 ? mask << shift : mask >> -shift;
  return fma_fp16x2(low | (high & 0x00040004u << (2 * i)), s.scale[i], s.offset[i]);
#endif
}
DEV uint4 load_mask(u32 slot, int row, int t) {
#if QTYPE == 2
  return make_uint4(0, 0, 0, 0);
#else
  const uint4 v = load_shared<uint4>(slot + plane_at(1) + 32 * row + 16 * (t & 1));
  const int shift = 4 * (t >> 1);
  return make_uint4(v.x >> shift, v.y >> shift, v.z >> shift, v.w >> shift);
#endif
}
// sum[nt] += weights x tokens, in units of 2^-24; loaded as in packed_units.cuh.
template <class Loaded>
DEV void multiply(float (&sum)[NT][4], u32 slot, const Tokens& tokens, int lane, Loaded loaded) {
  const int g = lane >> 2, t = lane & 3;
  const Scales s0 = unpack(slot, g, t), s1 = unpack(slot, g + 8, t);
  const uint4 q0 = load_shared<uint4>(slot + 16 * lane), q1 = load_shared<uint4>(slot + 512 + 16 * lane);
  const uint4 m0 = load_mask(slot, g, t), m1 = load_mask(slot, g + 8, t);
  loaded();
  float part[NT][4] = {};
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) v[nt] = tokens.piece(nt, 2 * i + k / 2);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const u32 a0 = word(q0, k + o), a1 = word(q1, k + o);
        const u32 b0 = word(m0, k + o), b1 = word(m1, k + o);
        const u32 w0 = operand(a0, b0, i, 0, s0), w1 = operand(a1, b1, i, 0, s1);
        const u32 w2 = operand(a0, b0, i, 1, s0), w3 = operand(a1, b1, i, 1, s1);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          mma(part[nt], w0, w1, w2, w3, word(v[nt], 2 * o), word(v[nt], 2 * o + 1));
      }
    }
  }
#if MEANS
  const u32 a0 = __byte_perm(s0.mins, 0, 0x4140), a1 = __byte_perm(s1.mins, 0, 0x4140);
  const u32 a2 = __byte_perm(s0.mins, 0, 0x4342), a3 = __byte_perm(s1.mins, 0, 0x4342);
  const float d0 = -s0.dmin, d1 = -s1.dmin;  // 16 columns, 16 times the minima
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const uint4 means = tokens.more_means(nt);
    float least[4] = {};
    mma(least, a0, a1, a2, a3, means.x, means.y);
    mma(least, a0, a1, a2, a3, means.z, means.w);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[nt][c] = fmaf(c < 2 ? d0 : d1, least[c], sum[nt][c]);
  }
#endif
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sum[nt][c] = fmaf(c < 2 ? s0.d : s1.d, part[nt][c], sum[nt][c]);
}
