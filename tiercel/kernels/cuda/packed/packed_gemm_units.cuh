// Units of Q4_K and Q6_K for packed_gemm: what a warp reads of 16 rows x 256 columns, to fragments of
// wgmma in fp16, two steps of 16 columns (a pair) at a time. Bytes of a lane: packed_units.cuh.
// Macros: QTYPE, IN_STEP (layout).
#pragma once

#include "packed/packed_gemm_masks.cuh"
#if IN_STEP
#include "packed/packed_rows.cuh"
#endif

#if QTYPE == 4
#define TILE_BYTES 2304
#elif IN_STEP
#define TILE_BYTES 3408
#else
#define TILE_BYTES 3360
#endif
#if !IN_STEP
DEV void fetch_unit(const Planes& w, i64 unit, u32 to, u32 barrier) {
  copy_bulk(to, w.p0 + unit * 2048, 2048, barrier);
#if QTYPE == 4
  copy_bulk(to + 2048, w.p1 + unit * 256, 256, barrier);
#else
  copy_bulk(to + 2048, w.p1 + unit * 1024, 1024, barrier);
  copy_bulk(to + 3072, w.p2 + unit * 256, 256, barrier);
  copy_bulk(to + 3328, w.p3 + unit * 32, 32, barrier);
#endif
}
#endif

#if QTYPE == 4
struct Row {  // factors of a row's two groups: value = q * scale + least
  u32 low, high, low_least, high_least;
  DEV Row(const uint4& header, int t, const Masks& m) {
    // Six-bit fields of the four groups of the block's half; see ops/dequantize_torch.py.
    const bool second = t >= 2;
    const u32 shift = second ? 2 : 0, mask = second ? 0x30303030u : 0x3f3f3f3fu;
    const u32 rest = second ? 0x0f0f0f0fu : 0u;
    const u32 sc = ((header.y >> shift) & mask) | (header.w & rest);
    const u32 mn = ((header.z >> shift) & mask) | ((header.w >> 4) & rest);
    const u32 d_high = mul_fp16x2(__byte_perm(header.x, 0, 0x1010), m.d);
    const u32 d_low = mul_fp16x2(d_high, SIXTEEN);
    const u32 dmin = mul_fp16x2(__byte_perm(header.x, 0, 0x3232), m.least);
    const u32 k = 2 * (t & 1);  // 1024 + field, times 32 or by 1024
    low = mul_fp16x2(fma_fp16x2(byte_pair(sc, k), TIMES_32, 0xf800f800u), d_low);
    high = mul_fp16x2(fma_fp16x2(byte_pair(sc, k + 1), TIMES_32, 0xf800f800u), d_high);
    low_least = mul_fp16x2(fma_fp16x2(byte_pair(mn, k), 0x14001400u, 0xbc00bc00u), dmin);
    high_least = mul_fp16x2(fma_fp16x2(byte_pair(mn, k + 1), 0x14001400u, 0xbc00bc00u), dmin);
  }
};
DEV u32 low_weights(u32 bytes, const Row& row) {
  return fma_fp16x2(bytes & 0x000f000fu, row.low, row.low_least);
}
DEV u32 high_weights(u32 bytes, const Row& row) {
  return fma_fp16x2(bytes & 0x00f000f0u, row.high, row.high_least);
}
struct Unit {
  Row r0, r1;
  uint4 w0[2], w1[2];
  DEV Unit(u32 slot, int lane, const Masks& m)
      : r0(load_shared<uint4>(slot + 2048 + 16 * (lane >> 2)), lane & 3, m),
        r1(load_shared<uint4>(slot + 2176 + 16 * (lane >> 2)), lane & 3, m) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      w0[j] = load_shared<uint4>(slot + 512 * j + 16 * lane),
      w1[j] = load_shared<uint4>(slot + 1024 + 512 * j + 16 * lane);
    }
  }
  DEV void decode(u32* a, int pair, const Masks&) const {
    const u32 x0 = word(w0[pair >> 2], pair & 3), x1 = word(w1[pair >> 2], pair & 3);
    a[0] = low_weights(x0, r0), a[2] = low_weights(x0 >> 8, r0);
    a[1] = low_weights(x1, r1), a[3] = low_weights(x1 >> 8, r1);
    a[4] = high_weights(x0, r0), a[6] = high_weights(x0 >> 8, r0);
    a[5] = high_weights(x1, r1), a[7] = high_weights(x1 >> 8, r1);
  }
};
#else
struct Row {  // factors of a row's four groups: value = q * scale + least
  u32 scale[4], least[4];
  DEV Row(u32 slot, int row, int t, const Masks& m) {
    const uint2 half = load_shared<uint2>(slot + 3072 + 16 * row + 8 * (t >> 1));
#if IN_STEP
    const u32 bits = step_d(slot, row);
#else
    const u32 bits = load_shared<u16>(slot + 3328 + 2 * row);
#endif
    const u32 d_high = mul_fp16x2(bits | bits << 16, m.d), d_low = mul_fp16x2(d_high, SIXTEEN);
    const u32 bytes = __byte_perm(half.x, half.y, t & 1 ? 0x7531 : 0x6420) ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 1152 + scale; q - 32, at the places of its bits
      scale[i] = mul_fp16x2(fma_fp16x2(byte_pair(bytes, i), TIMES_32, 0xf880f880u),
                            i < 2 ? d_low : d_high);
      least[i] = mul_fp16x2(scale[i], i < 2 ? 0x80208020u : 0x82008200u);
    }
  }
};
// Weights i of four bytes, even or odd ones.
DEV u32 weights(u32 ql, u32 qh, int i, int odd, const Row& row, const Masks& m) {
  const u32 low = odd ? ql >> 8 : ql;
  const int shift = 4 - 2 * (i & 1) - 8 * odd;  // 2 bits to place 4 (low nibbles) or 8 (high)
  const u32 high = shift > 0 ? qh << shift : qh >> -shift;
  const u32 q = merge(low, i < 2 ? m.low : m.high, high & (i < 2 ? 0x00300030u : 0x03000300u));
  return fma_fp16x2(q, row.scale[i], row.least[i]);
}
struct Unit {
  Row r0, r1;
  uint4 l0, m0, h0, l1, m1, h1;
  DEV Unit(u32 slot, int lane, const Masks& m)
      : r0(slot, lane >> 2, lane & 3, m),
        r1(slot, (lane >> 2) + 8, lane & 3, m),
        l0(load_shared<uint4>(slot + 16 * lane)),
        m0(load_shared<uint4>(slot + 512 + 16 * lane)),
        h0(load_shared<uint4>(slot + 2048 + 16 * lane)),
        l1(load_shared<uint4>(slot + 1024 + 16 * lane)),
        m1(load_shared<uint4>(slot + 1536 + 16 * lane)),
        h1(load_shared<uint4>(slot + 2560 + 16 * lane)) {}
  DEV void decode(u32* a, int pair, const Masks& m) const {
    const int k = pair >> 1;
    const u32 y0 = word(h0, k), y1 = word(h1, k);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd, a += 4) {
      const int i = 2 * (pair & 1) + odd;
      const u32 x0 = word(odd ? m0 : l0, k), x1 = word(odd ? m1 : l1, k);
      a[0] = weights(x0, y0, i, 0, r0, m), a[1] = weights(x1, y1, i, 0, r1, m);
      a[2] = weights(x0, y0, i, 1, r0, m), a[3] = weights(x1, y1, i, 1, r1, m);
    }
  }
};
#endif
