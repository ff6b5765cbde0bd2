// sparse_attention_decode: DeepSeek-V4's attention of few tokens over listed encoded vectors, which
// are keys and values of all heads. Host side, floor: kernels/attention/sparse_attention_decode.py.
//
// A cluster of CLUSTER CTAs takes one token and 16 heads; each CTA takes an equal share of the
// token's keys, in units of 16, and the CTAs add up their sums in order through each other's shared
// memory. Where shares end depends on the token's own keys alone.
//
// A warp takes 64 channels: one group of E4M3 with its scale, or the bfloat16 channels. A lane loads
// 16 channels of one key of 8, decodes them to pairs of bfloat16, and these are B of the products
// with the queries as they are: within a product the order of channels is free, if queries have the
// same. Transposed by movmatrix, they are B of the products with the weights. So keys never pass
// shared memory; scores do, to be added over the warps:
//
//   partial   WARPS x NT x 32 lanes x 16 bytes   scores of a warp's channels, as products leave them
//   weights   NT x 32 lanes x 8 bytes            as A of the second products
//   rows      TILE x 16 bytes                    addresses of vector and scales; 0: no key
//   tops      WARPS x 16 floats, then sums       of a warp's keys, by head
//   out       16 x OUT floats, in `partial`; then maxima and totals of the CTA, in `tops`
//
// Macros: TILE (keys of a turn), CLUSTER, CTAS (per SM), KIND0, KIND1 (how keys are listed, see
// sparse_attention_keys.cuh), LONG0, LONG1 (whether a list is int64).
#include "attention/decode_attention_ptx.cuh"
#include "attention/sparse_attention_keys.cuh"
#include "include/cluster_ptx.cuh"

#define WARPS 8
#define D 512
#define HEADS 16
#define NT (TILE / 8)
#define OUT (D + 8)
#define OWN ((NT + WARPS - 1) / WARPS)
#define LOG2_E 1.4426950408889634f
#define NONE __int_as_float(0xff800000)
#define PARTIAL_BYTES \
  (WARPS * NT * 512 > HEADS * OUT * 4 ? WARPS * NT * 512 : HEADS * OUT * 4)
#define WEIGHTS_AT PARTIAL_BYTES
#define ROWS_AT (WEIGHTS_AT + NT * 256)
#define TOPS_AT (ROWS_AT + TILE * 16)
#define SUMS_AT (TOPS_AT + WARPS * HEADS * 4)

// Addresses of a key's vector and scales; 0 without a key.
template <int KIND, int IS_LONG>
DEV void locate(const Part& part, const Keys& keys, int token, int place, u64& row, u64& scales) {
  row = scales = 0;
  const i64 entry = entry_at<KIND, IS_LONG>(part, keys, token, place);
  if (entry < 0) return;
  const Spot spot = spot_of<KIND>(part, keys, entry);
  row = row_of(part, spot), scales = scales_of(part, spot);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(32 * WARPS, CTAS) sparse_attention_decode(
    u8* out,             // (tokens, heads, D) bfloat16
    const u8* q,         // (tokens, heads, D) bfloat16
    const float* sinks,  // (heads,) or null
    Part part0, Part part1,
    i64 q_token_bytes, i64 q_head_bytes,
    int heads, float scale_log2) {
  launch_dependents();
  const u32 memory_at = shared_base();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, quad = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_head = blockIdx.x / CLUSTER * HEADS;
  const int token = blockIdx.y;
  wait_for_inputs();
  const Keys keys0 = keys_of<KIND0>(part0, token), keys1 = keys_of<KIND1>(part1, token);
  const int units0 = (keys0.count + 15) / 16, units = units0 + (keys1.count + 15) / 16;
  const int share = (units + CLUSTER - 1) / CLUSTER;
  const int last = min((rank + 1) * share, units);

  u32 queries[4][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u8* row = q + token * q_token_bytes + (first_head + group + 8 * half) * q_head_bytes;
    const uint4* from = (const uint4*)(row + 2 * (64 * warp + 16 * quad));
    const uint4 a = from[0], b = from[1];
    queries[0][half] = a.x, queries[0][2 + half] = a.y, queries[1][half] = a.z;
    queries[1][2 + half] = a.w, queries[2][half] = b.x, queries[2][2 + half] = b.y;
    queries[3][half] = b.z, queries[3][2 + half] = b.w;
  }
  float sums[8][4] = {};
  float top[2] = {NONE, NONE}, total[2] = {0.f, 0.f};

  for (int unit = rank * share; unit < last; unit += TILE / 16) {
    for (int key = threadIdx.x; key < TILE; key += 32 * WARPS) {
      const int at = unit + key / 16;
      u64 row = 0, scales = 0;
      if (at < min(units0, last))
        locate<KIND0, LONG0>(part0, keys0, token, 16 * at + key % 16, row, scales);
      else if (at < last)
        locate<KIND1, LONG1>(part1, keys1, token, 16 * (at - units0) + key % 16, row, scales);
      store_shared<u64>(memory_at + ROWS_AT + 16 * key, row);
      store_shared<u64>(memory_at + ROWS_AT + 16 * key + 8, scales);
    }
    __syncthreads();

    u32 keys[NT][8];
    u32 scale_bytes[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const u32 at = memory_at + ROWS_AT + 16 * (8 * n + group);
      const u64 row = load_shared<u64>(at), scales = load_shared<u64>(at + 8);
      const u8* from = (const u8*)row + (warp < 7 ? 64 * warp + 16 * quad : 448 + 32 * quad);
      uint4 a = make_uint4(0, 0, 0, 0), b = a;
      scale_bytes[n] = 127;
      if (row) {
        a = load_no_allocate<uint4>(from);
        if (warp == 7) b = load_no_allocate<uint4>(from + 16);
        else scale_bytes[n] = ((const u8*)scales)[warp];
      }
      keys[n][0] = a.x, keys[n][1] = a.y, keys[n][2] = a.z, keys[n][3] = a.w;
      keys[n][4] = b.x, keys[n][5] = b.y, keys[n][6] = b.z, keys[n][7] = b.w;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (warp < 7) {
        const Factor factor = factor_of(scale_bytes[n]);
#pragma unroll
        for (int j = 3; j >= 0; --j)
          widen_e4m3(keys[n][j], factor, keys[n][2 * j], keys[n][2 * j + 1]);
      }
      float scores[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(scores, queries[j], keys[n][2 * j], keys[n][2 * j + 1]);
      store_shared<float4>(memory_at + 16 * ((warp * NT + n) * 32 + lane),
                   make_float4(scores[0], scores[1], scores[2], scores[3]));
    }
    __syncthreads();

    // A warp adds up the scores of keys 8 n to 8 n + 7, n = warp, warp + WARPS.
    float own[OWN][4];
    float best[2] = {NONE, NONE};
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int n = warp + WARPS * i;
      own[i][0] = own[i][1] = own[i][2] = own[i][3] = NONE;
      if (n >= NT) continue;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float4 y = load_shared<float4>(memory_at + 16 * ((w * NT + n) * 32 + lane));
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      const u32 at = memory_at + ROWS_AT + 16 * (8 * n + 2 * quad);
      if (load_shared<u64>(at)) own[i][0] = x.x * scale_log2, own[i][2] = x.z * scale_log2;
      if (load_shared<u64>(at + 16)) own[i][1] = x.y * scale_log2, own[i][3] = x.w * scale_log2;
      best[0] = fmaxf(best[0], fmaxf(own[i][0], own[i][1]));
      best[1] = fmaxf(best[1], fmaxf(own[i][2], own[i][3]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(best[half], __shfl_xor_sync(~0u, best[half], 1));
      best[half] = fmaxf(best[half], __shfl_xor_sync(~0u, best[half], 2));
      if (quad == 0)
        store_shared<float>(memory_at + TOPS_AT + 4 * (warp * HEADS + group + 8 * half), best[half]);
    }
    __syncthreads();

    float decay[2], shift[2], part[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = top[half];
#pragma unroll
      for (int w = 0; w < WARPS; ++w)
        most = fmaxf(most, load_shared<float>(memory_at + TOPS_AT + 4 * (w * HEADS + group + 8 * half)));
      shift[half] = most == NONE ? 0.f : most;  // no key so far
      decay[half] = exp2_approx(top[half] - shift[half]);
      top[half] = most;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int n = warp + WARPS * i;
      if (n >= NT) continue;
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        p[e] = exp2_approx(own[i][e] - shift[e / 2]), part[e / 2] += p[e];
      store_shared<uint2>(memory_at + WEIGHTS_AT + 8 * (n * 32 + lane),
                  make_uint2(pack(p[0], p[1]), pack(p[2], p[3])));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part[half] += __shfl_xor_sync(~0u, part[half], 1);
      part[half] += __shfl_xor_sync(~0u, part[half], 2);
      if (quad == 0)
        store_shared<float>(memory_at + SUMS_AT + 4 * (warp * HEADS + group + 8 * half), part[half]);
    }
    __syncthreads();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w)
        sum += load_shared<float>(memory_at + SUMS_AT + 4 * (w * HEADS + group + 8 * half));
      total[half] = total[half] * decay[half] + sum;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i][0] *= decay[0], sums[i][1] *= decay[0];
      sums[i][2] *= decay[1], sums[i][3] *= decay[1];
    }
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      const uint2 a = load_shared<uint2>(memory_at + WEIGHTS_AT + 8 * (2 * pair * 32 + lane));
      const uint2 b = load_shared<uint2>(memory_at + WEIGHTS_AT + 8 * ((2 * pair + 1) * 32 + lane));
      const u32 weights[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        mma(sums[i], weights, transpose(keys[2 * pair][i]), transpose(keys[2 * pair + 1][i]));
    }
  }

  // Sums to shared memory; then each CTA adds up some of all CTAs of the cluster. Nobody reads
  // `partial` any more: all have passed the barrier behind it.
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      store_shared<float4>(memory_at + 4 * ((group + 8 * half) * OUT + 64 * warp + 16 * quad + 2 * i),
                   make_float4(sums[i][2 * half], sums[i][2 * half + 1], sums[i + 1][2 * half],
                               sums[i + 1][2 * half + 1]));
  if (warp == 0 && quad == 0)
    for (int half = 0; half < 2; ++half) {
      store_shared<float>(memory_at + TOPS_AT + 4 * (group + 8 * half), top[half]);
      store_shared<float>(memory_at + TOPS_AT + 4 * (HEADS + group + 8 * half), total[half]);
    }
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  for (int i = threadIdx.x; i < HEADS * D / 4 / CLUSTER; i += 32 * WARPS) {
    const int at = rank * (HEADS * D / 4 / CLUSTER) + i, head = at / (D / 4), column = at % (D / 4);
    float tops[CLUSTER], totals[CLUSTER];
    float4 parts[CLUSTER];
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      tops[r] = load_remote<float>(memory_at + TOPS_AT + 4 * head, r);
      totals[r] = load_remote<float>(memory_at + TOPS_AT + 4 * (HEADS + head), r);
      parts[r] = load_remote<float4>(memory_at + 4 * (head * OUT + 4 * column), r);
    }
    const float sink = sinks ? sinks[first_head + head] * LOG2_E : NONE;
    float most = sink;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) most = fmaxf(most, tops[r]);
    if (most == NONE) most = 0.f;
    float sum = exp2_approx(sink - most);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float weight = exp2_approx(tops[r] - most);
      sum += weight * totals[r];
      x.x += weight * parts[r].x, x.y += weight * parts[r].y;
      x.z += weight * parts[r].z, x.w += weight * parts[r].w;
    }
    const float factor = 1.f / (sum == 0.f ? 1.f : sum);  // without keys the sums are 0
    const i64 row = ((i64)token * heads + first_head + head) * D;
    *(uint2*)(out + 2 * (row + 4 * column)) =
        make_uint2(pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor));
  }
#if CLUSTER > 1
  cluster_sync();  // nobody leaves while its memory is read
#endif
}
