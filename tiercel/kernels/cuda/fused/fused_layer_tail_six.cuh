}  // namespace q4
// Units of Q6_K for fused_layer_tail.cu: packed_units.cuh comes again behind it, into namespace q6.
#undef QTYPE
#undef FILE_BYTES
#define QTYPE 6
namespace q6 {
struct Tokens {
  u32 x[2];
  DEV Tokens(u32 column, int lane) {
    const int g = lane >> 2, h = lane >> 1 & 1, e = lane & 1;
    x[0] = column + 64 * g + 1024 * NT * e + 16 * (2 * h + e);
    x[1] = column + 64 * g + 1024 * NT * e + 16 * (2 * h + 1 - e);
  }
  DEV uint4 piece(int nt, int p) const {
    return lds16(x[p >> 2] + ((4 * (p >> 1 & 1) + (p & 1)) * NT + nt) * 512);
  }
};
