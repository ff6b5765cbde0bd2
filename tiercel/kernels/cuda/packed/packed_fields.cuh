// Layout of a block's bytes in its planes: quant.PLANES for the types without code of their own.
// Macro: QTYPE (2: Q2_K, 3: Q3_K, 5: Q5_K, 40: Q4_0, 41: Q4_1, 44: IQ4_NL, 45: IQ4_XS, 50: Q5_0,
// 51: Q5_1, 80: Q8_0).
#pragma once

#include "include/types.cuh"

struct Field {  // of quant.Plane
  int start, size, outer, pieces, inner;
  bool is_woven;
};
#if QTYPE == 40 || QTYPE == 44  // Q4_0, IQ4_NL
#define FILE_BYTES 18
constexpr Field FIELDS[] = {{2, 16, 4, 1, 4, true}, {0, 2, 1, 1, 1, false}};
#elif QTYPE == 41  // Q4_1
#define FILE_BYTES 20
constexpr Field FIELDS[] = {{4, 16, 4, 1, 4, true}, {0, 4, 1, 1, 1, false}};
#elif QTYPE == 50  // Q5_0
#define FILE_BYTES 22
constexpr Field FIELDS[] = {{6, 16, 4, 1, 4, true}, {2, 4, 1, 1, 1, false}, {0, 2, 1, 1, 1, false}};
#elif QTYPE == 51  // Q5_1
#define FILE_BYTES 24
constexpr Field FIELDS[] = {{8, 16, 4, 1, 4, true}, {4, 4, 1, 1, 1, false}, {0, 4, 1, 1, 1, false}};
#elif QTYPE == 80  // Q8_0
#define FILE_BYTES 34
constexpr Field FIELDS[] = {{2, 32, 4, 2, 4, true}, {0, 2, 1, 1, 1, false}};
#elif QTYPE == 5  // Q5_K
#define FILE_BYTES 176
constexpr Field FIELDS[] = {
    {48, 128, 4, 2, 4, true}, {16, 32, 1, 1, 1, false}, {0, 16, 1, 1, 1, false}};
#elif QTYPE == 45  // IQ4_XS
#define FILE_BYTES 136
constexpr Field FIELDS[] = {{8, 128, 4, 2, 4, true}, {0, 8, 1, 1, 1, false}};
#elif QTYPE == 3  // Q3_K
#define FILE_BYTES 110
constexpr Field FIELDS[] = {{32, 64, 1, 1, 1, false},
                            {0, 32, 1, 1, 1, false},
                            {96, 12, 1, 1, 1, false},
                            {108, 2, 1, 1, 1, false}};
#elif QTYPE == 2  // Q2_K
#define FILE_BYTES 84
constexpr Field FIELDS[] = {
    {16, 64, 1, 1, 1, false}, {0, 16, 1, 1, 1, false}, {80, 4, 1, 1, 1, false}};
#endif
constexpr int NUM_FIELDS = sizeof(FIELDS) / sizeof(Field);
constexpr int GROUP = FILE_BYTES < 64 ? 4 : 1;  // blocks of a row side by side
constexpr int UNIT_GROUPS = FILE_BYTES < 64 ? 2 : 1;  // in 256 columns
// Bytes of plane p in a group of a tile.
DEV constexpr int group_bytes(int p) { return 16 * GROUP * FIELDS[p].size; }
DEV constexpr int width_of(const Field& f) {  // bytes that stay together
  return GROUP * f.size / (f.outer * f.pieces * f.inner);
}
// Where plane p starts in a unit in shared memory.
DEV constexpr int plane_at(int p) {
  return p == 0 ? 0 : plane_at(p - 1) + UNIT_GROUPS * group_bytes(p - 1);
}
