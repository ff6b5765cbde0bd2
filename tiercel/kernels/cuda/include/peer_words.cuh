// Words that GPUs store into each other's memory: 4 bytes of data and the 4 of an epoch, which says
// which launch wrote them. A word is written and read whole, so it needs no fence and no flag.
#pragma once

#include "include/peers_ptx.cuh"

DEV Words words(u32 first, u32 second, u32 epoch) {
  return {first | (u64)epoch << 32, second | (u64)epoch << 32};
}
DEV u64 word(u32 value, u32 epoch) { return value | (u64)epoch << 32; }
DEV u32 epoch_of_word(u64 word) { return (u32)(word >> 32); }
DEV bool has_epoch(const Words& v, u32 epoch) {
  return (u32)(v.first >> 32) == epoch && (u32)(v.second >> 32) == epoch;
}
