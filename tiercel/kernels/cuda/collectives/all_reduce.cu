// all_reduce: the sum of a small tensor over the GPUs of one host, in one exchange. Host side,
// floor: kernels/collectives/all_reduce.py.
//
// A thread takes 16 bytes: it stores its rank's into the memory of each other rank, polls its own
// memory for those of the others, adds all in float32 in the order of ranks and writes the result.
// So all ranks compute the same bits, nothing is read from another GPU, and the only latency
// between them is that of a store. Data travel as words of 8 bytes, 4 of data and the 4 of an epoch
// that says which launch wrote them. A word is written and read whole, so it needs no fence and no
// flag beside it.
//
// Layout of a rank's shared memory, Args::memory: slots [2][RANKS][CHANNELS][2][32] of 16 bytes:
// buffer, rank that wrote it, channel, first or second half of a unit, lane. A warp is a channel,
// the n-th of every launch the n-th channel, with an epoch of its own in `epochs`: the number of
// launches that have used it. A launch uses the first channels, as many as its size needs.
//
// Why two buffers suffice, without a barrier at the end. Take a channel, and launches m, m + 1 and
// m + 2 of those that use it: the same on all ranks, which launch the same sizes in the same order.
// Launch m + 2 of rank A overwrites what launch m of rank B reads. A has then finished its m + 1,
// so it has seen what B's m + 1 stored, which B did after its own m had ended: in a stream a kernel
// ends before a later one passes wait_for_inputs. So a rank is never more than one launch
// ahead of another, and a buffer is free when it is written. This holds whatever sizes other
// launches have, since channels share nothing.
//
// Why an epoch cannot be mistaken. Each launch stores all words of the channels that it uses, also
// those of lanes past the end. So a word of buffer m % 2 has epoch m, or m - 2 until it arrives
// (0 before the first), and the count may wrap.
//
// All CTAs must be resident on all ranks before any can end. There are at most CHANNELS warps of up
// to 100 registers, a fifth of those of an H100, and what else runs beside them must not wait for
// other ranks.
//
// A gather is the same exchange, whose parts are written one after the other. With a norm a CTA has
// a row of 256 WARPS elements: their sums are added to the residual, which is normed.
//
// Macros: RANKS, WARPS (of a CTA), CHANNELS, IS_FLOAT (elements of 4 bytes), IS_BF16 (0: fp16),
// IS_GATHER (parts are bytes), HAS_NORM.
#include "collectives/all_reduce_ptx.cuh"
#include "include/attention_ptx.cuh"
#include "include/peer_words.cuh"

#define MOST_TICKS 256  // of clock_high: 10 minutes, after which a rank is lost, as for NCCL

struct Args {
  const u8* x;        // this rank's part, at a multiple of 16 bytes
  u8* out;            // like x, and may be x; of a gather (RANKS, num_bytes)
  u32* epochs;        // (CHANNELS,) of this rank alone
  u8* memory[RANKS];  // of each rank, as this one addresses it
  int num_bytes;      // of x, at most 512 CHANNELS
  int rank;
#if HAS_NORM
  float* residual;      // (rows, 256 WARPS): the sum is added
  const float* weight;  // (256 WARPS,)
  float eps;
#endif
};

// 16 bytes from `unit` on; what is past the end is 0.
DEV uint4 load_unit(const u8* x, int unit, int num_bytes) {
  if (16 * unit + 16 <= num_bytes) return __ldcg((const uint4*)x + unit);
  u32 v[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (16 * unit + 2 * i < num_bytes)
      v[i / 2] |= (u32)((const u16*)x)[8 * unit + i] << 16 * (i % 2);
  return make_uint4(v[0], v[1], v[2], v[3]);
}
DEV void store_unit(u8* out, int unit, int num_bytes, const u32 (&v)[4]) {
  if (16 * unit + 16 <= num_bytes && (u64)out % 16 == 0) {
    ((uint4*)out)[unit] = make_uint4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (16 * unit + 2 * i < num_bytes) ((u16*)out)[8 * unit + i] = (u16)(v[i / 2] >> 16 * (i % 2));
}
// Of one 32-bit register of all ranks.
DEV u32 add(const u32 (&v)[RANKS]) {
#if IS_FLOAT
  float sum = __uint_as_float(v[0]);
#pragma unroll
  for (int r = 1; r < RANKS; ++r) sum += __uint_as_float(v[r]);
  return __float_as_uint(sum);
#else
  float low, high;
  unpack(v[0], low, high);
#pragma unroll
  for (int r = 1; r < RANKS; ++r) {
    float more_low, more_high;
    unpack(v[r], more_low, more_high);
    low += more_low, high += more_high;
  }
  return pack(low, high);
#endif
}

#if HAS_NORM
DEV void load8(float (&v)[8], const float* from) {
  const float4 a = __ldcg((const float4*)from), b = __ldcg((const float4*)from + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
// Adds 8 sums of a row to the residual x, and writes what is normed.
DEV void add_and_norm(const Args& g, float (&x)[8], const Words (&parts)[2][RANKS],
                      const float (&weight)[8], float* squares_of_warps, int unit) {
  float sum[8] = {};
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    const u32 part[4] = {(u32)parts[0][r].first, (u32)parts[0][r].second,
                         (u32)parts[1][r].first, (u32)parts[1][r].second};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack(part[i], low, high);
      sum[2 * i] += low, sum[2 * i + 1] += high;
    }
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += sum[i], squares += x[i] * x[i];
  float4* to = (float4*)g.residual + 2 * unit;
  to[0] = make_float4(x[0], x[1], x[2], x[3]), to[1] = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll
  for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
  if (threadIdx.x % 32 == 0) squares_of_warps[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) squares += squares_of_warps[i];
  const float scale = 1.f / sqrtf(squares * (1.f / (256 * WARPS)) + g.eps);
  uint4 out;
  out.x = pack(x[0] * scale * weight[0], x[1] * scale * weight[1]);
  out.y = pack(x[2] * scale * weight[2], x[3] * scale * weight[3]);
  out.z = pack(x[4] * scale * weight[4], x[5] * scale * weight[5]);
  out.w = pack(x[6] * scale * weight[6], x[7] * scale * weight[7]);
  ((uint4*)g.out)[unit] = out;
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS) all_reduce(
    const __grid_constant__ Args g) {
#if HAS_NORM
  SHARED_FLOATS(squares, WARPS);
  float weight[8], residual[8];
  load8(weight, g.weight + 8 * threadIdx.x);  // from cold memory, so before the wait
#endif
  launch_dependents();
  const int lane = threadIdx.x % 32, channel = blockIdx.x * WARPS + threadIdx.x / 32;
  const int unit = 32 * channel + lane;
  wait_for_inputs();
  const uint4 own = load_unit(g.x, unit, g.num_bytes);
  // One lane reads and writes it, so that no other reads it later.
  u32 epoch = 0;
  if (lane == 0) g.epochs[channel] = epoch = 1 + __ldcg(g.epochs + channel);
  epoch = __shfl_sync(~0u, epoch, 0);
  const Words halves[2] = {words(own.x, own.y, epoch), words(own.z, own.w, epoch)};
  const int buffer = (epoch & 1) * RANKS;
  auto slot_of = [&](int from, int half) {
    return (((buffer + from) * CHANNELS + channel) * 2 + half) * 512 + 16 * lane;
  };
#pragma unroll
  for (int i = 1; i < RANKS; ++i) {  // each rank begins with another one
    u8* to = g.memory[(g.rank + i) % RANKS];
    store_words(to + slot_of(g.rank, 0), halves[0]);
    store_words(to + slot_of(g.rank, 1), halves[1]);
  }
#if HAS_NORM
  load8(residual, g.residual + 8 * unit);
#endif
  Words parts[2][RANKS];
  const u8* mine = g.memory[g.rank];
  const u32 begin = clock_high();
  bool is_there;
  do {
    is_there = true;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        parts[half][r] = r == g.rank ? halves[half] : load_words(mine + slot_of(r, half));
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      is_there &= has_epoch(parts[0][r], epoch) && has_epoch(parts[1][r], epoch);
    if (!is_there && clock_high() - begin > MOST_TICKS) give_up();
  } while (!is_there);
#if HAS_NORM
  add_and_norm(g, residual, parts, weight, squares, unit);
#elif IS_GATHER
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    const Words &a = parts[0][r], &b = parts[1][r];
    const u32 part[4] = {(u32)a.first, (u32)a.second, (u32)b.first, (u32)b.second};
    store_unit(g.out + (i64)r * g.num_bytes, unit, g.num_bytes, part);
  }
#else
  u32 sums[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 first[RANKS], second[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      first[r] = (u32)parts[half][r].first, second[r] = (u32)parts[half][r].second;
    sums[2 * half] = add(first), sums[2 * half + 1] = add(second);
  }
  store_unit(g.out, unit, g.num_bytes, sums);
#endif
}
