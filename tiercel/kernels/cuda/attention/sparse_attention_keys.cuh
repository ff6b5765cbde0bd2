// How DeepSeek-V4's attention finds the vectors that a token lists, and decodes them. A key is listed
// by its slot, by its entry of a paged sequence, or as one of a run of entries.
#pragma once

#include "include/global_ptx.cuh"
#include "include/half_ptx.cuh"

struct Part {
  const u8 *cache, *scales;
  const void* list;    // (tokens, num_keys) slots or entries
  const void* ends;    // (tokens,) int32, or int64 if has_long_ends
  const int* tables;   // (rows, columns)
  const i64* rows;     // (tokens,) of the tables
  i64 block_bytes, entry_bytes, scale_block_bytes, scale_entry_bytes;
  int num_keys, list_stride, table_stride, per_block;
  u32 magic, shift;  // n / per_block is the high word of n x magic, >> shift; magic 0: n
  int has_long_ends;
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
    const int end = part.has_long_ends ? (int)((const i64*)part.ends)[token] : ((const int*)part.ends)[token];
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
// Block of an entry that is there, and the entry's index in it. Entries are below 2^31: a division of
// 64 bits took a third of the time of a tile.
struct Spot { i64 block; int index; };
template <int KIND> DEV Spot spot_of(const Part& part, const Keys& keys, i64 entry) {
  const u32 number = (u32)entry;
  const u32 block = part.magic ? __umulhi(number, part.magic) >> part.shift : number;
  const int index = (int)(number - block * part.per_block);
  return {KIND == 0 ? (i64)block : (i64)keys.table[block], index};
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
constexpr u32 LARGEST = 134;  // scale of one factor
struct Factor { u32 first, second; };
DEV u32 pair_of(u32 exponent) { return exponent * 0x00800080u; }
DEV Factor factor_of(u32 scale) {
  if (scale <= LARGEST) return {pair_of(scale + 120), pair_of(127)};
  return {pair_of(254), scale == 255 ? 0x7fc07fc0u : pair_of(scale - 7)};  // 255 is NaN
}
// Four E4M3 as two pairs of the bfloat16 with the same bits, times 2^-120.
DEV void spread_e4m3(u32 word, u32& first, u32& second) {
  const u32 high = (word & 0x80808080u) | (word >> 4 & 0x07070707u), low = word << 4 & 0xf0f0f0f0u;
  first = __byte_perm(low, high, 0x5140), second = __byte_perm(low, high, 0x7362);
}
DEV void widen_e4m3(u32 word, const Factor& factor, u32& first, u32& second) {
  spread_e4m3(word, first, second);
  first = mul_bf16x2(mul_bf16x2(first, factor.first), factor.second);
  second = mul_bf16x2(mul_bf16x2(second, factor.first), factor.second);
}
