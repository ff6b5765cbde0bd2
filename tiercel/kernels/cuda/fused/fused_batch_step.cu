// fused_batch_step: all layers of a dense decoder in one launch, for m <= TOKENS requests with one new
// token each. It is fused_layer_tail.cu with a loop over the layers and the attention in front of each
// tail: the same warps, distribution, sums and exchange; see there. Why it is one launch:
// docs/notes/fused_layer_tail.md. Host side: ops/fused_batch_step.py.
//
// A layer: the warps that multiply attend (fused_batch_step_attention.cuh), then multiply by o, gate
// and up, down and the next layer's q, k, v, whose sums go to the CTAs that attend with them. q, k, v
// of the first layer are an input. Nothing is reset between layers: counters and the columns in shared
// memory are counted over the whole launch. Before the attention is over, a warp has AHEAD units of
// o under way, and then as many as its ring takes: what is read ahead queues in front of the few
// hundred bytes that CTAs wait for.
//
// Matrices of Q6_K may differ from layer to layer; widths do not. A layer's pointers are in a table in
// memory, of which one warp keeps this layer's row and the next one's in shared memory.
//
// Macros: those of fused_layer_tail.cu (but SIX_*) and of fused_batch_step_args.cuh; IS_STEP is 1.
#include "fused/fused_batch_step_attention.cuh"
#include "fused/fused_layer_tail_exchange.cuh"
#include "fused/fused_layer_tail_products.cuh"

// Whether matrix `index` of a layer is Q6_K; `maybe`: its own of MAYBE_SIXES.
DEV bool is_six(u32 maybe, int index) {
  return (SIXES >> index & 1) || ((MAYBE_SIXES & maybe) >> index & 1);
}
DEV void multiply_residual(Multiplier& own, bool six, int columns) {
  const int count = columns_of(columns, own.share.four);
  if (six)
    own.multiply_rows<true>(count);
  else
    own.multiply_rows<false>(count);
}
DEV void multiply_heads(Multiplier& own, bool qk, bool v) {
  if (qk && v)
    own.multiply_qkv<true, true>();
  else if (qk)
    own.multiply_qkv<true, false>();
  else if (v)
    own.multiply_qkv<false, true>();
  else
    own.multiply_qkv<false, false>();
}

DEV void multiply_layers(const Args& g, u8* memory, u32 smem, int rank, int warp, int lane) {
  Multiplier own = make_multiplier(g, smem, rank, warp, lane);
  cluster_sync();
  wait_for_inputs();
#pragma unroll 1
  for (own.number = 0; own.number < g.num_layers; ++own.number) {
    const bool is_last = own.number + 1 == g.num_layers;
    bar_sync(4, 32 * (WARPS + 1));  // the layer's row is there, and all columns of x are read
    const u32 row = Layout::ROWS + (own.number & 1) * sizeof(Layer);
    own.layer = {smem + row};
    own.find_left(is_last);
    Attention attention = {g, memory, smem, rank, warp, lane, (const Layer*)(memory + row), own.number};
    attention.run([&] {
#pragma unroll 1
      for (int i = 0; i < AHEAD; ++i) own.fetch_next();
    });
    fence_shared_writes();  // bulk copies follow
    bar_sync(3, 32 * (WARPS + 1));
    own.lane = unknown(own.lane);  // no address is kept in registers while the warp attends
#pragma unroll 1
    for (int i = AHEAD; i < STAGES; ++i) own.fetch_next();
    const u32 sixes = own.sixes();
    multiply_residual(own, is_six(sixes, 0), COLUMNS_O);
    if (is_six(sixes, 1))
      own.multiply_gate_up<true>();
    else
      own.multiply_gate_up<false>();
    if (is_last) launch_dependents();
    multiply_residual(own, is_six(sixes, 2), COLUMNS_H);
    if (is_last) break;
    multiply_heads(own, is_six(sixes, 3), is_six(sixes, 4));
    own.close_all(columns_of(COLUMNS_X, own.share.four));
  }
}

// Rows of the table and what is known of requests, to shared memory.
DEV void keep_rows(const Args& g, u8* memory, int lane) {
  Plan& plan = *(Plan*)(memory + Layout::PLAN);
  const int older = lane < g.m ? max(g.seq_lens[lane] - 1, 0) : 0;
  int parts = max((older + SPAN - 1) / SPAN, 1);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, parts, step);
    if (lane >= step) parts += before;
  }
  if (lane < g.m) {
    plan.requests[lane] = {g.tables + (i64)g.rows[lane] * g.table_width, g.slots[lane], older,
                           g.positions[lane]};
    plan.ends[lane] = parts;
  }
  if (lane < NT) plan.counts[lane] = __ldcg(g.launches + lane * CTAS + blockIdx.x);
#pragma unroll 1
  for (int layer = 0; layer < g.num_layers; ++layer) {
    // Of the row that was here all have read what they need: they are past the barrier before.
    uint4* to = (uint4*)((Layer*)(memory + Layout::ROWS) + (layer & 1));
    if (lane < (int)(sizeof(Layer) / 16)) to[lane] = __ldg((const uint4*)(g.layers + layer) + lane);
    bar_sync(4, 32 * (WARPS + 1));
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    fused_batch_step(const __grid_constant__ Args g) {
  SHARED_MEMORY(memory);
  const int tid = threadIdx.x, lane = tid & 31, rank = blockIdx.x & 1;
  const int warp = __shfl_sync(~0u, tid >> 5, 0);
  const u32 smem = shared_address(memory);
  if (tid == 0) start_barriers(memory, smem);
  __syncthreads();
  if (warp < WARPS)
    take_registers();
  else
    drop_registers();
  if (warp < WARPS) {
    multiply_layers(g, memory, smem, rank, warp, lane);
  } else if (warp == FETCHER) {
    bring(g, memory, smem, rank, lane);
  } else if (warp >= REDUCER && warp < REDUCER + NT) {
    add_all(g, memory, smem, rank, warp - REDUCER, lane);
  } else {
    cluster_sync();
    wait_for_inputs();
    if (warp == FETCHER + 1) keep_rows(g, memory, lane);
  }
  __syncwarp();
  cluster_sync();  // no CTA ends while the other one still writes to its memory
}
