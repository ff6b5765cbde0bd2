// Constants of packed_gemm's decoders. Macro: QTYPE.
#pragma once

#include "packed/packed_gemm_ptx.cuh"

#define SIXTEEN 0x4c004c00u   // 16, twice
#define TIMES_32 0x50005000u  // 32, twice
DEV u32 power_pair(int exponent) { return (exponent + 15) << 10 | (exponent + 15) << 26; }
struct Masks {  // in registers: an instruction takes one constant alone, so it would be two
#if QTYPE == 4 || QTYPE == 6
  // Weights are multiplied times 2**exponent. Integers of a weight are subnormal fp16, 2**-24 or
  // 2**-20 of them, so scales are 2**24 or 2**20 times as large.
  u32 d, least;  // factors: of d 2**20 less the 32 of scales, of dmin -1024
  DEV explicit Masks(int exponent)
      : d(power_pair(exponent + 15)), least(power_pair(exponent + 10) | 0x80008000u) {}
#if QTYPE == 6
  u32 low = hidden(0x000f000fu), high = hidden(0x00f000f0u);
#endif
#else  // 16 times, integers are converted
  u32 one = 0x64006400u;  // 1024
  DEV explicit Masks(int) {}
#if QTYPE == 40 || QTYPE == 41
  u32 low = hidden(0x000f000fu), high = hidden(0x00f000f0u);
#else
  u32 bytes = hidden(0x00ff00ffu), low = hidden(0x0f0f0f0fu);
#endif
#endif
};
