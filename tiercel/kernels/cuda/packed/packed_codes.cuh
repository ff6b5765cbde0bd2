// Codes of quantised weights that kernels for tensor cores share. Macro: QTYPE.
#pragma once

#include "include/types.cuh"

#define IS_TABLE (QTYPE == 44 || QTYPE == 45)  // IQ4_NL, IQ4_XS

#if IS_TABLE
// V of ops/dequantize_torch.py for the eight nibbles of a word, plus 128: (0..3), (4..7).
DEV uint2 look_up(u32 w) {
  const u32 which = 0x32103210u | (w & 0x88888888u) >> 1, place = w & 0x77777777u;
  uint2 v;
  v.x = __byte_perm(__byte_perm(0x3f2d1801u, 0x766a5d4fu, place),
                    __byte_perm(0xa6998d81u, 0xf1d9c5b5u, place), which);
  v.y = __byte_perm(__byte_perm(0x3f2d1801u, 0x766a5d4fu, place >> 16),
                    __byte_perm(0xa6998d81u, 0xf1d9c5b5u, place >> 16), which >> 16);
  return v;
}
#endif
// Six bits of four scales or minima of Q4_K's header; see ops/dequantize_torch.py.
DEV u32 six_bits(u32 low, u32 high, bool is_second) {
  return is_second ? (high & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u) : low & 0x3f3f3f3fu;
}
