// Constants of packed_gemm's decoders. Macro: QTYPE.
#pragma once

#include "packed/packed_gemm_ptx.cuh"

#define SIXTEEN 0x4c004c00u  // 16, twice
struct Masks {  // in registers: an instruction takes one constant alone, so it would be two
  u32 one = 0x64006400u;  // 1024
#if QTYPE == 4 || QTYPE == 6 || QTYPE == 40 || QTYPE == 41
  u32 low = hidden(0x000f000fu), high = hidden(0x00f000f0u);
#else
  u32 bytes = hidden(0x00ff00ffu), low = hidden(0x0f0f0f0fu);
#endif
#if QTYPE == 6
  u32 low2 = hidden(0x00300030u), high2 = hidden(0x03000300u);
#endif
};
