// fused_decode_step: activations of the tokens of a launch and their products with a unit's weights.
//
// Those of one token are as fused_decode_step_units.cuh has them. Of two, scales and sums would take
// more registers than there are: a lane keeps 64 of codes and reads the rest again for each unit from
// shared memory. Each word of weights is decoded once, and multiplied by both. What is added is the
// same in the same order as of one token, so results have the same bits.
#pragma once

#include "fused/fused_decode_step_exchange.cuh"
#include "fused/fused_decode_step_units32.cuh"

#if TOKENS == 1
typedef Act Acts;
typedef float Sums;  // of each token
DEV float of(Sums y, int) { return y; }
// column: the first of the lane's, / 128.
DEV Acts load_acts(const Input& in, int column) {
  return load_act(in.act, in.pitch, in.scales, in.sums, column);
}
#else
struct Sums {
  float tokens[TOKENS];
  DEV float& operator[](int token) { return tokens[token]; }
};
DEV float of(const Sums& y, int token) { return y.tokens[token]; }
DEV Sums operator+(const Sums& a, const Sums& b) {
  Sums sum;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) sum.tokens[t] = a.tokens[t] + b.tokens[t];
  return sum;
}

// In shared memory a token has three planes of 16 bytes for each lane: terms of its first two groups,
// of the others, and packed sums of 16.
struct Terms { float scale[2], sum[2]; };
struct GroupTerms { float scale, sum; };
struct Acts {
  uint4 codes[TOKENS][8];
  u32 at;  // of the lane in the first plane of the first token
  DEV u32 plane(int token, int i) const { return at + (TERM_PLANES * token + i) * PLANE; }
  DEV Terms terms(int token, int c) const {
    const float4 v = load_shared<float4>(plane(token, c));
    return {{v.x, v.y}, {v.z, v.w}};
  }
  DEV u32 sums(int token, int group) const { return load_shared<u32>(plane(token, 2) + 4 * group); }
};
DEV Acts load_acts(const Input& in, int column) {
  Acts a;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
#pragma unroll
    for (int c = 0; c < 8; ++c)
      a.codes[t][c] = load_shared<uint4>(in.act + (8 * t + c) * in.pitch + column * 16);
  a.at = in.scales + 16 * column;
  return a;
}
DEV u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Adds four unsigned weights times word `word` of chunk `chunk` of each token.
DEV void add_products(int (&sums)[TOKENS], u32 weights, const Acts& a, int chunk, int word) {
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
    sums[t] = dp4a_us(weights, word_of(a.codes[t][chunk], word), sums[t]);
}
// The same of signed weights.
DEV void add_signed(int (&sums)[TOKENS], u32 weights, const Acts& a, int chunk, int word) {
#pragma unroll
  for (int t = 0; t < TOKENS; ++t)
    sums[t] = dp4a_ss(weights, word_of(a.codes[t][chunk], word), sums[t]);
}

DEV Sums dot_q4(const Q4& w, const Acts& a, int lane) {
  const SixBits six = six_bits(w.header, lane);
  const u32 sc = six.scales, mn = six.minima;
  Sums acc = {}, min = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    int lo[TOKENS] = {}, hi[TOKENS] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 q = word_of(w.q[2 * c + k], j);
        add_products(lo, q & 0x0f0f0f0f, a, 4 * c + k, j);
        add_products(hi, q & 0xf0f0f0f0, a, 4 * c + 2 + k, j);
      }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const Terms terms = a.terms(t, c);
      acc[t] += (float)(lo[t] * (int)((sc >> (16 * c)) & 0xff)) * terms.scale[0];
      acc[t] += (float)(hi[t] * (int)((sc >> (16 * c + 8)) & 0xff)) * terms.scale[1];
      min[t] += (float)((mn >> (16 * c)) & 0xff) * terms.sum[0];
      min[t] += (float)((mn >> (16 * c + 8)) & 0xff) * terms.sum[1];
    }
  }
  const float d = half_to_float((u16)w.header.x), dmin = half_to_float((u16)(w.header.x >> 16));
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) acc[t] = d * acc[t] - dmin * min[t];
  return acc;
}

DEV Sums dot_q5(const Q5& w, const Acts& a, int lane) {
  const SixBits six = six_bits(w.low.header, lane);
  const u32 h[4] = {w.high.x, w.high.y, w.high.z, w.high.w};
  Sums acc = {}, min = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    int sum[TOKENS] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = w.low.q[2 * (group >> 1) + half];
      const u32 codes[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 nibbles = (group & 1 ? codes[j] >> 4 : codes[j]) & 0x0f0f0f0f;
        add_products(sum, nibbles | fifth_bits(h[j], group, half), a, 2 * group + half, j);
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const Terms terms = a.terms(t, group >> 1);
      const float own = terms.scale[group & 1], scale = group & 1 ? 16 * own : own;
      acc[t] += (float)(sum[t] * (int)((six.scales >> (8 * group)) & 0xff)) * scale;
      min[t] += (float)((six.minima >> (8 * group)) & 0xff) * terms.sum[group & 1];
    }
  }
  const float d = half_to_float((u16)w.low.header.x);
  const float dmin = half_to_float((u16)(w.low.header.x >> 16));
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) acc[t] = d * acc[t] - dmin * min[t];
  return acc;
}

DEV u32 codes_q6(const Q6& w, int group, int k, int j) {
  const u32 low = word_of(w.low[2 * (group & 1) + k], j), h = word_of(w.high[k], j);
  const u32 high = group == 0 ? h << 4 : group == 1 ? h << 2 : group == 2 ? h : h >> 2;
  return ((group & 2 ? low >> 4 : low) & 0x0f0f0f0f) | (high & 0x30303030);
}
// A group after the other: sums of all at once would not fit registers.
DEV Sums dot_q6(const Q6& w, const Acts& a) {
  int t[4][TOKENS] = {};
#pragma unroll
  for (int g = 0; g < 4; ++g)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      int e[TOKENS];
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) e[i] = -32 * sum16(a.sums(i, g), k);
#pragma unroll
      for (int j = 0; j < 4; ++j) add_products(e, codes_q6(w, g, k, j), a, 2 * g + k, j);
#pragma unroll
      for (int i = 0; i < TOKENS; ++i)
        t[g][i] += e[i] * (int)(signed char)(w.scales[g >> 1] >> (16 * (g & 1) + 8 * k));
    }
  Sums y;
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const Terms first = a.terms(i, 0), second = a.terms(i, 1);
    y[i] =
        half_to_float((u16)w.d) *
        ((float)t[0][i] * first.scale[0] + (float)t[2][i] * second.scale[0] +
         16.f * ((float)t[1][i] * first.scale[1] + (float)t[3][i] * second.scale[1]));
  }
  return y;
}

DEV GroupTerms group_terms(const Acts& a, int token, int group) {
  const Terms terms = a.terms(token, group >> 1);
  return {terms.scale[group & 1], terms.sum[group & 1]};
}
DEV float whole_scale(const GroupTerms& terms, int group) {
  return group & 1 ? 16.f * terms.scale : terms.scale;
}

DEV Sums dot_q4_0(const Q4& w, const Acts& a) {
  Sums y = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    int lo[TOKENS] = {}, hi[TOKENS] = {};  // 16 times the sum of high nibbles
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 q = word_of(w.q[group], j);
      add_products(lo, q & 0x0f0f0f0f, a, 2 * group, j);
      add_products(hi, q & 0xf0f0f0f0, a, 2 * group + 1, j);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const GroupTerms terms = group_terms(a, t, group);
      const float sixteenth = group & 1 ? terms.scale : 0.0625f * terms.scale;
      y[t] +=
          group_d(w.header, group) * ((float)(16 * lo[t] + hi[t]) * sixteenth - 8.f * terms.sum);
    }
  }
  return y;
}

// high: see fifth_bits.
DEV Sums dot_q5_0(const Q4& w, const uint4& high, const Acts& a) {
  const u32 h[4] = {high.x, high.y, high.z, high.w};
  Sums y = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const u32 codes[4] = {w.q[group].x, w.q[group].y, w.q[group].z, w.q[group].w};
    int sum[TOKENS] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 nibbles = (half ? codes[j] >> 4 : codes[j]) & 0x0f0f0f0f;
        add_products(sum, nibbles | fifth_bits(h[j], group, half), a, 2 * group + half, j);
      }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const GroupTerms terms = group_terms(a, t, group);
      y[t] += group_d(w.header, group) *
                 ((float)sum[t] * whole_scale(terms, group) - 16.f * terms.sum);
    }
  }
  return y;
}

// HALF: groups 0 and 1 of a lane, or 2 and 3.
template <int HALF> DEV Sums dot_q8_0(const Q4& w, const Acts& a) {
  Sums y = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int sum[TOKENS] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        add_signed(sum, word_of(w.q[2 * i + k], j), a, 4 * HALF + 2 * i + k, j);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const float scale = whole_scale(group_terms(a, t, 2 * HALF + i), i);
      y[t] += group_d(w.header, i) * scale * (float)sum[t];
    }
  }
  return y;
}

// Nibbles of eight weights as dot_iq4_word takes them.
DEV void add_iq4_word(int (&sums)[TOKENS], u32 q, const Acts& a, int chunk, int word) {
  constexpr u32 LOW0 = 0xbfad9881, LOW1 = 0xf6eaddcf;    // -127 -104 -83 -65, -49 -35 -22 -10
  constexpr u32 HIGH0 = 0x271a0e02, HIGH1 = 0x725a4636;  // 1 13 25 38, 53 69 89 113; each plus 1
  const u32 flipped = q ^ 0x88888888;
  add_signed(sums, permute(LOW0, LOW1, q), a, chunk, word);
  add_signed(sums, permute(HIGH0, HIGH1, flipped), a, chunk, word);
  add_signed(sums, permute(LOW0, LOW1, q >> 16), a, chunk, word + 1);
  add_signed(sums, permute(HIGH0, HIGH1, flipped >> 16), a, chunk, word + 1);
}
DEV void add_iq4_group(int (&sums)[TOKENS], const uint4& q, const Acts& a, int group) {
  add_iq4_word(sums, q.x, a, 2 * group, 0);
  add_iq4_word(sums, q.y, a, 2 * group, 2);
  add_iq4_word(sums, q.z, a, 2 * group + 1, 0);
  add_iq4_word(sums, q.w, a, 2 * group + 1, 2);
}
DEV Sums dot_iq4_nl(const Q4& w, const Acts& a) {
  Sums y = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    int sum[TOKENS] = {};
    add_iq4_group(sum, w.q[group], a, group);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const float scale = whole_scale(group_terms(a, t, group), group);
      y[t] += group_d(w.header, group) * scale * (float)sum[t];
    }
  }
  return y;
}
// header: d, upper bits of 8 scales, lower nibbles: of the block's first half for even lanes.
DEV Sums dot_iq4_xs(const Q4& w, const Acts& a, int lane) {
  const u32 low = w.header.y >> (16 * (lane & 1)), high = w.header.x >> (16 + 8 * (lane & 1));
  Sums y = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const int scale = (int)((low >> (4 * group) & 15) | (high >> (2 * group) & 3) << 4) - 32;
    int sum[TOKENS] = {};
    add_iq4_group(sum, w.q[group], a, group);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      y[t] += (float)(scale * sum[t]) * whole_scale(group_terms(a, t, group), group);
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) y[t] = half_to_float((u16)w.header.x) * y[t];
  return y;
}
#endif
