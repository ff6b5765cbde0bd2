// packed_gemm: y = x W^T for some dozens of tokens and a K-quantised W. Weights are decoded to fp16
// in registers and multiplied by wgmma, 64 rows x TOKENS x 16 columns each. Layouts: at the
// parameters. Macros: QTYPE (4: Q4_K, 6: Q6_K), TOKENS (32, 64, 96 or 128), WGS (warpgroups of 64
// rows in a CTA), STAGES (units in flight), SPLITS (CTAs of a cluster that share a row's sum), OUT
// (0 fp16, 1 bf16, 2 float32).
//
// A producer warp copies, for each unit of 256 columns, the planes of its rows' tiles (quant.py)
// and the image of the tokens (packed_image.cu) into a ring. Warp w of the consumers owns tile w:
// the fragment of quant.py for m16n8k16 is also that of a warp in wgmma. A weight is
//   16 w = (16 d * scale) * q - 16 dmin * min   (Q4_K),   (16 d * scale) * (q - 32)   (Q6_K)
// with the factors rounded to fp16 and one rounding after: 16 keeps the factors of real files out
// of the subnormals, and |w| < 4094. Decoding of four steps overlaps the products of the four
// before.
//
// The order of a row's sum depends on SPLITS, so on the launch: rows are not invariant here, but a
// launch gives the same bits every time. The CTAs of a cluster add up through shared memory.
#include "include/hopper.cuh"
#include "packed/packed_gemm_ptx.cuh"

#if QTYPE == 4
#define TILE_BYTES 2304
#else
#define TILE_BYTES 3360
#endif
#define ROWS (64 * WGS)
#define X_BYTES (TOKENS * 512)
#define W_BYTES (4 * WGS * TILE_BYTES)
#define STAGE_BYTES ((X_BYTES + W_BYTES + 1023) / 1024 * 1024)
#define SUM_STRIDE (ROWS + 4)  // floats from token to token: no bank conflicts

DEV void store(void* out, i64 at, float y) {
#if OUT == 0
  ((u16*)out)[at] = float_to_half(y);
#elif OUT == 1
  ((u16*)out)[at] = float_to_bf16(y);
#else
  ((float*)out)[at] = y;
#endif
}

// ---- decoding: steps 4 q .. 4 q + 3 of a unit to fragments, a[4 i .. 4 i + 3] of step i
#define SIXTEEN 0x4c004c00u  // 16, twice
#if QTYPE == 4
struct Row {  // factors of a row's two groups: value = q * scale + least
  u32 low, high, low_least, high_least;
  DEV Row(const uint4& header, int t) {
    // Six-bit fields of the four groups of the block's half; see ops/dequantize_torch.py.
    const bool second = t >= 2;
    const u32 shift = second ? 2 : 0, mask = second ? 0x30303030u : 0x3f3f3f3fu;
    const u32 rest = second ? 0x0f0f0f0fu : 0u;
    const u32 sc = ((header.y >> shift) & mask) | (header.w & rest);
    const u32 mn = ((header.z >> shift) & mask) | ((header.w >> 4) & rest);
    const u32 d = mul2(__byte_perm(header.x, 0, 0x1010), SIXTEEN);
    const u32 dmin = mul2(__byte_perm(header.x, 0, 0x3232), SIXTEEN ^ 0x80008000u);
    const u32 k = 2 * (t & 1), one = 0xe400e400u;  // - 1024
    low = mul2(add2(byte_pair(sc, k), one), d);
    high = mul2(fma2(byte_pair(sc, k + 1), 0x2c002c00u, 0xd400d400u), d);  // / 16
    low_least = mul2(add2(byte_pair(mn, k), one), dmin);
    high_least = mul2(add2(byte_pair(mn, k + 1), one), dmin);
  }
};
DEV u32 low_weights(u32 bytes, const Row& row) {
  return fma2(add2((bytes & 0x000f000fu) | 0x64006400u, 0xe400e400u), row.low, row.low_least);
}
DEV u32 high_weights(u32 bytes, const Row& row) {
  return fma2(add2((bytes & 0x00f000f0u) | 0x64006400u, 0xe400e400u), row.high, row.high_least);
}
struct Unit {
  Row r0, r1;
  uint4 w0[2], w1[2];
  DEV Unit(u32 slot, int lane)
      : r0(lds16(slot + 2048 + 16 * (lane >> 2)), lane & 3),
        r1(lds16(slot + 2176 + 16 * (lane >> 2)), lane & 3) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      w0[j] = lds16(slot + 512 * j + 16 * lane), w1[j] = lds16(slot + 1024 + 512 * j + 16 * lane);
    }
  }
  DEV void decode(u32 (&a)[16], int q) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 x0 = word(w0[q >> 1], 2 * (q & 1) + i), x1 = word(w1[q >> 1], 2 * (q & 1) + i);
      a[8 * i] = low_weights(x0, r0), a[8 * i + 1] = low_weights(x1, r1);
      a[8 * i + 2] = low_weights(x0 >> 8, r0), a[8 * i + 3] = low_weights(x1 >> 8, r1);
      a[8 * i + 4] = high_weights(x0, r0), a[8 * i + 5] = high_weights(x1, r1);
      a[8 * i + 6] = high_weights(x0 >> 8, r0), a[8 * i + 7] = high_weights(x1 >> 8, r1);
    }
  }
};
#else
struct Row {  // factors of a row's four groups: value = (q - 32) * scale, / 16 for high nibbles
  u32 scale[4];
  DEV Row(u32 slot, int row, int t) {
    const uint2 half = lds8(slot + 3072 + 16 * row + 8 * (t >> 1));
    const u32 bits = lds2(slot + 3328 + 2 * row);
    const u32 d = mul2(bits | bits << 16, SIXTEEN);
    const u32 bytes = __byte_perm(half.x, half.y, t & 1 ? 0x7531 : 0x6420) ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 v = byte_pair(bytes, i);  // 1152 + scale
      scale[i] = mul2(i < 2 ? add2(v, 0xe480e480u) : fma2(v, 0x2c002c00u, 0xd480d480u), d);
    }
  }
};
// Weights i of four bytes, even or odd ones.
DEV u32 weights(u32 ql, u32 qh, int i, int odd, const Row& row) {
  const u32 low = odd ? ql >> 8 : ql;
  const int shift = 4 - 2 * (i & 1) - 8 * odd;  // 2 bits to place 4 (low nibbles) or 8 (high)
  const u32 high = shift > 0 ? qh << shift : qh >> -shift;
  const u32 q = i < 2 ? (low & 0x000f000fu) | (high & 0x00300030u)
                      : (low & 0x00f000f0u) | (high & 0x03000300u);
  // 1024 + q or 1024 + 16 q: less 1056, or 1536.
  return mul2(add2(q | 0x64006400u, i < 2 ? 0xe420e420u : 0xe600e600u), row.scale[i]);
}
struct Unit {
  Row r0, r1;
  uint4 l0, m0, h0, l1, m1, h1;
  DEV Unit(u32 slot, int lane)
      : r0(slot, lane >> 2, lane & 3), r1(slot, (lane >> 2) + 8, lane & 3),
        l0(lds16(slot + 16 * lane)), m0(lds16(slot + 512 + 16 * lane)),
        h0(lds16(slot + 2048 + 16 * lane)), l1(lds16(slot + 1024 + 16 * lane)),
        m1(lds16(slot + 1536 + 16 * lane)), h1(lds16(slot + 2560 + 16 * lane)) {}
  DEV void decode(u32 (&a)[16], int q) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 x0 = word(i & 1 ? m0 : l0, q), x1 = word(i & 1 ? m1 : l1, q);
      const u32 y0 = word(h0, q), y1 = word(h1, q);
      a[4 * i] = weights(x0, y0, i, 0, r0), a[4 * i + 1] = weights(x1, y1, i, 0, r1);
      a[4 * i + 2] = weights(x0, y0, i, 1, r0), a[4 * i + 3] = weights(x1, y1, i, 1, r1);
    }
  }
};
#endif

// ---- the two roles
struct Work {  // of a CTA
  int first_tile, tiles, first, count, blocks;  // units first .. first + count of a row's blocks
};
DEV void fetch_weights(const Planes& w, const Work& work, int i, u32 slot, u32 barrier, int lane) {
  if (lane >= 4 * WGS) return;
  const i64 tile = min(work.first_tile + lane, work.tiles - 1);
  const i64 unit = tile * work.blocks + work.first + i;
  const u32 to = slot + X_BYTES + lane * TILE_BYTES;
  copy_bulk(to, w.p0 + unit * 2048, 2048, barrier);
#if QTYPE == 4
  copy_bulk(to + 2048, w.p1 + unit * 256, 256, barrier);
#else
  copy_bulk(to + 2048, w.p1 + unit * 1024, 1024, barrier);
  copy_bulk(to + 3072, w.p2 + unit * 256, 256, barrier);
  copy_bulk(to + 3328, w.p3 + unit * 32, 32, barrier);
#endif
}
DEV void produce(const Planes& w, const u8* image, const Work& work, u32 ring, u32 full, int lane) {
  const u32 empty = full + 8 * STAGES;
  const int early = min(STAGES, work.count);
  image += ((i64)blockIdx.z * work.blocks + work.first) * X_BYTES;
  for (int i = 0; i < early; ++i) {
    if (lane == 0) mbar_expect(full + 8 * i, W_BYTES + X_BYTES);
    __syncwarp();
    fetch_weights(w, work, i, ring + i * STAGE_BYTES, full + 8 * i, lane);
  }
  wait_for_inputs();
  if (lane == 0)
    for (int i = 0; i < early; ++i)
      copy_bulk(ring + i * STAGE_BYTES, image + (i64)i * X_BYTES, X_BYTES, full + 8 * i);
  for (int i = early; i < work.count; ++i) {
    const int slot = i % STAGES;
    mbar_wait(empty + 8 * slot, (i / STAGES - 1) & 1);
    if (lane == 0) {
      mbar_expect(full + 8 * slot, W_BYTES + X_BYTES);
      copy_bulk(ring + slot * STAGE_BYTES, image + (i64)i * X_BYTES, X_BYTES, full + 8 * slot);
    }
    __syncwarp();
    fetch_weights(w, work, i, ring + slot * STAGE_BYTES, full + 8 * slot, lane);
  }
}
// Enqueue the products of four steps; q is their quarter of the unit at `tokens`.
DEV void multiply(float (&sum)[TOKENS / 2], const u32 (&a)[16], u32 tokens, int q) {
  wg_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) product(sum, a + 4 * s, tokens + (q * TOKENS * 128 + s * 32) / 16);
  wg_commit();
}
DEV void consume(float (&sum)[TOKENS / 2], int count, u32 ring, u32 full, int warp, int lane) {
  const u32 empty = full + 8 * STAGES, mine = ring + X_BYTES + warp * TILE_BYTES;
  int slot = 0, phase = 0;
  u32 a[16], b[16];  // written while the products before read the other
  mbar_wait(full, 0);
  Unit unit(mine, lane);
  unit.decode(a, 0);
  for (int i = 0; i < count; ++i) {
    const u32 tokens = uniform(mdesc(ring + slot * STAGE_BYTES, 0));
    multiply(sum, a, tokens, 0);
    unit.decode(b, 1);
    multiply(sum, b, tokens, 1);
    wg_wait<1>();
    unit.decode(a, 2);
    multiply(sum, a, tokens, 2);
    wg_wait<1>();
    unit.decode(b, 3);
    multiply(sum, b, tokens, 3);
    const int next = slot + 1 == STAGES ? 0 : slot + 1;
    phase ^= next == 0;
    if (i + 1 < count) {  // the next unit's first steps, before the products end
      mbar_wait(full + 8 * next, phase);
      unit = Unit(mine + next * STAGE_BYTES, lane);
      wg_wait<1>();
      unit.decode(a, 0);
    }
    wg_wait<0>();
    pin(sum);
    if (lane == 0) mbar_arrive(empty + 8 * slot);
    slot = next;
  }
}

extern "C" __global__ void __cluster_dims__(1, SPLITS, 1) __launch_bounds__(128 * WGS + 32, 1)
    packed_gemm(Planes planes,    // of W
             const u8* image,  // of the tokens
             void* out,        // (m, >= rows), out_stride elements from row to row
             int rows, int blocks, int m, int out_stride) {
  SHARED_MEMORY(memory);
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int tid = threadIdx.x, lane = tid & 31, warp = uni(tid >> 5);
  const int rank = blockIdx.y;
  const u32 ring = smem_u32(memory), full = smem_u32(barriers);
  launch_next();
  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i)
      mbar_init(full + 8 * i, 1), mbar_init(full + 8 * (STAGES + i), 4 * WGS);
    mbar_fence();
  }
  __syncthreads();
  const Work work = {(int)blockIdx.x * 4 * WGS, (rows + 15) / 16, blocks * rank / SPLITS,
                     blocks * (rank + 1) / SPLITS - blocks * rank / SPLITS, blocks};
  const int first_token = blockIdx.z * TOKENS, here = min(m - first_token, TOKENS);
  if (warp == 4 * WGS) {
    produce(planes, image, work, ring, full, lane);
  } else {
    float sum[TOKENS / 2] = {};
    consume(sum, uni(work.count), ring, full, warp, lane);
    bar_sync(1, 128 * WGS);  // the ring is free
    const int row = 16 * warp + (lane >> 2);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int n = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
      sts(ring + 4 * (n * SUM_STRIDE + row + 8 * (i / 2 & 1)), sum[i]);
    }
  }
#if SPLITS > 1
  __syncwarp();
  cluster_sync();
#else
  __syncthreads();
#endif
  // Of a cluster, each CTA adds up every SPLITS-th token.
  for (int i = tid; i < (here - rank + SPLITS - 1) / SPLITS * ROWS; i += 128 * WGS + 32) {
    const int n = i / ROWS * SPLITS + rank, r = i % ROWS, row = blockIdx.x * ROWS + r;
    float y = 0;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) y += load_of(ring + 4 * (n * SUM_STRIDE + r), s);
    if (row < rows) store(out, (i64)(first_token + n) * out_stride + row, y * 0.0625f);
  }
#if SPLITS > 1
  cluster_sync();  // others read this CTA's sums
#endif
}
