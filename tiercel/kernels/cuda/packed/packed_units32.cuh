// Units for tensor cores, of packed_matvec, of the types whose scales hold for 32 columns. Macros:
// QTYPE (40: Q4_0, 41: Q4_1, 44: IQ4_NL, 45: IQ4_XS, 50: Q5_0, 51: Q5_1, 80: Q8_0, 5: Q5_K), TOKENS
// and MEANS (packed_tokens.cuh).
//
// Other than in packed_units.cuh, the four lanes of a row multiply columns of one group of 32 at a
// time: lane t the columns 4 t .. 4 t + 3 and the 16 further ones, two products. So operands are
// the integers themselves, a byte each made the fp16 subnormal q * 2^-24 and brought to its zero;
// scales, d * sc where a block has several, multiply the float32 sums of a group: nothing is
// rounded but those sums. Tensor cores do not shift subnormals up before they cut off low bits, so
// integers of 4 and 5 bits are at the top of their byte. Minima are one product more, of means, as
// in packed_units.cuh.
//
// A lane's bytes of a row are a piece of 16 for four groups (a word for each) or for two (two words
// each: Q8_0; both groups in the same four, as low and high nibbles: Q5_K).
// Values of a table are looked up four at a time and come out in the order of the columns; all
// others as bytes 0 and 2, then 1 and 3 of a word.
#pragma once

#include "packed/packed_ptx.cuh"
#include "packed/packed_tokens.cuh"
#include "packed/packed_codes.cuh"
#include "packed/packed_fetch.cuh"

#define HAS_MIN (QTYPE == 41 || QTYPE == 51)  // one of fp16 beside each d
// What is taken from each byte, as two subnormals, and what a byte must be multiplied with.
#define ZERO_POINT (QTYPE == 40 || QTYPE == 50 || QTYPE == 80 || IS_TABLE ? 0x80808080u : 0)
#define BYTE_SCALE (QTYPE == 80 || IS_TABLE ? 1.f : QTYPE == 40 || QTYPE == 41 ? 1.f / 16 : 1.f / 8)
static_assert(MEANS == (HAS_MIN || QTYPE == 5 ? 32 : 0), "MEANS");
constexpr int LAST = SLOT - UNIT_GROUPS * 16 * GROUP * FIELDS[NUM_FIELDS - 1].size;  // scales

// Put 32 columns, group j of a unit, of token n into place.
DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n) {
  uint4 r[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) r[q] = IS_TABLE ? v[q] : reorder(v[q]);
  const u32 at = unit + (j * TOKENS + n) * 64;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    store_shared(at + 32 * q, make_uint4(r[q].x, r[q].y, r[q + 2].x, r[q + 2].y));
    store_shared(at + 32 * q + 16, make_uint4(r[q].z, r[q].w, r[q + 2].z, r[q + 2].w));
  }
#if MEANS
  stage_mean(unit, mean32(v[0], v[1], v[2], v[3]), n, j >> 1, j & 1, 2);
#endif
}

DEV float byte_to_float(u32 v, int k) {  // plus 2^23
  return __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440u | k));
}

struct Row {  // of a unit: four groups of 32
  uint4 q, more, high;
  float scale[4];
};
DEV Row load_row(u32 slot, int half, int quad, int lane) {
  Row r;
  const int row = 8 * half + (lane >> 2);
#if QTYPE == 80
  const u32 at = slot + 2048 * quad + 1024 * half + 16 * lane;
  r.q = load_shared<uint4>(at), r.more = load_shared<uint4>(at + 512);
#else
  constexpr int HALF_STEP = GROUP == 4 ? 512 : 1024;
  constexpr int QUAD_STEP = GROUP == 4 ? 1024 : 512;
  r.q = load_shared<uint4>(slot + QUAD_STEP * quad + HALF_STEP * half + 16 * lane);
#endif
#if QTYPE == 5
  const u32 high = slot + plane_at(1) + 32 * row + 4 * (lane & 3);
  r.high.x = load_shared<u32>(high), r.high.y = load_shared<u32>(high + 16);
  const uint4 header = load_shared<uint4>(slot + LAST + 16 * row);
  const u32 sc = six_bits(header.y, header.w, quad);
  const float d = BYTE_SCALE * half_to_float(header.x & 0xffff);
#elif QTYPE == 45
  const uint2 header = load_shared<uint2>(slot + LAST + 8 * row);
  const u32 low = header.y >> (16 * quad), high = header.x >> (16 + 8 * quad);
  const float d = half_to_float(header.x & 0xffff);
#elif HAS_MIN
  const uint4 header = load_shared<uint4>(slot + LAST + 256 * quad + 16 * row);
#else
  const uint2 header = load_shared<uint2>(slot + LAST + 128 * quad + 8 * row);
#endif
#if QTYPE == 50 || QTYPE == 51
  r.high = load_shared<uint4>(slot + plane_at(1) + 256 * quad + 16 * row);
#endif
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#if QTYPE == 5
    r.scale[b] = fmaf(d, byte_to_float(sc, b), d * -8388608.f);
#elif QTYPE == 45
    const u32 s = (low >> (4 * b) & 15) | (high >> (2 * b) & 3) << 4;
    r.scale[b] = d * (__uint_as_float(0x4b000000u | s) - 8388640.f);
#elif HAS_MIN
    r.scale[b] = BYTE_SCALE * half_to_float(word(header, b) & 0xffff);
#else
    const u32 pair = b < 2 ? header.x : header.y;
    r.scale[b] = BYTE_SCALE * half_to_float(b & 1 ? pair >> 16 : pair & 0xffff);
#endif
  }
  return r;
}
// The eight weights of group b of a quad: two registers for each of the two products.
DEV void take_operands(u32 (&a)[4], const Row& r, int quad, int b, int t) {
#if IS_TABLE
  const uint2 v = look_up(word(r.q, b));
  a[0] = v.x & 0x00ff00ffu, a[1] = v.y & 0x00ff00ffu;
  a[2] = __byte_perm(v.x, 0, 0x4341), a[3] = __byte_perm(v.y, 0, 0x4341);
#else
  u32 low, high;  // a byte each
#if QTYPE == 80
  const uint4 q = b < 2 ? r.q : r.more;
  low = word(q, 2 * (b & 1)) ^ 0x80808080u, high = word(q, 2 * (b & 1) + 1) ^ 0x80808080u;
#elif QTYPE == 5
  const int j = 4 * quad + b;
  low = word(r.q, b & 2), high = word(r.q, (b & 2) + 1);
  low = (b & 1 ? low >> 1 : low << 3) & 0x78787878u;
  high = (b & 1 ? high >> 1 : high << 3) & 0x78787878u;
  low |= r.high.x << (7 - j) & 0x80808080u, high |= r.high.y << (7 - j) & 0x80808080u;
#elif QTYPE == 50 || QTYPE == 51
  // Four bits to bit 7 of four bytes: no two of the products' bits meet.
  const u32 bits = word(r.high, b) >> (4 * t);
  low = (word(r.q, b) << 3 & 0x78787878u) | ((bits & 15) * 0x10204080u & 0x80808080u);
  high = (word(r.q, b) >> 1 & 0x78787878u) | ((bits >> 16 & 15) * 0x10204080u & 0x80808080u);
#else
  low = word(r.q, b) << 4 & 0xf0f0f0f0u, high = word(r.q, b) & 0xf0f0f0f0u;
#endif
  a[0] = low & 0x00ff00ffu, a[1] = __byte_perm(low, 0, 0x4341);
  a[2] = high & 0x00ff00ffu, a[3] = __byte_perm(high, 0, 0x4341);
#endif
#pragma unroll
  for (int i = 0; i < 4 && ZERO_POINT; ++i) a[i] = add_fp16x2(a[i], ZERO_POINT);
}
// sum[nt] += weights x tokens, in units of 2^-24; loaded as in packed_units.cuh.
template <class Loaded>
DEV void multiply(float (&sum)[NT][4], u32 slot, const Tokens& tokens, int lane, Loaded loaded) {
  const int t = lane & 3;
#if MEANS
  const int g = lane >> 2;
  float least[NT][4] = {};
#if QTYPE == 5
  const uint4 h0 = load_shared<uint4>(slot + LAST + 16 * g),
              h1 = load_shared<uint4>(slot + LAST + 16 * (g + 8));
  const u32 pair = t & 1 ? 0x4342 : 0x4140;
  const u32 m0 = __byte_perm(six_bits(h0.z, h0.w >> 4, t >= 2), 0, pair);
  const u32 m1 = __byte_perm(six_bits(h1.z, h1.w >> 4, t >= 2), 0, pair);
  const float d0 = -32.f * half_to_float(h0.x >> 16), d1 = -32.f * half_to_float(h1.x >> 16);
#else
  const u32 at = slot + LAST + 256 * (t >> 1) + 16 * g + 8 * (t & 1);
  const uint2 h0 = load_shared<uint2>(at), h1 = load_shared<uint2>(at + 128);
  const u32 m0 = __byte_perm(h0.x, h0.y, 0x7632), m1 = __byte_perm(h1.x, h1.y, 0x7632);
  const float d0 = 32.f / 16777216, d1 = d0;
#endif
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const uint2 means = tokens.means(nt);
    mma(least[nt], m0, m1, m0, m1, means.x, means.y);
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[nt][c] = fmaf(c < 2 ? d0 : d1, least[nt][c], sum[nt][c]);
  }
#endif
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    const Row r0 = load_row(slot, 0, quad, lane), r1 = load_row(slot, 1, quad, lane);
    if (quad == 1) loaded();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      u32 a0[4], a1[4];
      take_operands(a0, r0, quad, b, t), take_operands(a1, r1, quad, b, t);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 x = tokens.piece(nt, 4 * quad + b);
        float part[4] = {};
        mma(part, a0[0], a1[0], a0[1], a1[1], x.x, x.y);
        mma(part, a0[2], a1[2], a0[3], a1[3], x.z, x.w);
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sum[nt][c] = fmaf(c < 2 ? r0.scale[b] : r1.scale[b], part[c], sum[nt][c]);
      }
    }
  }
}
