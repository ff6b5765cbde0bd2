// Units of Q4_K for fused_layer_tail.cu: packed_units.cuh comes behind it, into namespace q4. Macro:
// TOKENS, a multiple of 8.
//
// Activations of a unit's 256 columns ("column", COLUMN bytes) lie in one order for both types:
// piece p of lane t of a Q4_K unit, token n, at (p * TOKENS + n) * 64 + 16 * (t ^ (p >> 1 & 1)),
// then means at 512 TOKENS + 32 n + 8 t. What a lane of Q6_K takes as piece p are the same 8
// columns as a piece of another lane; the turn keeps both readers off each other's banks.
#define COLUMN (4352 * NT)
#define QTYPE 4
namespace q4 {
struct Tokens {
  u32 x[2], rests;
  DEV Tokens(u32 column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    x[0] = column + 64 * g + 16 * t, x[1] = column + 64 * g + 16 * (t ^ 1);
    rests = column + 4096 * NT + 32 * g + 8 * t;
  }
  DEV uint4 piece(int nt, int p) const { return lds16(x[p >> 1 & 1] + (p * NT + nt) * 512); }
  DEV uint2 means(int nt) const { return lds8(rests + 256 * nt); }
};
