// A residual's sum and norm within packed_gemm.cu: what a product adds to the residual, and the norm
// that its next reader would launch. Macros: RESIDUAL (1: results are added to the residual, which
// goes to images), NEXT, SECOND (their orders of columns, 0: no second), SCALED (1: the image of
// tokens is from such a product), and those of packed_gemm.cu.
//
// A norm needs the squares of whole rows, of which a CTA has some columns. So its image is scaled by
// the root of the norm before, which all know, and the product that reads the image scales its results
// by the quotient of the two: the norm of x = image * root / (root_before * 2**room). `select_room` has
// the range of fp16 in mind. Squares are added up for 64 columns, then over these in order: bits do not
// depend on CTAs.
#pragma once

#include "include/shared_ptx.cuh"
#include "packed/packed_columns.cuh"

struct RowNorm {
  float* x;                // (m, rows), the residual; RESIDUAL
  const float* weight;     // (rows,)
  void* second;            // the second image
  float* squares;          // (tiles, parts, TOKENS), of 64 columns each; written or, if SCALED, read
  const float* before;     // (tiles * TOKENS), roots of the norm before
  float* roots;            // likewise of this norm; SCALED
  u16 parts;
  short room;              // images are multiplied by 2**room
  float eps;
  DEV float scale(float root) const { return root * __uint_as_float((127 + room) << 23); }
};
// Four columns of a token, to an image for another product (packed_image.cu).
template <int OF>
DEV void store_four(void* image, const u16 (&h)[4], int n, int column, int units) {
  const ColumnPlace to = place_of<OF>(column & 255);
  const i64 row = (((i64)blockIdx.z * units + (column >> 8)) * 4 + (to.step >> 2)) * TOKENS + n;
  u32* chunks = (u32*)image + row * 32 + to.lane;  // 8 chunks of 16 bytes
  const int chunk = 2 * (to.step & 3);
  chunks[4 * (chunk ^ (n & 7))] = h[0] | (u32)h[2] << 16;
  chunks[4 * ((chunk + 1) ^ (n & 7))] = h[1] | (u32)h[3] << 16;
}
#if SCALED
// By a warp: what results are multiplied by, in shared memory.
DEV void find_factors(const RowNorm& norm, u32 factors, bool is_first, int lane) {
  constexpr int LANES = TOKENS / 4, TEAMS = 32 / LANES;
  const float4* from = (const float4*)norm.squares + (i64)blockIdx.z * norm.parts * LANES;
  float sum[4] = {};
  if (lane < LANES * TEAMS) {
#pragma unroll 8
    for (int p = lane / LANES; p < norm.parts; p += TEAMS) {
      const float4 v = from[p * LANES + lane % LANES];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int step = LANES; step < LANES * TEAMS; step *= 2)
      sum[e] += __shfl_xor_sync(~0u, sum[e], step);
    if (lane < LANES) {
      const int n = 4 * lane + e, token = blockIdx.z * TOKENS + n;
      const float root = rsqrtf(sum[e] / (64 * norm.parts) + norm.eps);
      store_shared<u32>(factors + 4 * n, __float_as_uint(root / norm.scale(norm.before[token])));
      if (is_first) norm.roots[token] = root;
    }
  }
}
#endif
#if RESIDUAL
struct Residual {  // four columns of a token
  float4 x, weight;
  float before;
  DEV void load(const RowNorm& norm, i64 token, int column, int rows) {
    x = *(const float4*)(norm.x + token * rows + column);
    weight = *(const float4*)(norm.weight + column);
    before = norm.before[token];
  }
};
// Adds `y` to the residual, and writes what the next product reads; all lanes of a warp call it.
DEV void add_residual(void* image, const RowNorm& norm, const Residual& own, float (&y)[4], bool has,
                      int n, int column, int rows) {
  float squares = 0;
  if (has) {
    const float4 x = own.x;
    y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
#pragma unroll
    for (int e = 0; e < 4; ++e) squares = fmaf(y[e], y[e], squares);
  }
#pragma unroll
  for (int step = 8; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  if (!has) return;
  const i64 token = (i64)blockIdx.z * TOKENS + n;
  *(float4*)(norm.x + token * rows + column) = make_float4(y[0], y[1], y[2], y[3]);
  if (column % 64 == 0)
    norm.squares[((i64)blockIdx.z * norm.parts + column / 64) * TOKENS + n] = squares;
  const float scale = norm.scale(own.before);
  const float4 w = own.weight;
  const u16 h[4] = {float_to_half(y[0] * scale * w.x), float_to_half(y[1] * scale * w.y),
                    float_to_half(y[2] * scale * w.z), float_to_half(y[3] * scale * w.w)};
  store_four<NEXT>(image, h, n, column, rows / 256);
#if SECOND
  store_four<SECOND>(norm.second, h, n, column, rows / 256);
#endif
}
#endif
