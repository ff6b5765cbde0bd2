// How DeepSeek-V4's attention finds the vectors that a token lists, and decodes them. A key is listed
// by its slot, by its entry of a paged sequence, or as one of a run of entries.
#pragma once

#include "attention/sparse_attention_ptx.cuh"

struct Part {
  const u8 *cache, *scales;
  const void* list;    // (tokens, num_keys) slots or entries
  const i64* ends;     // (tokens,)
  const int* tables;   // (rows, columns)
  const i64* rows;     // (tokens,) of the tables
  i64 block_bytes, entry_bytes, scale_block_bytes, scale_entry_bytes;
  int num_keys, list_stride, table_stride, per_block;
};
// Keys of a token: how many places its list has, the first entry of a run, its row of the tables.
struct Keys { int count, start; const int* table; };

// KIND, here and below: 0 slots, 1 chosen entries, 2 a run of entries, 3 no such part.
template <int KIND> DEV Keys keys_of(const Part& part, int token) {
  Keys keys = {0, 0, nullptr};
  if (KIND == 3) return keys;
  keys.count = part.num_keys;
  if (KIND != 0) keys.table = part.tables + part.rows[token] * part.table_stride;
  if (KIND == 2) {
    const int end = (int)part.ends[token];
    keys.start = end > part.num_keys ? end - part.num_keys : 0;
    keys.count = end < part.num_keys ? end : part.num_keys;
  }
  return keys;
}
// Entry, or slot, at a place of the list; negative: no key.
template <int KIND, int IS_LONG>
DEV i64 entry_at(const Part& part, const Keys& keys, int token, int place) {
  if (KIND == 3 || place >= keys.count) return -1;
  if (KIND == 2) return keys.start + place;
  const i64 at = (i64)token * part.list_stride + place;
  return IS_LONG ? ((const i64*)part.list)[at] : (i64)((const int*)part.list)[at];
}
// Block of an entry that is there, and the entry's index in it.
struct Spot { i64 block; int index; };
template <int KIND> DEV Spot spot_of(const Part& part, const Keys& keys, i64 entry) {
  i64 block = (i64)((u64)entry / (u32)part.per_block);
  const int index = (int)(entry - block * part.per_block);
  if (KIND != 0) block = keys.table[block];
  return {block, index};
}
DEV u64 row_of(const Part& part, const Spot& spot) {
  return (u64)(part.cache + spot.block * part.block_bytes + spot.index * part.entry_bytes);
}
DEV u64 scales_of(const Part& part, const Spot& spot) {
  return (u64)(part.scales + spot.block * part.scale_block_bytes +
               spot.index * part.scale_entry_bytes);
}

// What numbers of a group are multiplied with: a pair of the bfloat16 2^(scale - 7), and a second one
// where that is out of range.
struct Factor { u32 first, second; bool is_large; };
DEV u32 pair_of(u32 exponent) { return exponent << 7 | exponent << 23; }
DEV Factor factor_of(u32 scale) {
  const bool is_large = scale > 134;
  const u32 rest = scale == 255 ? 0x7fc07fc0u : pair_of(scale - 7);  // 2^(scale - 134); 255 is NaN
  return {pair_of(is_large ? 254 : scale + 120), is_large ? rest : 0, is_large};
}
// Four E4M3 as two pairs of bfloat16: their bits are those of a bfloat16, times 2^120.
DEV void widen_e4m3(u32 word, const Factor& factor, u32& first, u32& second) {
  const u32 low = __byte_perm(word, 0, 0x1404), high = __byte_perm(word, 0, 0x3424);
  first = multiply_pairs((low & 0x80008000u) | (low >> 4 & 0x07f007f0u), factor.first);
  second = multiply_pairs((high & 0x80008000u) | (high >> 4 & 0x07f007f0u), factor.first);
  if (factor.is_large)
    first = multiply_pairs(first, factor.second), second = multiply_pairs(second, factor.second);
}
