// moe_experts_gemm: products of routed experts with many tokens, in bfloat16 by wgmma: 64 rows x
// tokens x 16 columns each. Weights are decoded once for a tile of tokens. Layouts: of stacks
// quant_tiles.py, of tokens moe_experts_gemm_units.cuh.
//
// Macros: PHASE (0: gate, up and SwiGLU; 1: down), KIND, DOWN_KIND (WholeOf), COLS, ROWS (of a
// matrix), TOKENS (of a tile at most), WGS (warpgroups of consumers), UNITS_AHEAD, QUARTERS_AHEAD (in
// flight: units of weights, quarters of units of tokens), BATCH (quarters of a unit that are
// decoded at once), TOTAL (numbers of whole matrices: 0 none, 1 factors, 2 divisors), CTAS (an SM).
//
// A CTA is a tile of tokens and 128 rows a warpgroup: 64 each of gate and up, or 128 of down. A
// producer warp streams units of weights and quarters of units of tokens into two rings. A
// warpgroup decodes some steps of its first 64 rows while products of the second ones run, and the
// other way round. The order of a row's sum is that of its columns, whatever the tile.
//
// CTAs that take tiles in turn would save their starts, but with eight numbers of tokens in a loop
// ptxas makes products wait for each other.
#include "moe/moe_experts_gemm_ptx.cuh"
#include "moe/moe_experts_gemm_units.cuh"

typedef WholeOf<KIND> Unit;
typedef WholeOf<DOWN_KIND> DownUnit;
constexpr int UNITS = (COLS + 255) / 256, TILES = (ROWS + 15) / 16;
constexpr int H_ROWS = 64 * WGS, H_STEP = 2 * H_ROWS + 16;  // of results of a token; no bank conflicts
// Of h all columns of its units are written, those that do not count as zeros.
constexpr int ITEM_ROWS = PHASE ? 128 * WGS : H_ROWS;
constexpr int ITEMS = ((PHASE ? ROWS : (ROWS + 255) / 256 * 256) + ITEM_ROWS - 1) / ITEM_ROWS;
constexpr int SLOT = Unit::CODES + Unit::SCALES;
constexpr int W_BYTES = 8 * WGS * SLOT, X_BYTES = TOKENS * 128;
// The producer's warpgroup gives its registers to the others.
constexpr int THREADS_OF_CTA = 128 * WGS + 128;
constexpr int REGISTERS = WGS == 1 ? 232 : WGS == 2 ? 240 : WGS == 3 ? 160 : 112;
constexpr bool HAS_GRID = KIND == 12;  // IQ2_XXS

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
  int num_tiles;
  unsigned short grid[256];  // quant_types.IQ2_XXS_GRID
};
// Places in shared memory: tokens, then
constexpr u32 WEIGHTS = QUARTERS_AHEAD * X_BYTES, GRID = WEIGHTS + UNITS_AHEAD * W_BYTES;
constexpr u32 FULL_W = GRID + (HAS_GRID ? 1024 : 0);
constexpr u32 EMPTY_W = FULL_W + 8 * UNITS_AHEAD, FULL_X = EMPTY_W + 8 * UNITS_AHEAD;
constexpr u32 EMPTY_X = FULL_X + 8 * QUARTERS_AHEAD;
static_assert(QUARTERS_AHEAD >= 2 * BATCH, "a batch waits while the one before is in use");
static_assert(PHASE || TOKENS * H_STEP <= WEIGHTS, "room for results");

DEV void produce(const Work& w, int item, u32 at, int lane) {
  const uint4 tile = load_fresh(w.tiles + item / ITEMS);
  const int part = item % ITEMS;
  const u8 *codes, *scales;
  {  // of a lane's 16 rows: lane = 8 warpgroups + 4 second + warp
    const Stack& stack = lane >> 2 & 1 ? w.second : w.first;
    const int row = PHASE ? 8 * WGS * part + lane : 4 * WGS * part + 4 * (lane >> 3) + (lane & 3);
    const i64 unit = ((i64)tile.x * TILES + min(row, TILES - 1)) * UNITS;
    codes = stack.codes + unit * Unit::CODES, scales = stack.scales + unit * Unit::SCALES;
  }
  const u8* image = w.image + (i64)tile.y * (UNITS * 512);
  const u32 bytes = tile.w * 128;
  for (int u = 0; u < UNITS; ++u) {
    const int slot = u % UNITS_AHEAD;
    if (u >= UNITS_AHEAD) mbar_wait(at + EMPTY_W + 8 * slot, (u / UNITS_AHEAD - 1) & 1);
    if (lane == 0) mbar_expect(at + FULL_W + 8 * slot, W_BYTES);
    __syncwarp();
    if (lane < 8 * WGS) {
      const u32 to = at + WEIGHTS + slot * W_BYTES + lane * SLOT;
      copy_bulk(to, codes, Unit::CODES, at + FULL_W + 8 * slot);
      if (Unit::SCALES) copy_bulk(to + Unit::CODES, scales, Unit::SCALES, at + FULL_W + 8 * slot);
      codes += Unit::CODES, scales += Unit::SCALES;
    }
    for (int i = 4 * u; i < 4 * u + 4; ++i, image += bytes) {
      const int place = i % QUARTERS_AHEAD;
      if (i >= QUARTERS_AHEAD)
        mbar_wait(at + EMPTY_X + 8 * place, (i / QUARTERS_AHEAD - 1) & 1);
      if (lane == 0) {
        mbar_expect(at + FULL_X + 8 * place, bytes);
        copy_bulk(at + place * X_BYTES, image, bytes, at + FULL_X + 8 * place);
      }
      __syncwarp();
    }
  }
}

struct Turn {  // of a ring: a place, and how often it came round
  int place = 0, phase = 0;
  template <int PLACES> DEV void next() {
    place = place + 1 == PLACES ? 0 : place + 1;
    phase ^= place == 0;
  }
};
struct Consumer {
  u32 at;
  Turn unit, quarter;
  int wg, warp, lane;

  // Enqueue the products of BATCH * 4 steps.
  template <int M>
  DEV void multiply(float (&sum)[M], const u32 (&a)[BATCH][16], const u32 (&tokens)[BATCH]) {
    wg_fence();
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
#pragma unroll
      for (int s = 0; s < 4; ++s) product_bf16(sum, a[i] + 4 * s, tokens[i] + 2 * s);
    wg_commit();
  }
  DEV void decode(u32 (&a)[BATCH][16], u32 slot, int q) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) Unit::decode(a[i], slot, q + i, lane, at + GRID);
  }
  DEV void release(const int (&places)[BATCH]) {
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < BATCH; ++i) mbar_arrive(at + EMPTY_X + 8 * places[i]);
  }
  template <int M> DEV void consume(float (&first)[M], float (&second)[M]) {
    u32 a[BATCH][16], b[BATCH][16], tokens[BATCH];
    int before[BATCH] = {};
    const int units = uni(UNITS);
    for (int u = 0; u < units; ++u, unit.next<UNITS_AHEAD>()) {
      mbar_wait(at + FULL_W + 8 * unit.place, unit.phase);
      const u32 mine = at + WEIGHTS + unit.place * W_BYTES + (8 * wg + warp) * SLOT;
#pragma unroll
      for (int q = 0; q < 4; q += BATCH) {
        wg_wait<1>();  // products of a have read it
        decode(a, mine, q);
        int places[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i, quarter.next<QUARTERS_AHEAD>()) {
          mbar_wait(at + FULL_X + 8 * quarter.place, quarter.phase);
          tokens[i] = uniform(mdesc(at + quarter.place * X_BYTES, 0));
          places[i] = quarter.place;
        }
        multiply(first, a, tokens);
        wg_wait<1>();  // those of b too, the last of the batch before
        if (u + q > 0) release(before);
        decode(b, mine + 4 * SLOT, q);
        multiply(second, b, tokens);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) before[i] = places[i];
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(at + EMPTY_W + 8 * unit.place);
    }
    wg_wait<0>();
    pin(first), pin(second);
    release(before);  // unneeded, but without it ptxas makes products wait for each other
  }
};

DEV float raised(float sum, const float* total, int expert) {
  sum *= RAISED;
  return TOTAL == 0 ? sum : TOTAL == 1 ? sum * total[expert] : sum / total[expert];
}
// Sum i of a thread is of token 8 (i / 4) + 2 t + i % 2 and of row g, or g + 8, of its warp's 16.
DEV int token_of(int i, int lane) { return 8 * (i >> 2) + 2 * (lane & 3) + (i & 1); }

template <int M>
DEV void finish_gate(const Work& w, const uint4& tile, int part, u32 staged, const float (&gate)[M],
                     const float (&up)[M], const float* weights, int tid) {
  const int lane = tid & 31, row = 16 * (tid >> 5) + (lane >> 2);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int n = token_of(i, lane), r = row + 8 * (i >> 1 & 1);
    float a = raised(gate[i], w.first.total, tile.x), b = raised(up[i], w.second.total, tile.x);
    a = a > w.limit ? w.limit : a;  // NaN stays
    b = b > w.limit ? w.limit : b < -w.limit ? -w.limit : b;
    const float h = a / (1.f + __expf(-a)) * b * weights[n];
    store_shared<u16>(staged + n * H_STEP + 2 * r, part * H_ROWS + r < ROWS ? float_to_bf16(h) : (u16)0);
  }
  bar_sync(1, 128 * WGS);
  constexpr int OF_IMAGE = (ROWS + 255) / 256 * 512;
  u8* image = w.h + (i64)tile.y * OF_IMAGE;
  for (int i = tid; i < (int)tile.z * (H_ROWS / 8); i += 128 * WGS) {
    const int n = i / (H_ROWS / 8), c = 8 * (i % (H_ROWS / 8)), column = part * H_ROWS + c;
    if (2 * column >= OF_IMAGE) continue;
    u32 pairs[4];
    DownUnit::split(pairs, load_shared<uint4>(staged + n * H_STEP + 2 * c));
    const Place to = DownUnit::place(column & 255);
#pragma unroll
    for (int p = 0; p < 4; ++p)
      *(u32*)(image + chunk_of_image(column >> 8, pair_chunk<DownUnit>(to, p), n, tile.w) +
              pair_byte<DownUnit>(to, p)) = pairs[p];
  }
}
template <int M>
DEV void finish_down(const Work& w, const uint4& tile, int part, const float (&first)[M],
                     const float (&second)[M], const u32* pairs, int tid) {
  const int lane = tid & 31;
  const int row = part * ITEM_ROWS + 128 * (tid >> 7) + 16 * (tid >> 5 & 3) + (lane >> 2);
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
DEV void run(const Work& w, int item, Consumer& c, const u32* pairs, const float* weights) {
  if constexpr (N <= TOKENS) {
    float first[N / 2] = {}, second[N / 2] = {};
    c.consume(first, second);
    bar_sync(1, 128 * WGS);  // lists are written, and the ring is free
    // Once more: held over the products, it would cost them registers.
    const uint4 tile = load_fresh(w.tiles + item / ITEMS);
    if constexpr (PHASE == 0)
      finish_gate(w, tile, item % ITEMS, aligned_base(), first, second, weights, threadIdx.x);
    else
      finish_down(w, tile, item % ITEMS, first, second, pairs, threadIdx.x);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS_OF_CTA, CTAS) moe_experts_gemm(Work w) {
  __shared__ u32 pairs[TOKENS];
  __shared__ float weights[TOKENS];
  const int tid = threadIdx.x, warp = uni(tid >> 5);
  const u32 at = aligned_base();
  if (tid == 0) {
    for (int i = 0; i < UNITS_AHEAD; ++i)
      mbar_init(at + FULL_W + 8 * i, 1), mbar_init(at + EMPTY_W + 8 * i, 4 * WGS);
    for (int i = 0; i < QUARTERS_AHEAD; ++i)
      mbar_init(at + FULL_X + 8 * i, 1), mbar_init(at + EMPTY_X + 8 * i, 4 * WGS);
    mbar_fence();
  }
  if (HAS_GRID)
    for (int i = tid; i < 256; i += THREADS_OF_CTA) {
      u32 places = 0;  // 2 bits each to 4
#pragma unroll
      for (int k = 0; k < 8; ++k) places |= (w.grid[i] >> 2 * k & 3u) << 4 * k;
      store_shared<u32>(at + GRID + 4 * i, places);
    }
  wait_for_inputs();
  launch_dependents();
  __syncthreads();
  const int item = blockIdx.x, items = uni(load_fresh(w.tiles + w.num_tiles).x) * ITEMS;
  if (warp >= 4 * WGS) {
    lower_registers<24>();
    if (warp == 4 * WGS && item < items) produce(w, item, at, tid & 31);
    return;
  }
  raise_registers<REGISTERS>();
  if (item >= items) return;
  Consumer c = {at, {}, {}, uni(tid >> 7), uni(tid >> 5 & 3), tid & 31};
  const uint4 tile = load_fresh(w.tiles + item / ITEMS);
  const int tokens = uni(tile.w);
  for (int n = tid; n < TOKENS; n += 128 * WGS) {
    const u32 pair = n < (int)tile.z ? __ldcg(w.pairs + tile.y + n) : 0;
    pairs[n] = pair, weights[n] = w.weights[pair];
  }
#define RUN(n) \
  if (tokens == n) run<n>(w, item, c, pairs, weights);
  RUN(16) RUN(32) RUN(48) RUN(64) RUN(80) RUN(96) RUN(112) RUN(128)
}
