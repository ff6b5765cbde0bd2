// Units for packed_gemm of the types whose scales hold for 32 columns, as packed_gemm_units.cuh has
// those of Q4_K and Q6_K. A pair of steps is a group; bytes of a lane: packed_units32.cuh. Macro: QTYPE
// (40: Q4_0, 41: Q4_1, 44: IQ4_NL, 45: IQ4_XS, 5: Q5_K, 80: Q8_0).
//
// A weight is (16 scale) * q + 16 least: the integer exact, the factors and the result rounded to
// fp16. A unit's quad, its four groups of 128 columns, is read when its first group is decoded.
#pragma once

#include "packed/packed_codes.cuh"
#include "packed/packed_fields.cuh"
#include "packed/packed_gemm_masks.cuh"

#define TILE_BYTES plane_at(NUM_FIELDS)
#define HAS_LEAST (QTYPE == 5 || QTYPE == 41)
constexpr int LAST = plane_at(NUM_FIELDS - 1);

template <int P> DEV void fetch_plane(const u8* plane, i64 unit, u32 to, u32 barrier) {
  constexpr int BYTES = UNIT_GROUPS * group_bytes(P);
  copy_bulk(to + plane_at(P), plane + unit * BYTES, BYTES, barrier);
}
DEV void fetch_unit(const Planes& w, i64 unit, u32 to, u32 barrier) {
  fetch_plane<0>(w.p0, unit, to, barrier), fetch_plane<1>(w.p1, unit, to, barrier);
  if constexpr (NUM_FIELDS > 2) fetch_plane<2>(w.p2, unit, to, barrier);
}

struct Row {  // of a quad
  uint4 q, more;
  uint2 high;  // bits of Q5_K
  u32 scale[4], least[4];  // 16 times them, twice each
  DEV void load(u32 slot, int half, int quad, int lane) {
    const int row = 8 * half + (lane >> 2);
#if QTYPE == 80
    const u32 at = slot + 2048 * quad + 1024 * half + 16 * lane;
    q = load_shared<uint4>(at), more = load_shared<uint4>(at + 512);
#else
    constexpr int HALF_STEP = GROUP == 4 ? 512 : 1024, QUAD_STEP = GROUP == 4 ? 1024 : 512;
    q = load_shared<uint4>(slot + QUAD_STEP * quad + HALF_STEP * half + 16 * lane);
#endif
#if QTYPE == 5
    const uint2 bits = {load_shared<u32>(slot + plane_at(1) + 32 * row + 4 * (lane & 3)),
                        load_shared<u32>(slot + plane_at(1) + 32 * row + 4 * (lane & 3) + 16)};
    high.x = bits.x >> (4 * quad), high.y = bits.y >> (4 * quad);
    const uint4 header = load_shared<uint4>(slot + LAST + 16 * row);
    const u32 sc = six_bits(header.y, header.w, quad), mn = six_bits(header.z, header.w >> 4, quad);
    const u32 d = mul_fp16x2(__byte_perm(header.x, 0, 0x1010), SIXTEEN);
    const u32 dmin = mul_fp16x2(__byte_perm(header.x, 0, 0x3232), SIXTEEN ^ 0x80008000u);
#elif QTYPE == 45
    const uint2 header = load_shared<uint2>(slot + LAST + 8 * row);
    const u32 low = header.y >> (16 * quad), top = header.x >> (16 + 8 * quad);
    const u32 d = mul_fp16x2(__byte_perm(header.x, 0, 0x1010), SIXTEEN);
#elif HAS_LEAST
    const uint4 header = load_shared<uint4>(slot + LAST + 256 * quad + 16 * row);
#else
    const uint2 header = load_shared<uint2>(slot + LAST + 128 * quad + 8 * row);
#endif
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#if QTYPE == 5
      scale[b] = mul_fp16x2(add_fp16x2(byte_pair(sc, b), 0xe400e400u), d);  // - 1024
      least[b] = mul_fp16x2(add_fp16x2(byte_pair(mn, b), 0xe400e400u), dmin);
#elif QTYPE == 45
      const u32 s = (low >> (4 * b) & 15) | (top >> (2 * b) & 3) << 4;
      scale[b] = mul_fp16x2(add_fp16x2(byte_pair(s, 0), 0xe420e420u), d);  // - 1056
#elif HAS_LEAST
      scale[b] = mul_fp16x2(__byte_perm(word(header, b), 0, 0x1010), SIXTEEN);
      least[b] = mul_fp16x2(__byte_perm(word(header, b), 0, 0x3232), SIXTEEN);
#else
      const u32 pair = b < 2 ? header.x : header.y;
      scale[b] = mul_fp16x2(__byte_perm(pair, 0, b & 1 ? 0x3232 : 0x1010), SIXTEEN);
#endif
    }
  }
  DEV u32 weights(u32 value, u32 zero, u32 factor, int b) const {
#if HAS_LEAST
    return fma_fp16x2(add_fp16x2(value, zero), factor, least[b]);
#else
    return mul_fp16x2(add_fp16x2(value, zero), factor);
#endif
  }
  // Both steps of group b: registers a[0], a[2] and a[4], a[6] of this row.
  DEV void decode(u32* a, int b, const Masks& m) const {
#if QTYPE == 40 || QTYPE == 41  // nibbles where they are: 1024 + q, 1024 + 16 q
    constexpr u32 LOW = QTYPE == 40 ? 0xe408e408u : 0xe400e400u;
    constexpr u32 HIGH = QTYPE == 40 ? 0xe480e480u : 0xe400e400u;
    const u32 x = word(q, b), sixteenth = mul_fp16x2(scale[b], 0x2c002c00u);
    a[0] = weights(merge(x, m.low, m.one), LOW, scale[b], b);
    a[2] = weights(merge(x >> 8, m.low, m.one), LOW, scale[b], b);
    a[4] = weights(merge(x, m.high, m.one), HIGH, sixteenth, b);
    a[6] = weights(merge(x >> 8, m.high, m.one), HIGH, sixteenth, b);
#else
    u32 low, top;  // a byte each
#if QTYPE == 80
    const uint4& bytes = b < 2 ? q : more;
    low = word(bytes, 2 * (b & 1)) ^ 0x80808080u, top = word(bytes, 2 * (b & 1) + 1) ^ 0x80808080u;
    constexpr u32 ZERO = 0xe480e480u;  // - 1152
#elif IS_TABLE
    const uint2 v = look_up(word(q, b));  // columns 0 16 1 17 and 2 18 3 19 of a lane
    low = __byte_perm(v.x, v.y, 0x6420), top = __byte_perm(v.x, v.y, 0x7531);
    constexpr u32 ZERO = 0xe480e480u;
#else
    low = merge(word(q, b & 2) >> (4 * (b & 1)), m.low, (high.x >> b & 0x01010101u) << 4);
    top = merge(word(q, (b & 2) + 1) >> (4 * (b & 1)), m.low, (high.y >> b & 0x01010101u) << 4);
    constexpr u32 ZERO = 0xe400e400u;
#endif
    a[0] = weights(merge(low, m.bytes, m.one), ZERO, scale[b], b);
    a[2] = weights(__byte_perm(low, 0x64646464u, 0x4341), ZERO, scale[b], b);
    a[4] = weights(merge(top, m.bytes, m.one), ZERO, scale[b], b);
    a[6] = weights(__byte_perm(top, 0x64646464u, 0x4341), ZERO, scale[b], b);
#endif
  }
};
struct Unit {
  u32 slot;
  int lane;
  Row r0, r1;
  DEV Unit(u32 slot, int lane, const Masks&) : slot(slot), lane(lane) {}
  DEV void decode(u32* a, int pair, const Masks& m) {
    if (pair % 4 == 0) r0.load(slot, 0, pair / 4, lane), r1.load(slot, 1, pair / 4, lane);
    r0.decode(a, pair % 4, m), r1.decode(a + 1, pair % 4, m);
  }
};
