// What sparse_attention_tiles_ptx.cuh gives, for one processor; behind cluster_device.hpp.
DEV void wgmma_values(float (&d)[64], u32 a, u32 b, int is_first) {
  float x[2][16];
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) x[h][k] = operand(a, first_row() + 8 * h, k);
  for (int j = 0; j < 16; ++j)
    for (int e = 0; e < 2; ++e) {
      const u32 column = 8 * j + 2 * (lane_id() % 4) + e;
      const u32 chunk = b + column / 64 * (b >> 16 & 0x3FFF);  // in 16 bytes
      float sum[2] = {is_first ? 0.f : d[4 * j + e], is_first ? 0.f : d[4 * j + 2 + e]};
      for (int k = 0; k < 16; ++k) {
        const float y = operand(chunk, k, column % 64);
        sum[0] += x[0][k] * y, sum[1] += x[1][k] * y;
      }
      d[4 * j + e] = sum[0], d[4 * j + 2 + e] = sum[1];
    }
}
