// moe_experts_gemm: products of routed experts with many tokens, in bfloat16 by wgmma: 64 rows x
// tokens x 16 columns each. Weights are decoded once for a tile of tokens. Layouts: of stacks
// quant_tiles.py, of tokens moe_experts_gemm_units.cuh.
//
// Macros: PHASE (0: gate, up and SwiGLU; 1: down), KIND, DOWN_KIND (WholeOf), COLS, ROWS (of a
// matrix), TOKENS (of a tile at most), WGS (warpgroups), UNITS_AHEAD, QUARTERS_AHEAD (in flight:
// units of weights, quarters of units of tokens), FROM_SHARED (1: decoded weights go through shared
// memory), TOTAL (numbers of whole matrices: 0 none, 1 factors, 2 divisors), CTAS (an SM).
//
// A CTA is a tile of tokens and 128 rows a warpgroup: 64 each of gate and up, or 128 of down. A
// producer warp streams units of weights and quarters of units of tokens into two rings. A
// warpgroup decodes four steps of its first 64 rows while products of the second ones run, and the
// other way round. The order of a row's sum is that of its columns, whatever the tile.
#include "moe/moe_experts_gemm_ptx.cuh"
#include "moe/moe_experts_gemm_units.cuh"

typedef WholeOf<KIND> Unit;
typedef WholeOf<DOWN_KIND> DownUnit;
constexpr int UNITS = (COLS + 255) / 256, TILES = (ROWS + 15) / 16;
constexpr int SLOT = Unit::CODES + Unit::SCALES;
constexpr int W_BYTES = 8 * WGS * SLOT, X_BYTES = TOKENS * 128;
constexpr int DECODED = FROM_SHARED ? WGS * 2 * 8192 : 0;
constexpr int H_ROWS = 64 * WGS, H_STEP = 2 * H_ROWS + 16;  // of results of a token; no bank conflicts
constexpr int NUM_BARRIERS = 2 * (UNITS_AHEAD + QUARTERS_AHEAD);
// Operands in registers need more of them than CTAs of 288 threads find: the producer gives its own.
constexpr bool MOVES_REGISTERS = !FROM_SHARED && WGS == 2;
constexpr int THREADS_OF_CTA = 128 * WGS + (MOVES_REGISTERS ? 128 : 32);
constexpr bool HAS_GRID = KIND == 12;  // IQ2_XXS
static_assert(PHASE || TOKENS * H_STEP <= QUARTERS_AHEAD * X_BYTES, "room for results");

struct Stack {
  const u8 *codes, *scales;
  const float* total;
};
struct Work {
  Stack first, second;   // gate and up; down twice
  const u8* image;       // of the tokens
  const uint4* tiles;    // of moe_experts_gemm_table
  const u32* pairs;      // likewise, of each row of the images
  const float* weights;  // of a pair
  u8* h;                 // PHASE 0: image for down
  float* y;              // PHASE 1: (num_pairs, ROWS)
  float limit;
  unsigned short grid[256];  // quant_types.IQ2_XXS_GRID
};
struct Place2 {  // in shared memory
  u32 tokens, decoded, weights, full_w, empty_w, full_x, empty_x, grid;
};

DEV void produce(const Work& w, const uint4& tile, const Place2& at, int lane) {
  const u8 *codes, *scales;
  {  // of a lane's 16 rows: lane = 8 warpgroups + 4 second + warp
    const bool is_second = lane >> 2 & 1;
    const Stack& stack = is_second ? w.second : w.first;
    const int row = PHASE ? 8 * WGS * blockIdx.x + lane
                          : 4 * WGS * blockIdx.x + 4 * (lane >> 3) + (lane & 3);
    const i64 unit = ((i64)tile.x * TILES + min(row, TILES - 1)) * UNITS;
    codes = stack.codes + unit * Unit::CODES, scales = stack.scales + unit * Unit::SCALES;
  }
  const u8* image = w.image + (i64)tile.y * (UNITS * 512);
  const u32 quarter = tile.w * 128;
  for (int u = 0; u < UNITS; ++u) {
    const int slot = u % UNITS_AHEAD;
    if (u >= UNITS_AHEAD) mbar_wait(at.empty_w + 8 * slot, (u / UNITS_AHEAD - 1) & 1);
    if (lane == 0) mbar_expect(at.full_w + 8 * slot, W_BYTES);
    __syncwarp();
    if (lane < 8 * WGS) {
      const u32 to = at.weights + slot * W_BYTES + lane * SLOT;
      copy_bulk(to, codes, Unit::CODES, at.full_w + 8 * slot);
      if (Unit::SCALES) copy_bulk(to + Unit::CODES, scales, Unit::SCALES, at.full_w + 8 * slot);
      codes += Unit::CODES, scales += Unit::SCALES;
    }
    for (int i = 4 * u; i < 4 * u + 4; ++i, image += quarter) {
      const int place = i % QUARTERS_AHEAD;
      if (i >= QUARTERS_AHEAD) mbar_wait(at.empty_x + 8 * place, (i / QUARTERS_AHEAD - 1) & 1);
      if (lane == 0) {
        mbar_expect(at.full_x + 8 * place, quarter);
        copy_bulk(at.tokens + place * X_BYTES, image, quarter, at.full_x + 8 * place);
      }
      __syncwarp();
    }
  }
}

// Enqueue the products of four steps.
template <int M> DEV void multiply(float (&sum)[M], const u32 (&a)[16], u32 tokens, u32 decoded, int wg, int warp, int lane) {
#if FROM_SHARED
  const u32 row = decoded + 2048 * warp + 128 * (lane & 15);
#pragma unroll
  for (int s = 0; s < 4; ++s)
    store_matrices(row + (((2 * s + (lane >> 4)) ^ (lane & 7)) << 4), a + 4 * s);
  fence_products();
  bar_sync(2 + wg, 128);
  const u32 from = uniform(mdesc(decoded, 0));
#endif
  wg_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s)
#if FROM_SHARED
    product_bf16(sum, from + 2 * s, tokens + 2 * s);
#else
    product_bf16(sum, a + 4 * s, tokens + 2 * s);
#endif
  wg_commit();
}
template <int M>
DEV void consume(float (&first)[M], float (&second)[M], const Place2& at, int wg, int warp, int lane) {
  int slot = 0, slot_phase = 0, place = 0, place_phase = 0, before = 0;
  u32 a[16], b[16];
  const int units = uni(UNITS);
  const u32 decoded = at.decoded + wg * 16384;
  for (int u = 0; u < units; ++u) {
    mbar_wait(at.full_w + 8 * slot, slot_phase);
    const u32 mine = at.weights + slot * W_BYTES + (8 * wg + warp) * SLOT;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wg_wait<1>();  // products of a have read it
      Unit::decode(a, mine, q, lane, at.grid);
      mbar_wait(at.full_x + 8 * place, place_phase);
      const u32 tokens = uniform(mdesc(at.tokens + place * X_BYTES, 0));
      multiply(first, a, tokens, decoded, wg, warp, lane);
      wg_wait<1>();  // those of b too, the last of the quarter before
      if (lane == 0 && u + q > 0) mbar_arrive(at.empty_x + 8 * before);
      Unit::decode(b, mine + 4 * SLOT, q, lane, at.grid);
      multiply(second, b, tokens, decoded + 8192, wg, warp, lane);
      before = place, place = place + 1 == QUARTERS_AHEAD ? 0 : place + 1;
      place_phase ^= place == 0;
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(at.empty_w + 8 * slot);
    slot = slot + 1 == UNITS_AHEAD ? 0 : slot + 1;
    slot_phase ^= slot == 0;
  }
  wg_wait<0>();
  pin(first), pin(second);
}

DEV float raised(float sum, const float* total, int expert) {
  sum *= RAISED;
  return TOTAL == 0 ? sum : TOTAL == 1 ? sum * total[expert] : sum / total[expert];
}
// Sum i of a thread is of token 8 (i / 4) + 2 t + i % 2 and of row g, or g + 8, of its warp's 16.
DEV int token_of(int i, int lane) { return 8 * (i >> 2) + 2 * (lane & 3) + (i & 1); }

template <int M>
DEV void finish_gate(const Work& w, const uint4& tile, const Place2& at, const float (&gate)[M],
                     const float (&up)[M], const float* weights, int tid) {
  const int lane = tid & 31, row = 16 * (tid >> 5) + (lane >> 2);
  bar_sync(1, 128 * WGS);  // the ring is free
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int n = token_of(i, lane), r = row + 8 * (i >> 1 & 1);
    float a = raised(gate[i], w.first.total, tile.x), b = raised(up[i], w.second.total, tile.x);
    a = a > w.limit ? w.limit : a;  // NaN stays
    b = b > w.limit ? w.limit : b < -w.limit ? -w.limit : b;
    const float h = a / (1.f + __expf(-a)) * b * weights[n];
    sts2(at.tokens + n * H_STEP + 2 * r,
         (int)blockIdx.x * H_ROWS + r < ROWS ? float_to_bf16(h) : (u16)0);
  }
  bar_sync(1, 128 * WGS);
  constexpr int OF_IMAGE = (ROWS + 255) / 256 * 512;
  u8* image = w.h + (i64)tile.y * OF_IMAGE;
  for (int i = tid; i < (int)tile.z * (H_ROWS / 8); i += 128 * WGS) {
    const int n = i / (H_ROWS / 8), c = 8 * (i % (H_ROWS / 8));
    const int column = blockIdx.x * H_ROWS + c;
    u32 pairs[4];
    DownUnit::split(pairs, lds16(at.tokens + n * H_STEP + 2 * c));
    const Place to = DownUnit::place(column & 255);
#pragma unroll
    for (int p = 0; p < 4; ++p)
      *(u32*)(image + chunk_of_image(column >> 8, pair_chunk<DownUnit>(to, p), n, tile.w) +
              pair_byte<DownUnit>(to, p)) = pairs[p];
  }
}
template <int M>
DEV void finish_down(const Work& w, const uint4& tile, const float (&first)[M],
                     const float (&second)[M], const u32* pairs, int tid) {
  const int lane = tid & 31;
  const int row = blockIdx.x * 128 * WGS + 128 * (tid >> 7) + 16 * (tid >> 5 & 3) + (lane >> 2);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int n = token_of(i, lane), r = row + 8 * (i >> 1 & 1);
    if (n >= (int)tile.z) continue;
    float* to = w.y + (i64)pairs[n] * ROWS + r;
    if (r < ROWS) to[0] = raised(first[i], w.first.total, tile.x);
    if (r + 64 < ROWS) to[64] = raised(second[i], w.first.total, tile.x);
  }
}
template <int N>
DEV void run(const Work& w, const uint4& tile, const Place2& at, const u32* pairs,
             const float* weights, int tid) {
  if constexpr (N <= TOKENS) {
    float first[N / 2] = {}, second[N / 2] = {};
    consume(first, second, at, uni(tid >> 7), uni(tid >> 5 & 3), tid & 31);
    if (PHASE == 0)
      finish_gate(w, tile, at, first, second, weights, tid);
    else
      finish_down(w, tile, first, second, pairs, tid);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS_OF_CTA, CTAS) moe_experts_gemm(Work w) {
  ALIGNED_MEMORY(memory);
  __shared__ __align__(8) u64 barriers[NUM_BARRIERS];
  __shared__ u32 pairs[TOKENS];
  __shared__ float weights[TOKENS];
  const int tid = threadIdx.x, warp = uni(tid >> 5);
  const u32 smem = shared_address(memory), bars = shared_address(barriers);
  const u32 decoded = smem + QUARTERS_AHEAD * X_BYTES;
  const Place2 at = {smem, decoded, decoded + DECODED, bars, bars + 8 * UNITS_AHEAD,
                     bars + 16 * UNITS_AHEAD, bars + 16 * UNITS_AHEAD + 8 * QUARTERS_AHEAD,
                     decoded + DECODED + UNITS_AHEAD * W_BYTES};
  wait_for_inputs();
  launch_next();
  const uint4 tile = load_fresh(w.tiles + blockIdx.y);
  if (tile.z == 0) return;
  if (tid == 0) {
    for (int i = 0; i < UNITS_AHEAD; ++i)
      mbar_init(at.full_w + 8 * i, 1), mbar_init(at.empty_w + 8 * i, 4 * WGS);
    for (int i = 0; i < QUARTERS_AHEAD; ++i)
      mbar_init(at.full_x + 8 * i, 1), mbar_init(at.empty_x + 8 * i, 4 * WGS);
    mbar_fence();
  }
  for (int n = tid; n < TOKENS; n += THREADS_OF_CTA) {
    const u32 pair = n < (int)tile.z ? __ldcg(w.pairs + tile.y + n) : 0;
    pairs[n] = pair, weights[n] = w.weights[pair];
  }
  if (HAS_GRID)
    for (int i = tid; i < 256; i += THREADS_OF_CTA) {
      u32 places = 0;  // 2 bits each to 4
#pragma unroll
      for (int k = 0; k < 8; ++k) places |= (w.grid[i] >> 2 * k & 3u) << 4 * k;
      sts4(at.grid + 4 * i, places);
    }
  __syncthreads();
  if (warp >= 4 * WGS) {
    if constexpr (MOVES_REGISTERS) lower_registers<24>();
    if (warp == 4 * WGS) produce(w, tile, at, tid & 31);
    return;
  }
  if constexpr (MOVES_REGISTERS) raise_registers<240>();
  const int tokens = uni(tile.w);
  if (tokens == 16) run<16>(w, tile, at, pairs, weights, tid);
  if (tokens == 32) run<32>(w, tile, at, pairs, weights, tid);
  if (tokens == 48) run<48>(w, tile, at, pairs, weights, tid);
  if (tokens == 64) run<64>(w, tile, at, pairs, weights, tid);
  if (tokens == 80) run<80>(w, tile, at, pairs, weights, tid);
  if (tokens == 96) run<96>(w, tile, at, pairs, weights, tid);
  if (tokens == 112) run<112>(w, tile, at, pairs, weights, tid);
  if (tokens == 128) run<128>(w, tile, at, pairs, weights, tid);
}
