// fused_decode_step: products of a unit's weights with int8 activations: some rows of some blocks of
// 256 columns, `lanes` of 128 columns in all, at most 32. A lane keeps its activations in registers:
// from shared memory they would cost four bytes of traffic for each byte of weights.
//
// Q4_K, 72 bytes a lane: 4 chunks of 16 bytes for each lane (the lane's 64 bytes of qs, in file
// order), then a file header of 16 bytes for every two. Q6_K: part A, 72 bytes = 4 chunks of ql and
// 8 bytes of scales; part C, 33 bytes = 2 chunks of qh, and elsewhere a half d for every two lanes.
// Q5_K: part A as Q4_K, part C 16 bytes: byte i has bits of weights i (low nibble, a bit a group of
// 32) and i + 16 of its groups.
// Packed by kernels/fused/fused_decode_step_stream.py. fused_decode_step_units32.cuh has other types.
#pragma once

#include "fused/fused_decode_step_ptx.cuh"

// In the order of `TYPES` of kernels/fused/fused_decode_step_geometry.py.
enum Type { Q4_K, Q6_K, Q5_K, Q4_0, Q8_0, IQ4_XS, Q5_0, IQ4_NL };
#define HAS(type) ((TYPES >> (type)) & 1)  // whether a matrix of the model has the type
// Bytes of a lane in a slot. Q8_0 has two slots for a unit, others part C for one or two.
DEV int slot_bytes(int type) { return (HAS(Q8_0) && type == Q8_0) || (HAS(IQ4_XS) && type == IQ4_XS) ? 68 : 72; }
DEV int c_bytes(int type) { return HAS(Q6_K) && type == Q6_K ? 33 : 16; }
DEV bool has_c(int type) {
  return (HAS(Q6_K) && type == Q6_K) || (HAS(Q5_K) && type == Q5_K) || (HAS(Q5_0) && type == Q5_0);
}

// The lane's 128 activations: codes in 8 chunks of 16, and per group of 32 the scale, scale * sum,
// and the two sums of 16 (13 bits each, packed). Odd groups hold scale / 16: their weights are the
// high nibbles, used in place as 16 q.
struct Act { uint4 codes[8]; float scale[4], sum[4]; u32 sums16[4]; };
DEV int sum16(u32 packed, int k) { return (int)(packed << (k ? 6 : 19)) >> 19; }
// column: the first of the lane's, / 128. Rows of chunks are `pitch` bytes apart.
DEV Act load_act(u32 act, u32 pitch, u32 scales, u32 sums, int column) {
  Act a;
#pragma unroll
  for (int c = 0; c < 8; ++c)
    a.codes[c] = load_shared<uint4>(act + c * pitch + column * 16);
  const uint4 s = load_shared<uint4>(scales + 16 * column);
  const uint4 t = load_shared<uint4>(sums + 16 * column);
  const u32 scale[4] = {s.x, s.y, s.z, s.w}, packed[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float d = __uint_as_float(scale[k]);
    a.sums16[k] = packed[k];
    a.sum[k] = d * (float)(sum16(packed[k], 0) + sum16(packed[k], 1));
    a.scale[k] = k & 1 ? d * 0.0625f : d;
  }
  return a;
}

// header: d, dmin, scales[12] of the lane's block of 256, which two lanes share.
struct Q4 { uint4 q[4], header; };
DEV void load_q4(Q4& w, u32 unit, int lanes, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) w.q[i] = load_shared<uint4>(unit + i * 16 * lanes + lane * 16);
  w.header = load_shared<uint4>(unit + 64 * lanes + (lane >> 1) * 16);
}
// Six-bit scales and minima of the lane's four groups: the block's first half for even lanes.
struct SixBits { u32 scales, minima; };
DEV SixBits six_bits(const uint4& header, int lane) {
  const u32 shift = 2 * (lane & 1), low = lane & 1 ? 0x30303030u : 0x3f3f3f3fu;
  const u32 high = lane & 1 ? 0x0f0f0f0fu : 0u;
  return {((header.y >> shift) & low) | (header.w & high),
          ((header.z >> shift) & low) | ((header.w >> 4) & high)};
}
DEV float dot_q4(const Q4& w, const Act& a, int lane) {
  const SixBits six = six_bits(w.header, lane);
  const u32 sc = six.scales, mn = six.minima;
  float acc = 0, min = 0;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    int lo = 0, hi = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint4 q = w.q[2 * c + k], al = a.codes[4 * c + k], ah = a.codes[4 * c + 2 + k];
      lo = dp4a_us(q.x & 0x0f0f0f0f, al.x, lo), hi = dp4a_us(q.x & 0xf0f0f0f0, ah.x, hi);
      lo = dp4a_us(q.y & 0x0f0f0f0f, al.y, lo), hi = dp4a_us(q.y & 0xf0f0f0f0, ah.y, hi);
      lo = dp4a_us(q.z & 0x0f0f0f0f, al.z, lo), hi = dp4a_us(q.z & 0xf0f0f0f0, ah.z, hi);
      lo = dp4a_us(q.w & 0x0f0f0f0f, al.w, lo), hi = dp4a_us(q.w & 0xf0f0f0f0, ah.w, hi);
    }
    acc += (float)(lo * (int)((sc >> (16 * c)) & 0xff)) * a.scale[2 * c];
    acc += (float)(hi * (int)((sc >> (16 * c + 8)) & 0xff)) * a.scale[2 * c + 1];
    min += (float)((mn >> (16 * c)) & 0xff) * a.sum[2 * c];
    min += (float)((mn >> (16 * c + 8)) & 0xff) * a.sum[2 * c + 1];
  }
  const float d = half_to_float((u16)w.header.x), dmin = half_to_float((u16)(w.header.x >> 16));
  return d * acc - dmin * min;
}

struct Q5 { Q4 low; uint4 high; };
DEV void load_q5(Q5& w, u32 a_part, u32 qh, int lanes, int lane) {
  load_q4(w.low, a_part, lanes, lane);
  w.high = load_shared<uint4>(qh + 16 * lane);
}
// The fifth bits of group `group` of a lane, of weights 16 half and on, as bits 4 of four bytes.
DEV u32 fifth_bits(u32 high, int group, int half) {
  const int shift = group + 4 * half - 4;
  return (shift < 0 ? high << -shift : high >> shift) & 0x10101010;
}
DEV float dot_q5(const Q5& w, const Act& a, int lane) {
  const SixBits six = six_bits(w.low.header, lane);
  const u32 h[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
  float acc = 0, min = 0;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    int sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = w.low.q[2 * (group >> 1) + half], x = a.codes[2 * group + half];
      const u32 codes[4] = {q.x, q.y, q.z, q.w}, xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 nibbles = (group & 1 ? codes[j] >> 4 : codes[j]) & 0x0f0f0f0f;
        sum = dp4a_us(nibbles | fifth_bits(h[j], group, half), xs[j], sum);
      }
    }
    const float scale = group & 1 ? 16 * a.scale[group] : a.scale[group];
    acc += (float)(sum * (int)((six.scales >> (8 * group)) & 0xff)) * scale;
    min += (float)((six.minima >> (8 * group)) & 0xff) * a.sum[group];
  }
  return half_to_float((u16)w.low.header.x) * acc -
         half_to_float((u16)(w.low.header.x >> 16)) * min;
}

struct Q6 { uint4 low[4], high[2]; u32 scales[2], d; };
DEV void load_q6(Q6& w, u32 a_part, u32 qh, u32 d, int lanes, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) w.low[i] = load_shared<uint4>(a_part + i * 16 * lanes + lane * 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) w.high[i] = load_shared<uint4>(qh + i * 16 * lanes + lane * 16);
  const uint2 scales = load_shared<uint2>(a_part + 64 * lanes + lane * 8);
  w.scales[0] = scales.x, w.scales[1] = scales.y;
  w.d = load_shared_half(d + (lane >> 1) * 2);
}
DEV float dot_q6(const Q6& w, const Act& a) {
  int t[4] = {0, 0, 0, 0};  // by group of 32
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint4 L = w.low[k], M = w.low[2 + k], H = w.high[k];
    const u32 l[4] = {L.x, L.y, L.z, L.w}, m[4] = {M.x, M.y, M.z, M.w}, h[4] = {H.x, H.y, H.z, H.w};
    int e[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) e[g] = -32 * sum16(a.sums16[g], k);  // weights are q - 32
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 q[4] = {(l[j] & 0x0f0f0f0f) | ((h[j] << 4) & 0x30303030),
                        (m[j] & 0x0f0f0f0f) | ((h[j] << 2) & 0x30303030),
                        ((l[j] >> 4) & 0x0f0f0f0f) | (h[j] & 0x30303030),
                        ((m[j] >> 4) & 0x0f0f0f0f) | ((h[j] >> 2) & 0x30303030)};
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const uint4 x = a.codes[2 * g + k];
        e[g] = dp4a_us(q[g], j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w, e[g]);
      }
    }
#pragma unroll
    for (int g = 0; g < 4; ++g)
      t[g] += e[g] * (int)(signed char)(w.scales[g >> 1] >> (16 * (g & 1) + 8 * k));
  }
  return half_to_float((u16)w.d) * ((float)t[0] * a.scale[0] + (float)t[2] * a.scale[2] +
                                    16.f * ((float)t[1] * a.scale[1] + (float)t[3] * a.scale[3]));
}
