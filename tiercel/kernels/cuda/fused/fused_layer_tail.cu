// fused_layer_tail: from one attention of a dense decoder to the next for m <= TOKENS tokens, in
// one launch. Layouts: `Args` and `Layout` of fused_layer_tail_products.cuh. Why each part is as it
// is: docs/notes/fused_layer_tail.md. Host side: ops/fused_layer_tail.py.
//
// Split: CTAS in clusters of two. Groups of 32 columns of x (rows of o and down), groups of 32
// columns of down's input (rows of gate and up) and tiles of q, k, v are dealt over the CTAs in
// rounds, the last of which may leave some out. Both CTAs of a cluster multiply the rows of both,
// each with every second unit column of 256. Of its 16 warps, 8 multiply each CTA's rows: of two
// tiles at a time, a quarter of the columns. So any width that is a multiple of 512 will do; one
// that 32 x CTAS does not divide leaves warps idle in a last round.
//
// Weights: a warp streams its units through a ring of its own, in order of use over all
// matrices. Sums: st.async to shared memory of the rows' owner; its barrier counts bytes. A
// warp for each 8 tokens adds the parts in a fixed order, so a token's bits depend on nothing
// but itself.
//
// Exchange: a group of 32 columns of the next x is published in the order in
// which units take it; then its CTA adds one to a counter of the column of 256, for each 8 tokens.
// A column has eight groups, so its counter has grown by eight in each launch with those tokens,
// and nothing is ever reset. One warp of each CTA polls the counters, two words of a column where
// flags of CTAs were sixteen: 6 us a layer more at 16 tokens, 3 at fewer (H200,
// results/decode_chain_polls_h200.json); and fetches x by bulk copies, a column at a
// time. Waiting for others is bounded: after MOST_TICKS a CTA waits no more, and its results
// become NaN; it publishes all the same, so counters stay right.
//
// Several GPUs that share a model: fused_layer_tail_ranks.cuh.
//
// Macros: HIDDEN, ATTENDED (width of the attention's outputs), INNER (of down's inputs), QK_TILES
// and QKV_TILES (of 16 rows, of q and k and of all; 0 without a next layer), CTAS, TOKENS (8 or
// 16), SIX_* (matrices of Q6_K), ANY_SIX, STAGES (units of a warp in flight), XSLOTS (columns of x
// in shared memory), BUFFERS (of sums), RANKS (GPUs that share the model).
#include "fused/fused_layer_tail_exchange.cuh"
#include "fused/fused_layer_tail_products.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    fused_layer_tail(const __grid_constant__ Args g) {
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
    multiply_all(g, smem, rank, warp, lane);
  } else if (warp == FETCHER) {
    bring(g, memory, smem, rank, lane);
  } else if (warp >= REDUCER && warp < REDUCER + NT) {
    add_all(g, memory, smem, rank, warp - REDUCER, lane);
  } else {
    cluster_sync();
    wait_for_inputs();
  }
  __syncwarp();
  cluster_sync();  // no CTA ends while the other one still writes to its memory
}
