// Attention of DeepSeek-V4 over listed latent vectors on Blackwell's tensor cores (sm_100a), for
// 128 heads of 512 channels. Compiled, never run.
//
// A CTA has one token, all heads and half of the channels of the result: scores of 64 keys, their
// probabilities and 256 channels of sums are 352 columns of tensor memory. For each 64 keys
//
//     all threads     decode them into shared memory, once for scores and sums
//     one thread      scores = q keys^T                              (32 products of 16 channels)
//     warps 0 to 3    maximum, sums so far rescaled, probabilities   (a thread has a head)
//     one thread      sums += probabilities keys                     (4 products of 16 keys)
//
// A vector is 448 channels of E4M3 with a scale of E8M0 for 64, then 64 of bfloat16.
#include "include/blackwell.cuh"
#include "include/half_ptx.cuh"

constexpr int HEAD_ROWS = 128, CHANNELS = 512, KEYS = 64;
constexpr int PANEL = 64;                             // channels of a row of 128 bytes
constexpr int PANELS = CHANNELS / PANEL;
constexpr u32 Q_PANEL = HEAD_ROWS * 128, KEY_PANEL = KEYS * 128;  // bytes
constexpr int HALF = CHANNELS / 2;
constexpr int CODES = 448;  // channels in E4M3
#define NOTHING __uint_as_float(0xFF800000u)  // minus infinity: the maximum of no scores
constexpr u32 SUMS = 0, SCORES = HALF, CHANCES = SCORES + KEYS, TMEM_COLUMNS = 512;

// float32 sums of bfloat16; the second operand of the second product is transposed.
constexpr u32 KIND = 1 << 4 | 1 << 7 | 1 << 10 | (HEAD_ROWS >> 4) << 24;
constexpr u32 SCORE_INSTRUCTION = KIND | (KEYS >> 3) << 17;
constexpr u32 SUM_INSTRUCTION = KIND | 1 << 16 | (HALF >> 3) << 17;

DEV void multiply(u32 sums, u64 a, u64 b, bool adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(sums),
      "l"(a), "l"(b), "r"(SCORE_INSTRUCTION), "r"((u32)adds)
      : "memory");
}
DEV void multiply_chances(u32 sums, u32 a, u64 b, bool adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(sums),
      "r"(a), "l"(b), "r"(SUM_INSTRUCTION), "r"((u32)adds)
      : "memory");
}

// Two E4M3 times a scale.
DEV u32 decode(u32 codes, float scale) {
  u32 halves;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
  unpack_fp16(halves, low, high);
  return pack_bf16(low * scale, high * scale);
}

struct Part {
  const u8* cache;   // rows of 576 bytes
  const u8* scales;  // rows of 8 bytes, 7 used
  const int* slots;  // (tokens, num_keys); -1: no key
  i64 block, entry, scale_block, scale_entry;  // bytes
  int num_keys, per_block;
};

// Place of 16 bytes, a piece of a row, in a panel with the 128-byte swizzle.
DEV u32 swizzled(int row, int piece) { return row * 128 + (piece ^ (row & 7)) * 16; }

// Decode one key, a quarter of its pieces of 8 channels; zeros where there is none.
DEV void load_key(u8* keys, int row, int quarter, const Part& part, int slot) {
  const bool is_key = slot >= 0;
  const i64 block = is_key ? slot / part.per_block : 0, entry = is_key ? slot % part.per_block : 0;
  const u8* data = part.cache + block * part.block + entry * part.entry;
  const u8* scales = part.scales + block * part.scale_block + entry * part.scale_entry;
#pragma unroll 4
  for (int i = 0; i < CHANNELS / 8 / 4; i++) {
    const int piece = quarter + 4 * i, panel = piece / 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (is_key && piece < CODES / 8) {
      const uint2 codes = *(const uint2*)(data + 8 * piece);
      const float scale = __uint_as_float((u32)scales[panel] << 23);
      value = make_uint4(decode(codes.x, scale), decode(codes.x >> 16, scale),
                         decode(codes.y, scale), decode(codes.y >> 16, scale));
    } else if (is_key) {
      value = *(const uint4*)(data + CODES + 16 * (piece - CODES / 8));
    }
    *(uint4*)(keys + panel * KEY_PANEL + swizzled(row, piece % 8)) = value;
  }
}

DEV void load_q(u8* to, const u8* q, i64 head_stride) {
  for (int i = threadIdx.x; i < HEAD_ROWS * CHANNELS / 8; i += blockDim.x) {
    const int head = i / (CHANNELS / 8), piece = i % (CHANNELS / 8);
    *(uint4*)(to + piece / 8 * Q_PANEL + swizzled(head, piece % 8)) =
        *(const uint4*)(q + head * head_stride + 16 * piece);
  }
}

// Multiply a head's sums so far.
DEV void rescale(u32 sums, float factor) {
  for (int column = 0; column < HALF; column += 16) {
    u32 part[16];
    tmem_load(part, sums + column);
    wait_loads();
#pragma unroll
    for (int i = 0; i < 16; i++) part[i] = __float_as_uint(__uint_as_float(part[i]) * factor);
    tmem_store(sums + column, part);
  }
  wait_stores();
}

// Probabilities of a tile's keys for the thread's head; returns their sum.
DEV float write_chances(u32 lane, u64 present, float scale, float top) {
  float total = 0;
  for (int first = 0; first < KEYS; first += 32) {
    u32 packed[16];
#pragma unroll
    for (int part = 0; part < 2; part++) {
      u32 scores[16];
      tmem_load(scores, lane + SCORES + first + 16 * part);
      wait_loads();
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const int key = first + 16 * part + i;
        const float a = present >> key & 1 ? exp2f(__uint_as_float(scores[i]) * scale - top) : 0;
        const float b =
            present >> (key + 1) & 1 ? exp2f(__uint_as_float(scores[i + 1]) * scale - top) : 0;
        total += a + b;
        packed[8 * part + i / 2] = pack_bf16(a, b);
      }
    }
    tmem_store(lane + CHANCES + first / 2, packed);
  }
  wait_stores();
  return total;
}

DEV float largest_score(u32 lane, u64 present, float scale) {
  float top = NOTHING;
  for (int first = 0; first < KEYS; first += 16) {
    u32 scores[16];
    tmem_load(scores, lane + SCORES + first);
    wait_loads();
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (present >> (first + i) & 1) top = fmaxf(top, __uint_as_float(scores[i]) * scale);
  }
  return top;
}

extern "C" __global__ void __launch_bounds__(256, 1)
    sparse_attention_blackwell(u8* out,        // (tokens, 128, 512) bfloat16, contiguous
                               const u8* q,    // (tokens, 128, 512) bfloat16
                               const float* sink,  // (128,), or null
                               Part first, Part second, i64 token_stride, i64 head_stride,  // bytes
                               float scale) {  // with log2(e)
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barriers[2];  // scores, sums
  __shared__ u32 tmem;
  __shared__ u64 present;
  u8* keys = shared + PANELS * Q_PANEL;
  const int warp = threadIdx.x / 32, token = blockIdx.y, half = blockIdx.x;
  const u32 scores_done = shared_address(barriers), sums_done = scores_done + 8;
  if (threadIdx.x == 0) {
    mbar_init(scores_done, 1);
    mbar_init(sums_done, 1);
    mbar_fence();
  }
  if (warp == 5) tmem_allocate(shared_address(&tmem), TMEM_COLUMNS);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  load_q(shared, q + token * token_stride, head_stride);
  fence_before_sync();
  __syncthreads();
  fence_after_sync();
  const u32 base = tmem, lane = base + ((u32)(warp % 4 * 32) << 16);
  const u32 q_at = shared_address(shared), keys_at = shared_address(keys);
  const int num_keys = first.num_keys + second.num_keys;
  float top = NOTHING, total = 0;
  int tile = 0;

  for (int start = 0; start < num_keys; start += KEYS, tile++) {
    if (tile > 0) mbar_wait(sums_done, (tile - 1) & 1);  // the keys before are read
    const int row = threadIdx.x / 4, place = start + row;
    int slot = -1;
    const bool is_first = place < first.num_keys;
    const Part& part = is_first ? first : second;
    if (place < num_keys)
      slot = part.slots[(i64)token * part.num_keys + place - (is_first ? 0 : first.num_keys)];
    if (threadIdx.x == 0) present = 0;
    __syncthreads();
    if (threadIdx.x % 4 == 0 && slot >= 0) atomicOr(&present, (u64)1 << row);
    load_key(keys, row, threadIdx.x % 4, part, slot);
    fence_shared_writes();
    __syncthreads();
    if (threadIdx.x == 128) {
      fence_after_sync();
      for (int step = 0; step < CHANNELS / 16; step++) {
        const int panel = step / 4, at = step % 4 * 32;
        multiply(base + SCORES, operand(q_at + panel * Q_PANEL + at, 16, 1024, SWIZZLE_128),
                 operand(keys_at + panel * KEY_PANEL + at, 16, 1024, SWIZZLE_128), step > 0);
      }
      commit(scores_done);
    }
    if (warp < 4) {
      mbar_wait(scores_done, tile & 1);
      fence_after_sync();
      const float before = top;
      top = fmaxf(top, largest_score(lane, present, scale));
      const float safe = top == NOTHING ? 0 : top;
      const float factor = before == NOTHING ? 0 : exp2f(before - safe);
      if (tile > 0 && __any_sync(~0u, factor != 1)) rescale(lane + SUMS, factor);
      total = total * factor + write_chances(lane, present, scale, safe);
      fence_before_sync();
    }
    __syncthreads();
    if (threadIdx.x == 128) {
      fence_after_sync();
      for (int step = 0; step < KEYS / 16; step++) {  // 64 channels are a panel, 8 keys 1,024 bytes
        const u32 at = keys_at + half * (PANELS / 2) * KEY_PANEL + step * 2048;
        multiply_chances(base + SUMS, base + CHANCES + 8 * step,
                         operand(at, KEY_PANEL, 1024, SWIZZLE_128), tile + step > 0);
      }
      commit(sums_done);
    }
  }

  if (warp < 4) {
    if (tile > 0) mbar_wait(sums_done, (tile - 1) & 1);
    fence_after_sync();
    const int head = threadIdx.x;
    float factor = 1;
    if (sink != nullptr) {
      const float logit = sink[head] * 1.4426950408889634f, most = fmaxf(top, logit);
      factor = top == NOTHING ? 0 : exp2f(top - most);
      total = total * factor + exp2f(logit - most);
    }
    const float inverse = total > 0 ? factor / total : 0;
    u8* to = out + (((i64)token * HEAD_ROWS + head) * CHANNELS + half * HALF) * 2;
    for (int column = 0; column < HALF; column += 16) {
      u32 sums[16] = {};
      if (tile > 0) {
        tmem_load(sums, lane + SUMS + column);
        wait_loads();
      }
      u32 packed[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        packed[i] = pack_bf16(__uint_as_float(sums[2 * i]) * inverse,
                         __uint_as_float(sums[2 * i + 1]) * inverse);
      *(uint4*)(to + 2 * column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
      *(uint4*)(to + 2 * column + 16) = make_uint4(packed[4], packed[5], packed[6], packed[7]);
    }
    fence_before_sync();
  }
  __syncthreads();
  if (warp == 5) {
    fence_after_sync();
    tmem_free(base, TMEM_COLUMNS);
  }
}
