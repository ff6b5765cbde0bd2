// decode_attention: where the keys of a request are split, and how sums of splits are added.
//
// Splits end at fixed positions, so that no sum depends on the batch: every FINE_KEYS up to
// FINE_END, every MIDDLE_KEYS up to MIDDLE_END, every COARSE_KEYS beyond
// (decode_attention_split.py).
#pragma once

#include "include/attention_ptx.cuh"

#define FINE (FINE_END / FINE_KEYS)
#define MIDDLE (FINE + (MIDDLE_END - FINE_END) / MIDDLE_KEYS)
#define GROUP 8  // splits whose sum is added to a row's; the first one has an index divisible by it
#define NEG_INF (-__int_as_float(0x7f800000))

DEV int keys_of_split(int key) {
  return key < FINE_END ? FINE_KEYS : key < MIDDLE_END ? MIDDLE_KEYS : COARSE_KEYS;
}
DEV int split_of(int key) {
  if (key < FINE_END) return key / FINE_KEYS;
  if (key < MIDDLE_END) return FINE + (key - FINE_END) / MIDDLE_KEYS;
  return MIDDLE + (key - MIDDLE_END) / COARSE_KEYS;
}
DEV int split_start(int split) {
  if (split < FINE) return split * FINE_KEYS;
  if (split < MIDDLE) return FINE_END + (split - FINE) * MIDDLE_KEYS;
  return MIDDLE_END + (split - MIDDLE) * COARSE_KEYS;
}

// The new tokens of a request, and its keys that any of them sees: low .. seq_len - 1.
struct Request {
  int first_token, queries, seq_len, low;
  DEV void load(int request, const int* cu_seqlens, const int* seq_lens, int window) {
    first_token = cu_seqlens[request];
    queries = cu_seqlens[request + 1] - first_token;
    seq_len = seq_lens[request];
    low = max(seq_len - queries - window + 1, 0);
  }
};

// Sums over splits: one at a time, in order, wherever it is done. The maximum rises to `most`; the
// weight of what comes is returned, that of what is there is `decay`.
DEV float rise(float& maximum, float most, float& decay) {
  const float both = fmaxf(maximum, most), shift = both == NEG_INF ? 0.f : both;
  decay = exp2_approx(maximum - shift);
  maximum = both;
  return exp2_approx(most - shift);
}
DEV float add_scaled(float sum, float decay, float x, float weight) {
  return __fmaf_rn(sum, decay, __fmul_rn(x, weight));
}
