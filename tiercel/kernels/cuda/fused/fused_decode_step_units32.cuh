// fused_decode_step: products of units of types with blocks of 32 weights (Q4_0, Q5_0, Q8_0, IQ4_NL)
// and of IQ4_XS, as fused_decode_step_units.cuh has those of other types.
//
// A slot has 64 bytes of codes for each lane, unit by unit (4 chunks of 16 bytes for each lane of a
// unit), and then headers for each lane, by lane. A lane has 4 groups of 32 weights:
//
//   Q4_0, Q5_0, IQ4_NL  chunk = group, nibbles; header 8 bytes: d of each group as a half
//   Q5_0                part C as Q5_K
//   IQ4_XS              chunk = group, nibbles; header 8 bytes for two lanes, as in the file
//   Q8_0                two slots: groups 0 and 1, then 2 and 3, two chunks each; header 4 bytes
//
// Nibbles of Q4_0 and Q5_0 are those of the file; those of IQ4 are in the order of weights, because
// one instruction turns four neighbours into values.
#pragma once

#include "fused/fused_decode_step_units.cuh"

// at: lanes of the slot's units before this one, of `slot_lanes`.
DEV void load_codes(Q4& w, int type, u32 slot, int at, int lanes, int slot_lanes, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) w.q[i] = load_shared<uint4>(slot + 64 * at + i * 16 * lanes + lane * 16);
  const u32 headers = slot + 64 * slot_lanes;
  uint2 pair = {};
  if (HAS(Q8_0) && type == Q8_0)
    pair.x = load_shared<u32>(headers + 4 * (at + lane));
  else if (HAS(IQ4_XS) && type == IQ4_XS)
    pair = load_shared<uint2>(headers + 8 * ((at + lane) >> 1));
  else
    pair = load_shared<uint2>(headers + 8 * (at + lane));
  w.header.x = pair.x, w.header.y = pair.y;
}
// Factors of group `group`, of four halves.
DEV float group_d(const uint4& header, int group) {
  return half_to_float((u16)((group & 2 ? header.y : header.x) >> (16 * (group & 1))));
}
// The scale of a group's activations, which odd groups hold / 16.
DEV float group_scale(const Act& a, int group) {
  return group & 1 ? 16.f * a.scale[group] : a.scale[group];
}

DEV float dot_q4_0(const Q4& w, const Act& a) {
  float y = 0;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const uint4 q = w.q[group], al = a.codes[2 * group], ah = a.codes[2 * group + 1];
    int lo = 0, hi = 0;  // 16 times the sum of high nibbles
    lo = dp4a_us(q.x & 0x0f0f0f0f, al.x, lo), hi = dp4a_us(q.x & 0xf0f0f0f0, ah.x, hi);
    lo = dp4a_us(q.y & 0x0f0f0f0f, al.y, lo), hi = dp4a_us(q.y & 0xf0f0f0f0, ah.y, hi);
    lo = dp4a_us(q.z & 0x0f0f0f0f, al.z, lo), hi = dp4a_us(q.z & 0xf0f0f0f0, ah.z, hi);
    lo = dp4a_us(q.w & 0x0f0f0f0f, al.w, lo), hi = dp4a_us(q.w & 0xf0f0f0f0, ah.w, hi);
    const float sixteenth = group & 1 ? a.scale[group] : 0.0625f * a.scale[group];
    y += group_d(w.header, group) * ((float)(16 * lo + hi) * sixteenth - 8.f * a.sum[group]);
  }
  return y;
}

// high: see fifth_bits.
DEV float dot_q5_0(const Q4& w, const uint4& high, const Act& a) {
  const u32 h[4] = {high.x, high.y, high.z, high.w};
  float y = 0;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const u32 codes[4] = {w.q[group].x, w.q[group].y, w.q[group].z, w.q[group].w};
    int sum = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = a.codes[2 * group + half];
      const u32 xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 nibbles = (half ? codes[j] >> 4 : codes[j]) & 0x0f0f0f0f;
        sum = dp4a_us(nibbles | fifth_bits(h[j], group, half), xs[j], sum);
      }
    }
    y += group_d(w.header, group) * ((float)sum * group_scale(a, group) - 16.f * a.sum[group]);
  }
  return y;
}

// HALF: groups 0 and 1 of a lane, or 2 and 3.
template <int HALF> DEV float dot_q8_0(const Q4& w, const Act& a) {
  float y = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int sum = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint4 q = w.q[2 * i + k], x = a.codes[4 * HALF + 2 * i + k];
      sum = dp4a_ss(q.x, x.x, sum), sum = dp4a_ss(q.y, x.y, sum);
      sum = dp4a_ss(q.z, x.z, sum), sum = dp4a_ss(q.w, x.w, sum);
    }
    y += group_d(w.header, i) * group_scale(a, 2 * HALF + i) * (float)sum;
  }
  return y;
}

// The sum over 8 weights: nibbles of q in order. A nibble with its highest bit set selects a sign
// instead of a byte: -1 of the negative values 0 to 7, 0 of the others once the nibble is flipped. So
// values 8 to 15 are stored plus 1, and the sum of both selections is exact.
DEV int dot_iq4_word(u32 q, u32 first, u32 second, int sum) {
  constexpr u32 LOW0 = 0xbfad9881, LOW1 = 0xf6eaddcf;    // -127 -104 -83 -65, -49 -35 -22 -10
  constexpr u32 HIGH0 = 0x271a0e02, HIGH1 = 0x725a4636;  // 1 13 25 38, 53 69 89 113; each plus 1
  const u32 flipped = q ^ 0x88888888;
  sum = dp4a_ss(permute(LOW0, LOW1, q), first, sum);
  sum = dp4a_ss(permute(HIGH0, HIGH1, flipped), first, sum);
  sum = dp4a_ss(permute(LOW0, LOW1, q >> 16), second, sum);
  return dp4a_ss(permute(HIGH0, HIGH1, flipped >> 16), second, sum);
}
DEV int dot_iq4_group(const uint4& q, const uint4& first, const uint4& second) {
  int sum = dot_iq4_word(q.x, first.x, first.y, 0);
  sum = dot_iq4_word(q.y, first.z, first.w, sum);
  sum = dot_iq4_word(q.z, second.x, second.y, sum);
  return dot_iq4_word(q.w, second.z, second.w, sum);
}
DEV float dot_iq4_nl(const Q4& w, const Act& a) {
  float y = 0;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const int sum = dot_iq4_group(w.q[group], a.codes[2 * group], a.codes[2 * group + 1]);
    y += group_d(w.header, group) * group_scale(a, group) * (float)sum;
  }
  return y;
}
// header: d, upper bits of 8 scales, lower nibbles: of the block's first half for even lanes.
DEV float dot_iq4_xs(const Q4& w, const Act& a, int lane) {
  const u32 low = w.header.y >> (16 * (lane & 1)), high = w.header.x >> (16 + 8 * (lane & 1));
  float y = 0;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const int scale = (int)((low >> (4 * group) & 15) | (high >> (2 * group) & 3) << 4) - 32;
    const int sum = dot_iq4_group(w.q[group], a.codes[2 * group], a.codes[2 * group + 1]);
    y += (float)(scale * sum) * group_scale(a, group);
  }
  return half_to_float((u16)w.header.x) * y;
}
