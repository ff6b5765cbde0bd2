// packed_mmq: y = x W^T with x of 8 bits and a K-quantised W, by products of integers. Layouts in
// shared memory: below. Macros: QTYPE (4: Q4_K, 6: Q6_K), IN_FILE (layout of W), TOKENS (of a CTA:
// 32, 64 or 128), CTAS (of an SM, for the registers), STAGES (units in the ring: 2 or more), OUT (0
// fp16, 1 bf16, 2 float32).
//
//   y = sum over groups of d_x * (d * scale * sum(q q_x)) - dmin * min * (d_x * sum(q_x))
//
// Groups of 32 columns (Q4_K) or 16 (Q6_K) are one mma.m16n8k32 or k16 each, weights as 16 rows,
// tokens as 8 columns, which starts from 1.5 * 2^23 as an integer: its result, read as a float, is
// 1.5 * 2^23 + sum. One FMA takes that off and multiplies by d_x (exact before its rounding, for
// d_x has 22 bits), one multiplies by d * scale and adds. High nibbles are used in place as 16 q,
// with d * scale / 16. The minima of a unit are one product of fp16: (8 minima, twice) x (means of
// x over groups: values and rests).
//
// A CTA has ROWS rows and TOKENS tokens, a warp MT tiles of 16 rows and 32 tokens. Its ring holds
// units of 256 columns: bytes of W, 16 rows after 16, and the image of the tokens. Headers are
// unpacked to tables of what the fragments need: of three stages one unit ahead, of two (for more
// CTAs an SM) before the products.
//
// Bytes of W in the ring, 16 rows: chunks of 16 bytes (half of the rows, place, piece, row of 8),
//   Q4_K  place p: bytes 32 p + 16 piece of the 128; low nibbles are group 2 p, high ones 2 p + 1
//   Q6_K  place 2 h + e: ql[64 h + 32 piece + 16 e ..]; then qh, (half, 2 h + e, row)
// so that lane (g, t) of a fragment reads 4 bytes at 16 g + 4 t: no bank conflicts. Then headers
// (Q4_K) or scales and d (Q6_K) of 16 rows.
// Image of a unit and TOKENS tokens: q_x (8 groups, token, 32 bytes: lane t has columns 4 t .. and
// 16 + 4 t ..), d_x (8 groups, token) float32, means (token, lane t: 2 values, 2 rests) fp16.
#include "packed/packed_ptx.cuh"

#define ROWS 128
#define TILES (ROWS / 16)
#define THREADS 256
#define MT (TILES * TOKENS / 256)  // tiles of a warp: its CTA has TOKENS / 32 columns of warps
#define GROUPS (QTYPE == 4 ? 8 : 16)
#define SLOT (QTYPE == 4 ? 2304 : 3360)  // bytes of 16 rows of a unit
#define FILE_BYTES (QTYPE == 4 ? 144 : 210)
#define W_BYTES (TILES * SLOT)
#define X_BYTES (TOKENS * 320)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define FACTOR_BYTES (GROUPS * ROWS * 4)
#define TABLE_BYTES (FACTOR_BYTES + (QTYPE == 4 ? ROWS * 20 : 0))
#define SUM_STRIDE (ROWS + 4)
#define MAGIC 0x4b400000  // 1.5 * 2^23 as a float; sums below 2^22 stay in its mantissa

DEV void stsf(u32 a, float v) { store_shared<u32>(a, __float_as_uint(v)); }
DEV float2 ldsf2(u32 a) {
  const uint2 v = load_shared<uint2>(a);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
#if QTYPE == 4
DEV void product(int (&c)[4], const u32 (&a)[4], uint2 b) { mma_unsigned(c, a, b, MAGIC); }
#else
DEV void product(int (&c)[4], const u32 (&a)[2], u32 b) { mma_signed(c, a, b, MAGIC); }
#endif

// ---- fetching
DEV u32 chunk_place(int half, int place, int piece, int row) {
  return half * 1024 + place * 256 + piece * 128 + row * 16;
}
#if IN_FILE
DEV void copy16_by_2(u32 to, const u8* from) {  // blocks of 210 bytes
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = __ldg((const u16*)from + 2 * i) | (u32)__ldg((const u16*)from + 2 * i + 1) << 16;
  store_shared(to, make_uint4(v[0], v[1], v[2], v[3]));
}
struct Weights {  // the next unit of a CTA
  const u8* blocks_of_row;
  int first_row, rows, blocks, unit, tid;
  DEV Weights(const Planes& w, int first_tile, int rows, int blocks, int unit, int tid)
      : blocks_of_row(w.p0), first_row(first_tile * 16), rows(rows), blocks(blocks), unit(unit),
        tid(tid) {}
  DEV void fetch(u32 to) {
    for (int i = tid; i < ROWS * (QTYPE == 4 ? 9 : 14); i += THREADS) {
      const int per_row = QTYPE == 4 ? 9 : 14, r = i / per_row, k = i % per_row;
      const int row = min(first_row + r, rows - 1), half = r >> 3 & 1;
      const u8* block = blocks_of_row + ((i64)row * blocks + unit) * FILE_BYTES;
      const u32 tile = to + (r >> 4) * SLOT;
#if QTYPE == 4
      const int c = k - 1;
      const u32 at = k ? chunk_place(half, c >> 1, c & 1, r & 7) : 2048 + 16 * (r & 15);
      copy16(tile + at, block + 16 * k);
#else
      if (k < 8) {
        const int place = 2 * (k >> 2) + (k & 1), piece = k >> 1 & 1;
        copy16_by_2(tile + chunk_place(half, place, piece, r & 7), block + 16 * k);
      } else if (k < 12) {
        copy16_by_2(tile + 2048 + half * 512 + (k - 8) * 128 + (r & 7) * 16, block + 16 * k);
      } else if (k == 12) {
        copy16_by_2(tile + 3072 + 16 * (r & 15), block + 192);
      } else {
        store_shared<u16>(tile + 3328 + 2 * (r & 15), __ldg((const u16*)(block + 208)));
      }
#endif
    }
    ++unit;
  }
};
#else
template <int SIZE> struct PlaneSource {  // of SIZE bytes a row: SIZE chunks of a tile
  const u8* from;
  i64 step;  // bytes from a thread's chunk to its next one, in tiles further on
  u32 to;
  int tiles;  // from the thread's first one on
  DEV PlaneSource(const u8* plane, i64 first_unit, int blocks, int tiles, u32 place, int tid)
      : from(plane + (first_unit + (i64)(tid / SIZE) * blocks) * (16 * SIZE) + 16 * (tid % SIZE)),
        step((i64)(THREADS / SIZE) * blocks * (16 * SIZE)), to(tid / SIZE * SLOT + place),
        tiles(min(TILES, tiles) - tid / SIZE) {}
  DEV void fetch(u32 stage) {
#pragma unroll
    for (int k = 0; k < (TILES * SIZE + THREADS - 1) / THREADS; ++k)
      if (k * (THREADS / SIZE) < tiles)
        copy16(stage + to + k * (THREADS / SIZE) * SLOT, from + k * step);
    from += 16 * SIZE;
  }
};
struct Weights {  // the next unit of a CTA; tiles beyond the last are left as they are
  PlaneSource<128> quants;
#if QTYPE == 4
  PlaneSource<16> header;
#else
  PlaneSource<64> high;
  PlaneSource<16> scales;
  PlaneSource<2> d;
#endif
  DEV Weights(const Planes& w, int first_tile, int rows, int blocks, int unit, int tid)
      : Weights(w, (i64)first_tile * blocks + unit, blocks, (rows + 15) / 16 - first_tile, tid) {}
  DEV Weights(const Planes& w, i64 first, int blocks, int tiles, int tid)
      : quants(w.p0, first, blocks, tiles,
               chunk_place(tid >> 6 & 1, tid & 3, tid >> 5 & 1, tid >> 2 & 7), tid),
#if QTYPE == 4
        header(w.p1, first, blocks, tiles, 2048 + 16 * (tid & 15), tid) {}
  DEV void fetch(u32 to) { quants.fetch(to), header.fetch(to); }
#else
        high(w.p1, first, blocks, tiles,
             2048 + (tid >> 5 & 1) * 512 + (tid & 3) * 128 + (tid >> 2 & 7) * 16, tid),
        scales(w.p2, first, blocks, tiles, 3072 + 16 * (tid & 15), tid),
        d(w.p3, first, blocks, tiles, 3328 + 16 * (tid & 1), tid) {}
  DEV void fetch(u32 to) { quants.fetch(to), high.fetch(to), scales.fetch(to), d.fetch(to); }
#endif
};
#endif
DEV void fetch_tokens(const u8* image, u32 to, int tid) {  // image: the thread's first chunk
#pragma unroll
  for (int i = 0; i < X_BYTES / 16; i += THREADS)
    if (X_BYTES / 16 % THREADS == 0 || i + tid < X_BYTES / 16)
      copy16(to + W_BYTES + 16 * tid + 16 * i, image + 16 * i);
}

// ---- tables: factors (group, tile, row of 8, half), and for Q4_K minima (tile, lane, half) as two
// fp16 and -32 dmin (tile, row of 8, half)
DEV void make_tables(u32 unit, u32 table, int tid) {
  const int r = tid >> 1, part = tid & 1, tile = r >> 4, half = r >> 3 & 1, g = r & 7;
  const u32 slot = unit + tile * SLOT, to = table + tile * 64 + g * 8 + half * 4;
#if QTYPE == 4
  const uint4 header = load_shared<uint4>(slot + 2048 + 16 * (r & 15));
  const u32 shift = part ? 2 : 0, mask = part ? 0x30303030u : 0x3f3f3f3fu;
  const u32 high = part ? 0x0f0f0f0fu : 0u;
  const u32 sc = ((header.y >> shift) & mask) | (header.w & high);
  const u32 mn = ((header.z >> shift) & mask) | ((header.w >> 4) & high);
  const float d = half_to_float(header.x & 0xffff), d16 = d * 0.0625f;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    stsf(to + (4 * part + k) * ROWS * 4, (k & 1 ? d16 : d) * (float)(sc >> 8 * k & 0xff));
#pragma unroll
  for (int k = 0; k < 2; ++k)
    store_shared<u32>(table + FACTOR_BYTES + (tile * 32 + 4 * g + 2 * part + k) * 8 + 4 * half,
         add_fp16x2(byte_pair(mn >> 16 * k, 0) & 0xffff | byte_pair(mn >> 16 * k, 1) << 16, 0xe400e400u));
  if (part == 0)
    stsf(table + FACTOR_BYTES + ROWS * 16 + tile * 64 + g * 8 + half * 4,
         -32.f * half_to_float(header.x >> 16));
#else
  const uint2 scales = load_shared<uint2>(slot + 3072 + 16 * (r & 15) + 8 * part);
  const float d = half_to_float(load_shared<u16>(slot + 3328 + 2 * (r & 15)));
#pragma unroll
  for (int k = 0; k < 8; ++k)
    stsf(to + (8 * part + k) * ROWS * 4,
         d * (float)(signed char)((k < 4 ? scales.x : scales.y) >> 8 * (k & 3)));
#endif
}

// ---- one unit
struct Lane {
  u32 w, x, d, means, factors, least;  // where a lane reads, from the start of a stage or a table
};
struct Scaled {  // d_x of a lane's two tokens, and -1.5 * 2^23 times those
  float2 d, off;
  DEV Scaled(u32 at) : d(ldsf2(at)) { off = make_float2(d.x * -12582912.f, d.y * -12582912.f); }
};
DEV void add(float (&sum)[4], const int (&c)[4], const Scaled& x, float2 factor) {
  sum[0] = fmaf(fmaf(__int_as_float(c[0]), x.d.x, x.off.x), factor.x, sum[0]);
  sum[1] = fmaf(fmaf(__int_as_float(c[1]), x.d.y, x.off.y), factor.x, sum[1]);
  sum[2] = fmaf(fmaf(__int_as_float(c[2]), x.d.x, x.off.x), factor.y, sum[2]);
  sum[3] = fmaf(fmaf(__int_as_float(c[3]), x.d.y, x.off.y), factor.y, sum[3]);
}
#if QTYPE == 4
DEV void multiply(float (&sum)[MT][4][4], u32 stage, u32 table, const Lane& at) {
#pragma unroll
  for (int nt = 0; nt < 4; ++nt) {
    const uint2 means = load_shared<uint2>(stage + at.means + nt * 256);
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const uint2 mins = load_shared<uint2>(table + at.least + i * 256);
      const float2 dmin = ldsf2(table + FACTOR_BYTES + ROWS * 16 + at.factors + i * 64);
      float least[4] = {};
      mma(least, mins.x, mins.y, mins.x, mins.y, means.x, means.y);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        sum[i][nt][c] = fmaf(c < 2 ? dmin.x : dmin.y, least[c], sum[i][nt][c]);
    }
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    u32 raw[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k)  // rows g, g + 8; then their second pieces
        raw[i][k] = load_shared<u32>(stage + at.w + i * SLOT + (k & 1) * 1024 + p * 256 + (k >> 1) * 128);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int j = 2 * p + high;
      const u32 mask = high ? 0xf0f0f0f0u : 0x0f0f0f0fu;
      float2 factor[MT];
      u32 a[MT][4];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        factor[i] = ldsf2(table + at.factors + j * ROWS * 4 + i * 64);
#pragma unroll
        for (int k = 0; k < 4; ++k) a[i][k] = raw[i][k] & mask;
      }
#pragma unroll
      for (int nt = 0; nt < 4; ++nt) {
        const uint2 b = load_shared<uint2>(stage + at.x + (j * TOKENS + nt * 8) * 32);
        const Scaled x(stage + at.d + (j * TOKENS + nt * 8) * 4);
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          int c[4];
          product(c, a[i], b);
          add(sum[i][nt], c, x, factor[i]);
        }
      }
    }
  }
}
#else
DEV void multiply(float (&sum)[MT][4][4], u32 stage, u32 table, const Lane& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    u32 high[MT][4];  // (e, half)
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        high[i][k] = load_shared<u32>(stage + at.w + i * SLOT + 2048 + (k & 1) * 512 +
                                      (2 * h + (k >> 1)) * 128);
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      u32 low[MT][4];
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          low[i][k] = load_shared<u32>(stage + at.w + i * SLOT + (k & 1) * 1024 +
                                       (2 * h + (k >> 1)) * 256 + piece * 128);
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        const int quarter = 2 * up + piece, j = 4 * h + quarter;
        u32 a[MT][2][2];  // (e, half)
        float2 factor[MT][2];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const u32 bits = quarter == 0   ? high[i][k] << 4
                             : quarter == 1 ? high[i][k] << 2
                             : quarter == 2 ? high[i][k]
                                            : high[i][k] >> 2;
            const u32 q = (low[i][k] >> 4 * up & 0x0f0f0f0fu) | (bits & 0x30303030u);
            a[i][k >> 1][k & 1] = (q + 0x60606060u) ^ 0x80808080u;  // q - 32 of each byte
            if (k < 2) factor[i][k] = ldsf2(table + at.factors + (2 * j + k) * ROWS * 4 + i * 64);
          }
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
          const uint2 b = load_shared<uint2>(stage + at.x + (j * TOKENS + nt * 8) * 32);
          const Scaled x(stage + at.d + (j * TOKENS + nt * 8) * 4);
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            int c[4], e[4];
            product(c, a[i][0], b.x), product(e, a[i][1], b.y);
            add(sum[i][nt], c, x, factor[i][0]), add(sum[i][nt], e, x, factor[i][1]);
          }
        }
      }
    }
  }
}
#endif

DEV void store(void* out, i64 at, float y) {
#if OUT == 0
  ((u16*)out)[at] = float_to_half(y);
#elif OUT == 1
  ((u16*)out)[at] = float_to_bf16(y);
#else
  ((float*)out)[at] = y;
#endif
}

// Grid: tiles of tokens, of rows, parts of a row's sum.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) packed_mmq(
    Planes planes,    // of W
    const u8* image,  // of x, (tiles of tokens, blocks, X_BYTES)
    void* out,        // (m, >= rows), out_stride elements from row to row
    float* partial,   // (parts, m, rows of all CTAs) if there are several parts
    u32* tickets,     // (tiles of tokens * of rows) zeros, and zeros again at the end, likewise
    int rows, int blocks, int m, int out_stride) {
  SHARED_MEMORY(memory);
  __shared__ u32 ticket;
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  const int parts = gridDim.z, part = blockIdx.z;
  const int first = (int)((i64)blocks * part / parts);
  const int count = (int)((i64)blocks * (part + 1) / parts) - first;
  const u32 ring = shared_address(memory), tables = ring + STAGES * STAGE_BYTES;
  Weights weights(planes, blockIdx.y * TILES, rows, blocks, first, tid);
  image += ((i64)blockIdx.x * blocks + first) * X_BYTES + 16 * tid;
  launch_dependents();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)
    if (i < count) weights.fetch(ring + i * STAGE_BYTES);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < count) fetch_tokens(image, ring + i * STAGE_BYTES, tid);
    image += X_BYTES;
    copy_commit();
  }
  const int g = lane >> 2, t = lane & 3;
  const int column = warp % (TOKENS / 32), tile = warp / (TOKENS / 32) * MT;
  Lane at;
  at.w = tile * SLOT + g * 16 + t * 4;
  at.x = W_BYTES + column * 1024 + g * 32 + t * 8;
  at.d = W_BYTES + TOKENS * 256 + column * 128 + t * 8;
  at.means = W_BYTES + TOKENS * 288 + column * 1024 + g * 32 + t * 8;
  at.factors = tile * 64 + g * 8;
  at.least = FACTOR_BYTES + tile * 256 + lane * 8;
  float sum[MT][4][4] = {};
#if STAGES > 2
  copy_wait<STAGES - 2>();
  __syncthreads();
  make_tables(ring, tables, tid);
#endif
  int slot = 0, table = 0;
  for (int i = 0; i < count; ++i) {
    // Unit i - 1 is done with, and so is its table; unit i is there, of more stages also i + 1.
    copy_wait<(STAGES > 2 ? STAGES - 3 : 0)>();
    __syncthreads();
    const int next = slot + 1 == STAGES ? 0 : slot + 1;
    const int free = slot == 0 ? STAGES - 1 : slot - 1;
    if (i + STAGES - 1 < count) {
      weights.fetch(ring + free * STAGE_BYTES);
      fetch_tokens(image, ring + free * STAGE_BYTES, tid);
      image += X_BYTES;
    }
    copy_commit();
#if STAGES > 2
    if (i + 1 < count)
      make_tables(ring + next * STAGE_BYTES, tables + (table ^ 1) * TABLE_BYTES, tid);
#else
    make_tables(ring + slot * STAGE_BYTES, tables, tid);
    __syncthreads();
#endif
    multiply(sum, ring + slot * STAGE_BYTES, tables + table * TABLE_BYTES, at);
    slot = next;
#if STAGES > 2
    table ^= 1;
#endif
  }

  // Through shared memory, so that rows of a token are written together.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int nt = 0; nt < 4; ++nt)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int n = column * 32 + nt * 8 + 2 * t + (c & 1);
        const int r = (tile + i) * 16 + g + 8 * (c >> 1);
        stsf(ring + 4 * (n * SUM_STRIDE + r), sum[i][nt][c]);
      }
  __syncthreads();
  const int first_token = blockIdx.x * TOKENS, here = min(m - first_token, TOKENS);
  const int first_row = blockIdx.y * ROWS;
  if (parts == 1) {
    for (int i = tid; i < here * ROWS; i += THREADS) {
      const int n = i / ROWS, r = i % ROWS;
      const float y = load_shared<float>(ring + 4 * (n * SUM_STRIDE + r));
      if (first_row + r < rows) store(out, (i64)(first_token + n) * out_stride + first_row + r, y);
    }
    return;
  }
  // Four rows at a time, rows of `partial` as many as all CTAs have.
  const i64 stride = (i64)gridDim.y * ROWS / 4;
  float4* sums = (float4*)partial + first_token * stride + first_row / 4;
  for (int i = tid; i < here * (ROWS / 4); i += THREADS) {
    const int n = i / (ROWS / 4), r = i % (ROWS / 4);
    const uint4 y = load_shared<uint4>(ring + 4 * n * SUM_STRIDE + 16 * r);
    __stcg(sums + ((i64)part * m + n) * stride + r,
           make_float4(__uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z),
                       __uint_as_float(y.w)));
  }
  // The order of the threads' stores and the ticket: fence, barrier, ticket, barrier, fence.
  __threadfence();
  __syncthreads();
  if (tid == 0) ticket = atomicInc(tickets + blockIdx.y * gridDim.x + blockIdx.x, parts - 1);
  __syncthreads();
  if (ticket != parts - 1) return;
  __threadfence();
  for (int first_i = tid; first_i < here * (ROWS / 4); first_i += 4 * THREADS) {
    float4 y[4] = {};  // several loads in flight: one by one 2.6 us a megabyte
#pragma unroll 2
    for (int s = 0; s < parts; ++s)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int n = min((first_i + k * THREADS) / (ROWS / 4), here - 1);
        const float4 v = __ldcg(sums + ((i64)s * m + n) * stride + first_i % (ROWS / 4));
        y[k].x += v.x, y[k].y += v.y, y[k].z += v.z, y[k].w += v.w;
      }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int n = (first_i + k * THREADS) / (ROWS / 4), row = first_row + first_i % (ROWS / 4) * 4;
      const i64 to = (i64)(first_token + n) * out_stride + row;
      if (n >= here) break;
      if (row < rows) store(out, to, y[k].x);
      if (row + 1 < rows) store(out, to + 1, y[k].y);
      if (row + 2 < rows) store(out, to + 2, y[k].z);
      if (row + 3 < rows) store(out, to + 3, y[k].w);
    }
  }
}
