// Layout of activations in shared memory, as the units of packed_units*.cuh read them.
// Macros: TOKENS (room for so many), MEANS (bytes of means of a unit and token: 0, 32 or 64).
//
// Of a unit of 256 columns, lane 4 g + t takes 8 pieces of 8 columns in fragment order from token
// n = 8 nt + g, and, where weights have minima, means over the columns of a scale: a quarter of the
// unit's as fp16 values, then as many remainders. In a unit, piece p of lane t, token n is at
// (p * TOKENS + n) * 64 + 16 t, its means after all pieces at n * MEANS + MEANS / 4 * t. Columns
// n >= m, the number of tokens, repeat the last one; their products are never stored.
#pragma once

#include "packed/packed_ptx.cuh"

#define NT ((TOKENS + 7) / 8)  // tiles of 8 tokens
constexpr u32 UNIT_TOKENS = TOKENS * (512 + MEANS);  // bytes of a unit
DEV uint4 reorder(uint4 v) {  // of each four halves 0 2 1 3
  return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                    __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
}
DEV float sum2(u32 v) { return half_to_float(v & 0xffff) + half_to_float(v >> 16); }
DEV float sum8(const uint4& v) { return (sum2(v.x) + sum2(v.y)) + (sum2(v.z) + sum2(v.w)); }
DEV float mean32(const uint4& a, const uint4& b, const uint4& c, const uint4& d) {
  return ((sum8(a) + sum8(b)) + (sum8(c) + sum8(d))) * (1.f / 32);
}
struct Tokens {
  u32 x[NT], rests[NT];
  DEV uint4 piece(int nt, int p) const { return load_shared<uint4>(x[nt] + p * TOKENS * 64); }
  DEV uint2 means(int nt) const { return load_shared<uint2>(rests[nt]); }
  DEV uint4 more_means(int nt) const { return load_shared<uint4>(rests[nt]); }
  DEV Tokens(u32 unit, int m, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int n = min(8 * nt + g, m - 1);
      x[nt] = unit + n * 64 + 16 * t;
      rests[nt] = unit + 512 * TOKENS + n * MEANS + MEANS / 4 * t;
    }
  }
};
// Put a mean and what fp16 leaves of it into place: value `i` of `count` of lane t.
DEV void stage_mean(u32 unit, float mean, int n, int t, int i, int count) {
  const u16 near = float_to_half(mean);
  const u32 at = unit + 512 * TOKENS + n * MEANS + MEANS / 4 * t + 2 * i;
  store_shared<u16>(at, near),
      store_shared<u16>(at + 2 * count, float_to_half(mean - half_to_float(near)));
}
