// Planes of quantised weights, and words and bytes of what is loaded from them.
#pragma once

#include "include/types.cuh"

struct Planes {
  // SOA: those of quant.PLANES in order. FILE: the first alone. STEP: the weights, the table, and
  // instead of an address the number of slices of a row.
  const u8 *p0, *p1, *p2, *p3;
};

DEV u32 word(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
// Byte k of v in both halves, as the fp16 1024 + byte.
DEV u32 byte_pair(u32 v, int k) { return __byte_perm(v, 0x64646464u, 0x4040u | k | k << 8); }
