// Units of Q4_K and Q6_K for tensor cores, of packed_matvec and fused_layer_tail: 16 rows x 256
// columns of weights to fragments of mma.m16n8k16. Each type has a namespace. Macros: TOKENS and
// MEANS (packed_tokens.cuh), IN_FILE and IN_STEP (layout of the weights).
//
// Lane = 4 g + t of a warp holds rows g and g + 8, as the product wants it. Which columns a lane
// multiplies is free as long as both operands agree, so lane t takes whole groups of its own:
//   Q4_K  64 t .. 64 t + 63, two groups of 32: byte l of its 32 is weight 64 t + l (low nibble) and
//         64 t + 32 + l (high)
//   Q6_K  with h = t / 2, e = t % 2: weights 128 h + 32 i + 16 e + l, i < 4, l < 16: four groups of
//         16; ql[64 h + 16 e + l] holds i = 0 and 2, ql[64 h + 32 + 16 e + l] holds i = 1 and 3
// A word of four bytes (l .. l + 3) gives two half2: bytes 0 and 2, and bytes 1 and 3 one shift
// later. So activations are in the order 0 2 1 3 of each four (see stage()).
//
// An integer q in the low bits of an fp16 is the subnormal q * 2^-24. Subnormals are exact in mul,
// fma and mma, so no conversion is needed; the factor 2^24 is applied to the result. High nibbles
// are used in place as 16 q, with the scale divided by 16.
//   Q4_K  operand = scale * q <= 945: exact. The minima are one product more: (mn of a lane's two
//         groups) x (means of x over groups, as two fp16: value and remainder).
//   Q6_K  operand = scale * (q - 32), |.| <= 4096: rounded to 11 bits, as a weight in fp16 is.
// d multiplies the float32 sums of a unit.
//
// A unit in shared memory ("slot"), 16 bytes of lane l at 16 l of each 512:
//   Q4_K 2304: rows g (j = 0, 1: bytes 16 j.. of the lane's 32), rows g + 8 (j = 0, 1), 16 headers
//   Q6_K 3360: ql of rows g (two pieces), of rows g + 8, qh of rows g, of rows g + 8,
//              scales of 16 rows x 16 bytes, d of 16 rows x 2 bytes (IN_STEP: packed_rows.cuh)
#pragma once

#include "packed/packed_ptx.cuh"
#include "packed/packed_tokens.cuh"
#if IN_STEP
#include "packed/packed_rows.cuh"

template <bool SIX> struct StepSource {  // the next unit of a warp
  StepRows rows;
  int unit, blocks, lane;  // tile * blocks + block
  DEV StepSource(const Planes& w, i64 unit, int blocks, int rows, int lane)
      : rows(w, rows, blocks), unit((int)unit), blocks(blocks), lane(lane) {}
  DEV void advance(int by) { unit += by; }
  DEV void fetch(u32 slot) const {
    const int tile = unit / blocks;
    copy_unit<SIX>(rows, tile, unit - tile * blocks, slot, lane);
  }
};
#endif

namespace q4 {
// Put 32 columns, group j of a unit, of token n into place.
DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int t = j >> 1, p = 4 * (j & 1) + q;
    const uint4 r = reorder(v[q]);
    store_shared(unit + (p * TOKENS + n) * 64 + 16 * t, make_uint4(r.x, r.y, r.z, r.w));
  }
  const float mean = mean32(v[0], v[1], v[2], v[3]);
  stage_mean(unit, mean, n, j >> 1, j & 1, 2);
}

#if IN_STEP
using Source = StepSource<false>;
#elif IN_FILE
struct Source {  // the next unit of a warp
  Planes w;
  i64 unit;  // tile * blocks + block
  int blocks, rows, lane;
  DEV Source(const Planes& w, i64 unit, int blocks, int rows, int lane)
      : w(w), unit(unit), blocks(blocks), rows(rows), lane(lane) {}
  DEV void advance(int by) { unit += by; }
  DEV void fetch(u32 slot) const {
    const int g = lane >> 2, t = lane & 3, tile = (int)(unit / blocks), b = (int)(unit % blocks);
#pragma unroll
    for (int r8 = 0; r8 < 2; ++r8) {
      const int row = min(tile * 16 + 8 * r8 + g, rows - 1);
      const u8* block = w.p0 + ((i64)row * blocks + b) * 144;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 to = slot + 1024 * r8 + 512 * j + 16 * lane;
        copy16(to, block + 16 + 32 * t + 16 * j);
      }
      if (t == 0) copy16(slot + 2048 + 16 * (8 * r8 + g), block);
    }
  }
};
#else
struct Source {  // the next unit of a warp, at the lane's bytes of each plane
  const u8 *qs, *header;
  int lane;
  DEV Source(const Planes& w, i64 unit, int, int, int lane)
      : qs(w.p0 + unit * 2048 + 16 * lane), header(w.p1 + unit * 256 + 16 * lane), lane(lane) {}
  DEV void advance(int by) { qs += (i64)by * 2048, header += (i64)by * 256; }
  DEV void fetch(u32 slot) const {
    slot += 16 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(slot + 512 * i, qs + 512 * i);
    if (lane < 16) copy16(slot + 2048, header);
  }
};
#endif

struct Scales {  // of a row and the lane's two groups
  u32 low, high, mins;
  float d, dmin;
};
DEV Scales unpack(const uint4& header, int t) {
  // Six-bit fields of the four groups of the block's half; see ops/dequantize_torch.py.
  const bool second = t >= 2;
  const u32 shift = second ? 2 : 0, low = second ? 0x30303030u : 0x3f3f3f3fu;
  const u32 high = second ? 0x0f0f0f0fu : 0u;
  const u32 sc = ((header.y >> shift) & low) | (header.w & high);
  const u32 mn = ((header.z >> shift) & low) | ((header.w >> 4) & high);
  const u32 k = 2 * (t & 1);
  Scales s;
  s.low = add_fp16x2(byte_pair(sc, k), 0xe400e400u);                         // - 1024
  s.high = fma_fp16x2(byte_pair(sc, k + 1), 0x2c002c00u, 0xd400d400u);       // / 16 - 64
  s.mins = __byte_perm(mn, 0, 0x4040u | k | (k + 1) << 8);
  s.d = half_to_float(header.x & 0xffff), s.dmin = half_to_float(header.x >> 16);
  return s;
}
template <class Activations, class Loaded>
DEV void multiply(float (&sum)[NT][4], u32 slot, const Activations& tokens, int lane,
                  Loaded loaded) {
  const int g = lane >> 2, t = lane & 3;
  const Scales s0 = unpack(load_shared<uint4>(slot + 2048 + 16 * g), t);
  const Scales s1 = unpack(load_shared<uint4>(slot + 2048 + 16 * (g + 8)), t);
  float part[NT][4] = {}, least[NT][4] = {};
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const uint2 means = tokens.means(nt);
    mma(least[nt], s0.mins, s1.mins, s0.mins, s1.mins, means.x, means.y);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const u32 mine = slot + 512 * j + 16 * lane;
    const uint4 w0 = load_shared<uint4>(mine), w1 = load_shared<uint4>(mine + 1024);
    if (j == 1) loaded();
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      uint4 low[NT], high[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        low[nt] = tokens.piece(nt, 2 * j + k / 2);
        high[nt] = tokens.piece(nt, 4 + 2 * j + k / 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 r0 = word(w0, k + i), r1 = word(w1, k + i), q0 = r0 >> 8, q1 = r1 >> 8;
        const u32 a0 = mul_fp16x2(r0 & 0x000f000fu, s0.low), a1 = mul_fp16x2(r1 & 0x000f000fu, s1.low);
        const u32 a2 = mul_fp16x2(q0 & 0x000f000fu, s0.low), a3 = mul_fp16x2(q1 & 0x000f000fu, s1.low);
        const u32 c0 = mul_fp16x2(r0 & 0x00f000f0u, s0.high), c1 = mul_fp16x2(r1 & 0x00f000f0u, s1.high);
        const u32 c2 = mul_fp16x2(q0 & 0x00f000f0u, s0.high), c3 = mul_fp16x2(q1 & 0x00f000f0u, s1.high);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          mma(part[nt], a0, a1, a2, a3, word(low[nt], 2 * i), word(low[nt], 2 * i + 1));
          mma(part[nt], c0, c1, c2, c3, word(high[nt], 2 * i), word(high[nt], 2 * i + 1));
        }
      }
    }
  }
  const float m0 = -32.f * s0.dmin, m1 = -32.f * s1.dmin;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[nt][c] = fmaf(c < 2 ? s0.d : s1.d, part[nt][c], sum[nt][c]);
      sum[nt][c] = fmaf(c < 2 ? m0 : m1, least[nt][c], sum[nt][c]);
    }
  }
}
}  // namespace q4

namespace q6 {
// As in q4.
DEV void stage(u32 unit, const uint4 (&v)[4], int j, int n) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int t = 2 * (j >> 2) + (q >> 1), p = 2 * (j & 3) + (q & 1);
    const uint4 r = reorder(v[q]);
    store_shared(unit + (p * TOKENS + n) * 64 + 16 * t, make_uint4(r.x, r.y, r.z, r.w));
  }
}

#if IN_STEP
using Source = StepSource<true>;
#elif IN_FILE
DEV void copy16_by_2(u32 to, const u8* from) {  // Q6_K blocks are 2-byte aligned
  const u16* p = (const u16*)from;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __ldg(p + 2 * i) | (u32)__ldg(p + 2 * i + 1) << 16;
  store_shared(to, make_uint4(v[0], v[1], v[2], v[3]));
}
struct Source {  // the next unit of a warp
  Planes w;
  i64 unit;  // tile * blocks + block
  int blocks, rows, lane;
  DEV Source(const Planes& w, i64 unit, int blocks, int rows, int lane)
      : w(w), unit(unit), blocks(blocks), rows(rows), lane(lane) {}
  DEV void advance(int by) { unit += by; }
  DEV void fetch(u32 slot) const {
    const int g = lane >> 2, t = lane & 3, tile = (int)(unit / blocks), b = (int)(unit % blocks);
#pragma unroll
    for (int r8 = 0; r8 < 2; ++r8) {
      const int row = min(tile * 16 + 8 * r8 + g, rows - 1);
      const u8* block = w.p0 + ((i64)row * blocks + b) * 210;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 to = slot + 1024 * r8 + 512 * j + 16 * lane;
        copy16_by_2(to, block + 64 * (t >> 1) + 32 * j + 16 * (t & 1));
      }
      copy16_by_2(slot + 2048 + 512 * r8 + 16 * lane, block + 128 + 16 * t);
      if (t == 0) {
        copy16_by_2(slot + 3072 + 16 * (8 * r8 + g), block + 192);
        store_shared<u16>(slot + 3328 + 2 * (8 * r8 + g), __ldg((const u16*)(block + 208)));
      }
    }
  }
};
#else
struct Source {  // the next unit of a warp, at the lane's bytes of each plane
  const u8 *ql, *qh, *rest;
  int lane;
  DEV Source(const Planes& w, i64 unit, int, int, int lane)
      : ql(w.p0 + unit * 2048 + 16 * lane), qh(w.p1 + unit * 1024 + 16 * lane),
        rest(lane < 16 ? w.p2 + unit * 256 + 16 * lane : w.p3 + unit * 32 + 16 * (lane - 16)),
        lane(lane) {}
  DEV void advance(int by) {
    ql += (i64)by * 2048, qh += (i64)by * 1024, rest += (i64)by * (lane < 16 ? 256 : 32);
  }
  DEV void fetch(u32 slot) const {
    slot += 16 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(slot + 512 * i, ql + 512 * i);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy16(slot + 2048 + 512 * i, qh + 512 * i);
    if (lane < 18) copy16(slot + 3072, rest);  // 16 rows of scales, two pieces of d
  }
};
#endif

struct Scales {  // of a row and the lane's four groups: scale (/ 16 for high nibbles), -32 scale
  u32 scale[4], offset[4];
  float d;
};
DEV Scales unpack(u32 slot, int row, int t) {
  const uint2 half = load_shared<uint2>(slot + 3072 + 16 * row + 8 * (t >> 1));
  const u32 bytes = __byte_perm(half.x, half.y, t & 1 ? 0x7531 : 0x6420) ^ 0x80808080u;
  Scales s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 v = byte_pair(bytes, i);  // 1152 + scale
    s.scale[i] = i < 2 ? add_fp16x2(v, 0xe480e480u) : fma_fp16x2(v, 0x2c002c00u, 0xd480d480u);
    s.offset[i] = mul_fp16x2(s.scale[i], i < 2 ? 0x80208020u : 0x82008200u);
  }
#if IN_STEP
  s.d = half_to_float(step_d(slot, row));
#else
  s.d = half_to_float(load_shared<u16>(slot + 3328 + 2 * row));
#endif
  return s;
}
// Weights i of four bytes, even or odd ones: q of six bits (times 16 for i >= 2) to the operand.
DEV u32 operand(u32 ql, u32 qh, int i, int odd, const Scales& s) {
  const u32 low = odd ? ql >> 8 : ql;
  const int shift = 4 - 2 * (i & 1) - 8 * odd;  // 2 bits to place 4 (low nibbles) or 8 (high)
  const u32 high = shift > 0 ? qh << shift : qh >> -shift;
  const u32 q = i < 2 ? (low & 0x000f000fu) | (high & 0x00300030u)
                      : (low & 0x00f000f0u) | (high & 0x03000300u);
  return fma_fp16x2(q, s.scale[i], s.offset[i]);
}
template <class Activations, class Loaded>
DEV void multiply(float (&sum)[NT][4], u32 slot, const Activations& tokens, int lane,
                  Loaded loaded) {
  const int g = lane >> 2, t = lane & 3;
  const Scales s0 = unpack(slot, g, t), s1 = unpack(slot, g + 8, t);
  float part[NT][4] = {};
  const u32 mine = slot + 16 * lane;
  const uint4 a0 = load_shared<uint4>(mine), b0 = load_shared<uint4>(mine + 512),
              h0 = load_shared<uint4>(mine + 2048);
  const uint4 a1 = load_shared<uint4>(mine + 1024), b1 = load_shared<uint4>(mine + 1536),
              h1 = load_shared<uint4>(mine + 2560);
  loaded();
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) v[nt] = tokens.piece(nt, 2 * i + k / 2);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const u32 l0 = word(i & 1 ? b0 : a0, k + o), l1 = word(i & 1 ? b1 : a1, k + o);
        const u32 q0 = word(h0, k + o), q1 = word(h1, k + o);
        const u32 w0 = operand(l0, q0, i, 0, s0), w1 = operand(l1, q1, i, 0, s1);
        const u32 w2 = operand(l0, q0, i, 1, s0), w3 = operand(l1, q1, i, 1, s1);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          mma(part[nt], w0, w1, w2, w3, word(v[nt], 2 * o), word(v[nt], 2 * o + 1));
      }
    }
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      sum[nt][c] = fmaf(c < 2 ? s0.d : s1.d, part[nt][c], sum[nt][c]);
}
}  // namespace q6
