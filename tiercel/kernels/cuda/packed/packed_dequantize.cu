// packed_dequantize: quantised weights to a plain matrix. Every operation is rounded as in
// ops/dequantize_torch.py, so the result has its bits. Macros: QTYPE (4: Q4_K, 6: Q6_K, others: see
// packed_fields.cuh), IN_FILE and IN_STEP (layout), OUT (0 fp16, 1 bf16, 2 float32).
//
// A warp decodes 256 columns of four rows of a tile; lane l takes the columns 8 l .. 8 l + 7, so a
// warp's store is one run of memory. Layouts of their bytes: quant.py and packed_units.cuh.
#include "packed/packed_ptx.cuh"
#if IN_STEP
#include "packed/packed_rows.cuh"
#endif
#if QTYPE != 4 && QTYPE != 6
#include "packed/packed_decode.cuh"
#endif

#define WARPS 4
#define ROWS 4  // of a warp: their loads overlap

DEV void store8(void* out, i64 at, const float (&v)[8]) {
#if OUT == 2
  float4* to = (float4*)((float*)out + at);
  to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
#else
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = OUT == 0 ? pack_fp16(v[2 * i], v[2 * i + 1]) : pack_bf16(v[2 * i], v[2 * i + 1]);
  *(uint4*)((u16*)out + at) = make_uint4(w[0], w[1], w[2], w[3]);
#endif
}

// ---- a lane's bytes and what they mean
#if QTYPE == 4 || QTYPE == 6
DEV u32 byte(uint2 v, int i) { return ((i < 4 ? v.x : v.y) >> (8 * (i & 3))) & 0xff; }
DEV u32 load2(const u8* p) { return __ldg((const u16*)p); }
DEV uint2 load8(const u8* p) {
#if IN_FILE && QTYPE == 6
  return make_uint2(load2(p) | load2(p + 2) << 16, load2(p + 4) | load2(p + 6) << 16);
#else
  return __ldg((const uint2*)p);
#endif
}
#endif
#if QTYPE == 4
struct Bytes {
  uint2 q;
  uint4 header;
};
#if IN_STEP
DEV Bytes load(const StepBlock& block, int lane) {
  const int piece = lane >> 3 << 1 | (lane >> 1 & 1);  // the lane's 8 bytes: 32 t + 8 k
  return {load8(block.codes(piece & 3, piece >> 2) + 8 * (lane & 1)),
          __ldg((const uint4*)block.header())};
}
#else
DEV Bytes load(const Planes& w, i64 unit, int r, const u8* block, int lane) {
  const int t = lane >> 3, k = lane & 3;  // the lane's 8 bytes: 32 t + 8 k
#if IN_FILE
  return {load8(block + 16 + 32 * t + 8 * k), __ldg((const uint4*)block)};
#else
  const u8* q = w.p0 + unit * 2048 + (r >> 3) * 1024 + (k >> 1) * 512;
  return {load8(q + (4 * (r & 7) + t) * 16 + 8 * (k & 1)),
          __ldg((const uint4*)(w.p1 + unit * 256 + 16 * r))};
#endif
}
#endif
DEV void decode(float (&v)[8], const Bytes& b, int lane) {
  const int high = lane >> 2 & 1, j = 2 * (lane >> 3) + high, s = 8 * (j & 3);
  const u32 a = b.header.y >> s, m = b.header.z >> s, c = b.header.w >> s;
  const u32 sc = j < 4 ? a & 63 : (c & 15) | (a >> 6 & 3) << 4;
  const u32 mn = j < 4 ? m & 63 : (c >> 4 & 15) | (m >> 6 & 3) << 4;
  const float d = __fmul_rn(half_to_float(b.header.x & 0xffff), (float)sc);
  const float least = __fmul_rn(half_to_float(b.header.x >> 16), (float)mn);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    v[i] = __fsub_rn(__fmul_rn(d, (float)(byte(b.q, i) >> (4 * high) & 15)), least);
}
#elif QTYPE == 6
struct Bytes {
  uint2 low, high;
  u32 scale, d;
};
#if IN_STEP
DEV Bytes load(const StepBlock& block, int lane) {
  const int h = lane >> 4, i = lane >> 2 & 3, u = lane & 3, byte = 8 * (u & 1);
  return {load8(block.codes(2 * (i & 1) + (u >> 1), h) + byte),
          load8(block.high(u >> 1, h) + byte),
          __ldg(block.header() + 8 * h + 2 * i + (u >> 1)), load2(block.d())};
}
#else
DEV Bytes load(const Planes& w, i64 unit, int r, const u8* block, int lane) {
  const int h = lane >> 4, i = lane >> 2 & 3, u = lane & 3;
  const int at = 8 * h + 2 * i + (u >> 1);
#if IN_FILE
  return {load8(block + 64 * h + 32 * (i & 1) + 8 * u), load8(block + 128 + 32 * h + 8 * u),
          __ldg(block + 192 + at), load2(block + 208)};
#else
  const int place = (4 * (r & 7) + 2 * h + (u >> 1)) * 16 + 8 * (u & 1);
  return {load8(w.p0 + unit * 2048 + (r >> 3) * 1024 + (i & 1) * 512 + place),
          load8(w.p1 + unit * 1024 + (r >> 3) * 512 + place),
          __ldg(w.p2 + unit * 256 + 16 * r + at), load2(w.p3 + unit * 32 + 2 * r)};
#endif
}
#endif
DEV void decode(float (&v)[8], const Bytes& b, int lane) {
  const int quarter = lane >> 2 & 3;
  const float d = __fmul_rn(half_to_float(b.d), (float)(signed char)b.scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 low = byte(b.low, i) >> (quarter < 2 ? 0 : 4) & 15;
    const int q = (int)(low | (byte(b.high, i) >> (2 * quarter) & 3) << 4) - 32;
    v[i] = __fmul_rn(d, (float)q);
  }
}
#endif

#if QTYPE == 4 || QTYPE == 6
#define GROUP_COLUMNS 256
#define GROUP_FILE_BYTES (QTYPE == 4 ? 144 : 210)
#endif
extern "C" __global__ void __launch_bounds__(32 * WARPS) packed_dequantize(
    Planes planes,  // of W
    void* out,      // (rows, columns) contiguous
    i64 row_bytes,  // from row to row, FILE
    const int* index,  // (rows,), FILE: which rows of W these are; null: all in order
    int rows, int columns) {
  launch_dependents();
  wait_for_inputs();
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * ROWS;
  const int tile = blockIdx.x, column = blockIdx.y * 256 + 8 * lane;
  if (column >= columns) return;  // a row may end within a unit
  const int groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, group = column / GROUP_COLUMNS;
  Bytes bytes[ROWS];
#if IN_STEP
  const StepRows step(planes, rows, groups);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) bytes[i] = load(step.find(tile * 16 + first + i, group), lane);
#else
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = min(tile * 16 + first + i, rows - 1);
    const i64 from = IN_FILE && index ? index[row] : row;
    const u8* at = planes.p0 + from * row_bytes + (i64)group * GROUP_FILE_BYTES;
    bytes[i] = load(planes, (i64)tile * groups + group, IN_FILE ? 0 : first + i, at, lane);
  }
#endif
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = tile * 16 + first + i;
    float v[8];
    decode(v, bytes[i], lane);
    if (row < rows) store8(out, (i64)row * columns + column, v);
  }
}
