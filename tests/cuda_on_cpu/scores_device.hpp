// What indexer_scores_ptx.cuh gives, for one processor; behind tiles_device.hpp.
template <int ACC>
DEV void wgmma_keys(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  const auto lanes = collect(Fragment{{a0, a1, a2, a3}});
  float x[2][16];
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) {
      const Fragment of = lanes[lane_id() / 4 * 4 + k % 8 / 2];
      x[h][k] = of_16((u16)(of.a[2 * (k / 8) + h] >> 16 * (k % 2)));
    }
  for (int j = 0; j < 8; ++j)
    for (int e = 0; e < 2; ++e) {
      float sum[2] = {ACC ? d[4 * j + e] : 0.f, ACC ? d[4 * j + 2 + e] : 0.f};
      for (int k = 0; k < 16; ++k) {
        const float y = operand(b, 8 * j + 2 * (lane_id() % 4) + e, k);
        sum[0] += x[0][k] * y, sum[1] += x[1][k] * y;
      }
      d[4 * j + e] = sum[0], d[4 * j + 2 + e] = sum[1];
    }
}
