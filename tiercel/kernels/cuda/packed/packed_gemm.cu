// packed_gemm: y = x W^T for some dozens of tokens and a K-quantised W. Weights are decoded to fp16
// in registers and multiplied by wgmma, 64 rows x TOKENS x 16 columns each. Layouts: at the
// parameters. Macros: QTYPE (UnitType.code of packed_types.py), TOKENS (32, 64, 96 or 128), WGS
// (warpgroups of 64 rows in a CTA), STAGES (units in flight), SPLITS (CTAs of a cluster that share a
// row's sum), STEPS (products between two waits), OUT (0 fp16, 1 bf16, 2 float32), GATED (rows are of gate and of up,
// results act(gate) * up), IS_GELU, NEXT (order of columns of the image that is then written), IN_STEP (layout of W);
// RESIDUAL, SECOND and SCALED: packed_gemm_norm.cuh; HEADS (0: none) and HAS_NORMS: packed_gemm_heads.cuh.
//
// A producer warp copies, for each unit of 256 columns, the planes of its rows' tiles (quant.py)
// and the image of the tokens (packed_image.cu) into a ring. Warp w of the consumers owns tile w:
// the fragment of quant.py for m16n8k16 is also that of a warp in wgmma. A weight is
//   2**e w = (2**e d * scale) * q - 2**e dmin * min   (Q4_K),   (2**e d * scale) * (q - 32)   (Q6_K)
// with the factors rounded to fp16 and one rounding after. q is a subnormal fp16, which needs no
// conversion; e is a matrix's, such that its largest factor is in range (`weight_exponent`).
// A batch is decoded while the products of the one before run.
//
// The order of a row's sum depends on SPLITS, so on the launch: rows are not invariant here, but a
// launch gives the same bits every time. The CTAs of a cluster add up through shared memory.
#include "include/hopper.cuh"
#include "packed/packed_gemm_masks.cuh"
#include "packed/packed_gemm_ptx.cuh"
#if QTYPE == 4 || QTYPE == 6
#include "packed/packed_gemm_units.cuh"
#else
#include "packed/packed_gemm_units32.cuh"
#endif
#include "packed/packed_gemm_norm.cuh"
#if HEADS
#include "packed/packed_gemm_heads.cuh"
#endif

#define ROWS (64 * WGS)
#define X_BYTES (TOKENS * 512)
#define W_BYTES (4 * WGS * TILE_BYTES)
#define STAGE_BYTES ((X_BYTES + W_BYTES + 1023) / 1024 * 1024)
#define HALF (ROWS / 2)
#define SUM_STRIDE (ROWS + 4)  // floats from token to token: no bank conflicts
constexpr int MOST_EARLY = HEADS ? 4 : 6;  // turns of what is read for results in registers
constexpr int BATCHES = 16 / STEPS, DEPTH = 2;  // batches of operands in registers
static_assert(TOKENS * SUM_STRIDE * 4 <= STAGES * STAGE_BYTES, "sums take the place of the ring");
static_assert(BATCHES % DEPTH == 0, "a batch's registers are known");

// The sums of four rows and a token over the CTAs of a cluster; `scale` is that of weights, inverted.
struct Four { float y[4]; };
DEV Four sums_at(u32 ring, int n, int r, float scale) {
  float4 part[SPLITS];
#pragma unroll
  for (int s = 0; s < SPLITS; ++s)
    part[s] = load_remote<float4>(ring + 4 * (n * SUM_STRIDE + r), s);
  Four sum = {};
#pragma unroll
  for (int s = 0; s < SPLITS; ++s)
    sum.y[0] += part[s].x, sum.y[1] += part[s].y, sum.y[2] += part[s].z, sum.y[3] += part[s].w;
#pragma unroll
  for (int e = 0; e < 4; ++e) sum.y[e] *= scale;
  return sum;
}
#if GATED
DEV float gated(float gate, float up) {
#if IS_GELU
  return gate / (1 + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate))) * up;
#else
  return gate / (1 + __expf(-gate)) * up;
#endif
}
// act(gate) * up of four columns of a token, to the image for the next product.
DEV void store_gated(void* image, const Four& gate, const Four& up, int n, int column, int units) {
  u16 h[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) h[e] = float_to_half(gated(gate.y[e], up.y[e]));
  store_four<NEXT>(image, h, n, column, units);
}
#elif !RESIDUAL && !HEADS
#if OUT == 2
typedef float Element;
DEV float rounded(float y) { return y; }
#else
typedef u16 Element;
DEV u16 rounded(float y) { return OUT == 0 ? float_to_half(y) : float_to_bf16(y); }
#endif
// The first `count` of four neighbours; together where they are `aligned`.
DEV void store(void* out, i64 at, const Four& sum, int count, bool aligned) {
  Element v[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = rounded(sum.y[e]);
  Element* to = (Element*)out + at;
  if (aligned && count >= 4) {
#if OUT == 2
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
#else
    *(uint2*)to = make_uint2(v[0] | (u32)v[1] << 16, v[2] | (u32)v[3] << 16);
#endif
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < count) to[e] = v[e];
  }
}
#endif

// ---- the two roles
constexpr u32 COPIERS = IN_STEP ? 32 : 0;  // threads that arrive when their copies have
constexpr u32 EXPECTED = X_BYTES + (IN_STEP ? 0 : W_BYTES);
struct Work {  // of a CTA
  int first_tile, tiles, first, count, blocks;  // units first .. first + count of a row's blocks
};
// Of the matrix, tile `own` of the CTA.
DEV int tile_of(const Work& work, int own) {
#if GATED  // half of the tiles are of gate, half of up
  const int second = own >= 2 * WGS, half = work.tiles / 2;
  return second * half + min(work.first_tile + own - second * 2 * WGS, half - 1);
#else
  return min(work.first_tile + own, work.tiles - 1);
#endif
}
#if IN_STEP
using Weights = StepRows;
DEV void fetch_weights(const StepRows& w, const Work& work, int i, u32 slot, u32 barrier, int lane) {
#pragma unroll 2
  for (int own = 0; own < 4 * WGS; ++own)
    copy_unit<QTYPE == 6>(w, tile_of(work, own), work.first + i, slot + X_BYTES + own * TILE_BYTES,
                          lane);
  mbar_arrive_copied(barrier);
}
#else
using Weights = Planes;
DEV void fetch_weights(const Planes& w, const Work& work, int i, u32 slot, u32 barrier, int lane) {
  if (lane >= 4 * WGS) return;
  const i64 unit = (i64)tile_of(work, lane) * work.blocks + work.first + i;
  fetch_unit(w, unit, slot + X_BYTES + lane * TILE_BYTES, barrier);
}
#endif
// `ahead` is called with 0 before the wait, and with i when i units are multiplied; by `follow` for
// units that are multiplied later.
template <class Ahead>
DEV void produce(const Weights& w, const u8* image, const Work& work, u32 ring, u32 full, int lane,
                 const Ahead& ahead) {
  const u32 empty = full + 8 * STAGES;
  const int early = min(STAGES, work.count);
  image += ((i64)blockIdx.z * work.blocks + work.first) * X_BYTES;
  auto fill = [&](int i, int slot, bool has_image) {
    const u32 at = ring + slot * STAGE_BYTES, bar = full + 8 * slot;
    if (IN_STEP) {  // the arrival below releases what was stored, not copied
      fetch_weights(w, work, i, at, bar, lane);
      __syncwarp();
    }
    if (lane == 0) {
      mbar_expect(bar, EXPECTED);
      if (has_image) copy_bulk(at, image + (i64)i * X_BYTES, X_BYTES, bar);
    }
    if (!IN_STEP) {
      __syncwarp();
      fetch_weights(w, work, i, at, bar, lane);
    }
  };
  for (int i = 0; i < early; ++i) fill(i, i, false);
  ahead(0);
  wait_for_inputs();
  if (lane == 0)
    for (int i = 0; i < early; ++i)
      copy_bulk(ring + i * STAGE_BYTES, image + (i64)i * X_BYTES, X_BYTES, full + 8 * i);
  for (int i = early; i < work.count; ++i) {
    const int slot = i % STAGES;
    mbar_wait(empty + 8 * slot, (i / STAGES - 1) & 1);
    fill(i, slot, true);
    ahead(i + 1 - STAGES);
  }
}
#if HEADS && PREFETCH
template <class Ahead> DEV void follow(const Work& work, u32 full, const Ahead& ahead) {
  for (int unit = work.count - min(STAGES, work.count); unit < work.count - 1; ++unit) {
    mbar_wait(full + 8 * (STAGES + unit % STAGES), unit / STAGES & 1);
    ahead(unit + 1);
  }
}
#endif
// Enqueue the products of a batch of a unit.
DEV void multiply(float (&sum)[TOKENS / 2], const u32* a, u64 tokens, int batch) {
  wg_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int s = batch * STEPS + i;
    product(sum, a + 4 * i, tokens + ((s >> 2) * TOKENS * 128 + (s & 3) * 32) / 16);
  }
  wg_commit();
}
DEV void decode(u32* a, Unit& unit, int batch, const Masks& masks) {
#pragma unroll
  for (int p = 0; p < STEPS / 2; ++p) unit.decode(a + 8 * p, batch * STEPS / 2 + p, masks);
}
// All batches of a unit but the last; each decodes the next one. `done` is the barrier of the slot
// before. A loop of this length is not unrolled for every type.
template <int B>
DEV void multiply_unit(float (&sum)[TOKENS / 2], u32 (&a)[DEPTH][4 * STEPS], Unit& unit, u64 tokens,
                       const Masks& masks, u32 done, int lane) {
  if constexpr (B < BATCHES - 1) {
    multiply(sum, a[B % DEPTH], tokens, B);
    wg_wait<DEPTH - 1>();
    if (B == DEPTH - 1 && done && lane == 0) mbar_arrive(done);  // that unit is multiplied
    decode(a[(B + 1) % DEPTH], unit, B + 1, masks);
    multiply_unit<B + 1>(sum, a, unit, tokens, masks, done, lane);
  }
}
DEV void consume(float (&sum)[TOKENS / 2], int count, u32 ring, u32 full, int warp, int lane,
                 int exponent) {
  const u32 empty = full + 8 * STAGES, mine = ring + X_BYTES + warp * TILE_BYTES;
  const Masks masks(exponent);
  int slot = 0, phase = 0, before = -1;
  u32 a[DEPTH][4 * STEPS];  // written while the products before read the others
  mbar_wait(full, 0);
  Unit unit(mine, lane, masks);
  decode(a[0], unit, 0, masks);
  for (int i = 0; i < count; ++i) {
    const u64 tokens = (u64)DESC_HI << 32 | uniform(mdesc(ring + slot * STAGE_BYTES, 0));
    const int next = slot + 1 == STAGES ? 0 : slot + 1;
    phase ^= next == 0;
    const u32 done = before < 0 ? 0 : empty + 8 * before;
    multiply_unit<0>(sum, a, unit, tokens, masks, done, lane);
    before = slot;
    multiply(sum, a[DEPTH - 1], tokens, BATCHES - 1);
    if (i + 1 < count) {  // the next unit's first steps, before the products end
      mbar_wait(full + 8 * next, phase);
      unit = Unit(mine + next * STAGE_BYTES, lane, masks);
    }
    wg_wait<DEPTH - 1>();
    decode(a[0], unit, 0, masks);
    slot = next;
  }
  wg_wait<0>();
  pin(sum);
}

extern "C" __global__ void __cluster_dims__(1, SPLITS, 1) __launch_bounds__(128 * WGS + 32, 1)
    packed_gemm(Planes planes,    // of W
             const u8* image,  // of the tokens
             void* out,        // (m, >= rows), out_stride elements from row to row
             int rows, int blocks, int m, int out_stride,
             int exponent,  // weights are multiplied times 2**exponent
             RowNorm norm
#if HEADS
             , HeadWrite heads  // out: (m, heads of queries * HEADS)
#if PREFETCH
             , KeyPrefetch keys
#endif
#endif
             ) {
  ALIGNED_MEMORY(memory);
  const int tid = threadIdx.x, lane = tid & 31, warp = uni(tid >> 5);
  const int rank = blockIdx.y, block = blockIdx.x;
  const u32 ring = shared_address(memory), full = ring + STAGES * STAGE_BYTES;
#if SCALED
  const u32 factors = full + 16 * STAGES;
#endif
  launch_dependents();
  if (tid == 0) {
    for (int i = 0; i < STAGES; ++i)
      mbar_init(full + 8 * i, 1 + COPIERS), mbar_init(full + 8 * (STAGES + i), 4 * WGS);
    mbar_fence();
  }
  __syncthreads();
  const Work work = {block * (GATED ? 2 : 4) * WGS, (rows + 15) / 16, blocks * rank / SPLITS,
                     blocks * (rank + 1) / SPLITS - blocks * rank / SPLITS, blocks};
  const int first_token = blockIdx.z * TOKENS, here = min(m - first_token, TOKENS);
  if (warp == 4 * WGS) {
#if HEADS && PREFETCH
    const int ctas = gridDim.x * SPLITS, cta = block * SPLITS + rank;
    const Piece piece = find_piece(heads, keys, cta + lane * ctas);
    auto ahead = [&](int i) {
      if (piece.bytes && blockIdx.z == 0 && lane % work.count == i)
        prefetch_bulk(piece.at, piece.bytes);
    };
#else
    auto ahead = [](int) {};
#endif
#if IN_STEP
    produce(StepRows(planes, rows, blocks), image, work, ring, full, lane, ahead);
#else
    produce(planes, image, work, ring, full, lane, ahead);
#endif
#if SCALED
    find_factors(norm, factors, block == 0 && rank == 0, lane);
#endif
#if HEADS && PREFETCH
    follow(work, full, ahead);
#endif
  } else {
    float sum[TOKENS / 2] = {};
    consume(sum, uni(work.count), ring, full, warp, lane, exponent);
    bar_sync(1, 128 * WGS);  // the ring is free
    const int row = 16 * warp + (lane >> 2);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int n = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
      store_shared<float>(ring + 4 * (n * SUM_STRIDE + row + 8 * (i / 2 & 1)), sum[i]);
    }
  }
  const float unscale = __uint_as_float((127 - exponent) << 23);
  // Of a cluster, each CTA adds up every SPLITS-th token, a thread four rows at a time.
#if RESIDUAL || HEADS
  constexpr int FOURS = ROWS / 4, ALL = 128 * WGS + 32;
  constexpr int TURNS = ((TOKENS + SPLITS - 1) / SPLITS * FOURS + ALL - 1) / ALL;
  constexpr int EARLY = TURNS <= MOST_EARLY ? TURNS : 0;  // read while the cluster comes together
#if RESIDUAL
  Residual own[EARLY + 1];
  wait_for_inputs();
#else
  static_assert(ROWS % HEADS == 0, "a CTA has whole heads");
  HeadPlace own[EARLY + 1];
#endif
#pragma unroll
  for (int turn = 0; turn < EARLY; ++turn) {
    const int i = tid + turn * ALL, n = i / FOURS * SPLITS + rank, row = block * ROWS + i % FOURS * 4;
#if RESIDUAL
    if (n < here && row < rows) own[turn].load(norm, first_token + n, row, rows);
#else
    if (n < here && row < rows) own[turn].load(heads, first_token + n, row);
#endif
  }
#endif
#if SPLITS > 1
  __syncwarp();
  cluster_sync();
#else
  __syncthreads();
#endif
#if SCALED
  auto scale_of = [&](int n) { return unscale * load_shared<float>(factors + 4 * n); };
#else
  auto scale_of = [&](int) { return unscale; };
#endif
#if GATED
  constexpr int FOURS = HALF / 4;
  for (int i = tid; i < (TOKENS - rank + SPLITS - 1) / SPLITS * FOURS; i += 128 * WGS + 32) {
    const int n = i / FOURS * SPLITS + rank, r = i % FOURS * 4, row = block * HALF + r;
    if (row < rows / 2)
      store_gated(out, sums_at(ring, n, r, scale_of(n)), sums_at(ring, n, HALF + r, scale_of(n)), n,
                  row, rows / 512);
  }
#elif RESIDUAL || HEADS
#pragma unroll (EARLY ? EARLY : 1)
  for (int turn = 0; turn < TURNS; ++turn) {
    const int i = tid + turn * ALL, n = i / FOURS * SPLITS + rank, r = i % FOURS * 4;
    const int row = block * ROWS + r;
    const bool has = n < here && row < rows;
    auto& mine = own[EARLY ? turn : 0];
    Four sum = {};
#if RESIDUAL
    if (!EARLY && has) mine.load(norm, first_token + n, row, rows);
    if (has) sum = sums_at(ring, n, r, scale_of(n));
    add_residual(out, norm, mine, sum.y, has, n, row, rows);
#else
    if (!EARLY && has) mine.load(heads, first_token + n, row);
    if (has) sum = sums_at(ring, n, r, scale_of(n));
    write_head((u16*)out, out_stride, heads, mine, sum.y, has, first_token + n, row);
#endif
  }
#else
  constexpr int FOURS = ROWS / 4;
  const bool aligned = ((u64)out | (u64)out_stride * sizeof(Element)) % (4 * sizeof(Element)) == 0;
  for (int i = tid; i < (here - rank + SPLITS - 1) / SPLITS * FOURS; i += 128 * WGS + 32) {
    const int n = i / FOURS * SPLITS + rank, r = i % FOURS * 4, row = block * ROWS + r;
    if (row < rows)
      store(out, (i64)(first_token + n) * out_stride + row, sums_at(ring, n, r, scale_of(n)),
            rows - row, aligned);
  }
#endif
#if SPLITS > 1
  cluster_sync();  // others read this CTA's sums
#endif
}
