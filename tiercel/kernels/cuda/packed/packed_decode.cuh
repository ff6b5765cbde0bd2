// packed_dequantize: a lane's bytes of eight columns, and their values, for the types of
// packed_fields.cuh. Macros: QTYPE, IN_FILE.
//
// Bytes are fetched in pairs, wherever a layout has them: lanes of a warp share what they read.
#pragma once

#include "packed/packed_fields.cuh"
#include "packed/packed_ptx.cuh"

#define GROUP_COLUMNS (GROUP == 4 ? 128 : 256)
#define GROUP_FILE_BYTES (FILE_BYTES * GROUP)
constexpr int LAST = NUM_FIELDS - 1;

struct Group {  // of a row
  Planes w;
  i64 group;        // tile * groups + group, SOA
  int row;          // of the tile
  const u8* blocks;  // FILE
  // Bytes i and i + 1 of plane P's fields, i even.
  template <int P> DEV u32 pair(int i) const {
    constexpr Field f = FIELDS[P];
#if IN_FILE
    return __ldg((const u16*)(blocks + i / f.size * FILE_BYTES + f.start + i % f.size));
#else
    constexpr int WIDTH = width_of(f);
    const u8* plane = P == 0 ? w.p0 : P == 1 ? w.p1 : P == 2 ? w.p2 : w.p3;
    const int rest = i / WIDTH;
    const int outer = f.is_woven ? rest % f.outer : rest / (f.pieces * f.inner);
    const int inner = f.is_woven ? rest / f.outer % f.inner : rest % f.inner;
    const int piece = f.is_woven ? rest / (f.outer * f.inner) : rest / f.inner % f.pieces;
    const int of_rows = (row / 8 * f.pieces + piece) * 8 + row % 8;
    const int place = (of_rows * f.outer + outer) * f.inner + inner;
    return __ldg((const u16*)(plane + group * group_bytes(P) + place * WIDTH + i % WIDTH));
#endif
  }
  template <int P> DEV u32 byte(int i) const { return pair<P>(i & ~1) >> (8 * (i & 1)) & 255; }
  template <int P> DEV float half(int i) const { return half_to_float(pair<P>(i)); }
};

struct Bytes {
  u32 q[4], high[4];  // two bytes each; bits above them
  float d, least;     // what a weight is multiplied with, and what is taken from it or added
};
DEV Bytes load(const Planes& w, i64 group, int row, const u8* blocks, int lane) {
  const Group at = {w, group, row, blocks};
  Bytes b = {};
#if QTYPE >= 40 && QTYPE != 45
  constexpr int BYTES = FIELDS[0].size, SCALE = FIELDS[LAST].size;
  const int block = lane >> 2 & 3;
  const int first = BYTES * block + (QTYPE == 80 ? 8 * (lane & 3) : 8 * (lane & 1));
  b.d = at.half<LAST>(SCALE * block);
  if (SCALE == 4) b.least = at.half<LAST>(SCALE * block + 2);
#if QTYPE == 50 || QTYPE == 51
  b.high[0] = at.pair<1>(4 * block + (lane & 2)) >> (8 * (lane & 1));
#endif
#elif QTYPE == 45
  const int j = lane >> 2, first = 16 * j + 8 * (lane & 1);
  const u32 s = at.byte<1>(4 + j / 2) >> (4 * (j & 1)) & 15 | (at.pair<1>(2) >> (2 * j) & 3) << 4;
  b.d = __fmul_rn(at.half<1>(0), (float)((int)s - 32));
#elif QTYPE == 5
  const int j = lane >> 2, first = 32 * (j >> 1) + 8 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) b.high[i] = at.pair<1>(8 * (lane & 3) + 2 * i) >> j;
  u32 sc, mn;
  if (j < 4) {
    sc = at.byte<2>(4 + j) & 63, mn = at.byte<2>(8 + j) & 63;
  } else {
    const u32 low = at.byte<2>(8 + j);
    sc = low & 15 | at.byte<2>(j) >> 6 << 4, mn = low >> 4 | at.byte<2>(4 + j) >> 6 << 4;
  }
  b.d = __fmul_rn(at.half<2>(0), (float)sc), b.least = __fmul_rn(at.half<2>(2), (float)mn);
#else
  const int j = lane >> 1, first = 32 * (lane >> 4) + 8 * (lane & 3);  // 16 columns of a scale
#if QTYPE == 2
  const u32 s = at.byte<1>(j);
  b.d = __fmul_rn(at.half<2>(0), (float)(s & 15));
  b.least = __fmul_rn(at.half<2>(2), (float)(s >> 4));
#else
  const u32 high = at.byte<2>(8 + j % 4) >> (2 * (j / 4)) & 3;
  const u32 s = at.byte<2>(j & 7) >> (j < 8 ? 0 : 4) & 15 | high << 4;
  b.d = __fmul_rn(at.half<3>(0), (float)((int)s - 32));
#pragma unroll
  for (int i = 0; i < 4; ++i) b.high[i] = at.pair<1>(8 * (lane & 3) + 2 * i) >> (lane >> 2);
#endif
#endif
#pragma unroll
  for (int i = 0; i < 4; ++i) b.q[i] = at.pair<0>(first + 2 * i);
  return b;
}
// V of ops/dequantize_torch.py.
DEV int value_of(int q) {
  constexpr signed char V[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
  return V[q];
}
DEV void decode(float (&v)[8], const Bytes& b, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 byte = b.q[i / 2] >> (8 * (i & 1)) & 255;
#if QTYPE == 80
    int q = (signed char)byte;
#elif QTYPE == 2
    int q = byte >> (lane >> 1 & 6) & 3;
#elif QTYPE == 3
    int q = (byte >> (lane >> 1 & 6) & 3) + 4 * (b.high[i / 2] >> (8 * (i & 1)) & 1) - 4;
#elif QTYPE == 5
    int q = (byte >> (lane & 4) & 15) + 16 * (b.high[i / 2] >> (8 * (i & 1)) & 1);
#else
    int q = byte >> (2 * (lane & 2)) & 15;
    if (QTYPE == 44 || QTYPE == 45) q = value_of(q);
    if (QTYPE == 50 || QTYPE == 51) q += 16 * (b.high[0] >> i & 1);
    if (QTYPE == 40) q -= 8;
    if (QTYPE == 50) q -= 16;
#endif
    v[i] = __fmul_rn(b.d, (float)q);
    if (QTYPE == 5 || QTYPE == 2) v[i] = __fsub_rn(v[i], b.least);
    if (QTYPE == 41 || QTYPE == 51) v[i] = __fadd_rn(v[i], b.least);
  }
}
