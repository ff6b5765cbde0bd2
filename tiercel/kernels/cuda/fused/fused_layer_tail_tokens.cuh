// Activations of fused_layer_tail.cu in shared memory, as units of Q4_K and Q6_K (packed_units.cuh)
// take them. Macro: TOKENS, a multiple of 8.
//
// Activations of a unit's 256 columns ("column", COLUMN bytes) have one order for both types: piece
// p of lane t of a Q4_K unit, token n, is at (p * TOKENS + n) * 64 + 16 * (t ^ (p >> 1 & 1)), the
// means follow at 512 TOKENS + 32 n + 8 t. What a lane of Q6_K takes as piece p are the same 8
// columns as a piece of another lane; the turn keeps both readers off each other's banks.
#pragma once

#include "packed/packed_ptx.cuh"
#include "packed/packed_tokens.cuh"

#define COLUMN (4352 * NT)

struct TokensOfQ4 {
  u32 x[2], rests;
  DEV TokensOfQ4(u32 column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    x[0] = column + 64 * g + 16 * t, x[1] = column + 64 * g + 16 * (t ^ 1);
    rests = column + 4096 * NT + 32 * g + 8 * t;
  }
  DEV uint4 piece(int nt, int p) const { return load_shared<uint4>(x[p >> 1 & 1] + (p * NT + nt) * 512); }
  DEV uint2 means(int nt) const { return load_shared<uint2>(rests + 256 * nt); }
};
struct TokensOfQ6 {
  u32 x[2];
  DEV TokensOfQ6(u32 column, int lane) {
    const int g = lane >> 2, h = lane >> 1 & 1, e = lane & 1;
    x[0] = column + 64 * g + 1024 * NT * e + 16 * (2 * h + e);
    x[1] = column + 64 * g + 1024 * NT * e + 16 * (2 * h + 1 - e);
  }
  DEV uint4 piece(int nt, int p) const {
    return load_shared<uint4>(x[p >> 2] + ((4 * (p >> 1 & 1) + (p & 1)) * NT + nt) * 512);
  }
};
