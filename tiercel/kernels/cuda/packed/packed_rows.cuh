// Layout STEP (quant_types.py): units of Q4_K and Q6_K from the weights of fused_decode_step to the
// slots of packed_units.cuh. kernels/fused/fused_decode_step_rows.py describes the table.
//
// Two lanes copy a row's block of 256 columns, in pieces of 16 bytes; pairs of them are whole
// sectors of memory. Slots are those of planes, but for d of Q6_K: a copy has at least 4 bytes, so a
// row has a pair of d, and a word behind them says by a bit for each lane which one is the row's.
#pragma once

#include "include/types.cuh"

struct StepBlock {  // a block of a row
  const u8* unit;
  u32 apart, own, count;  // of the table; which block of the unit, of how many
  DEV const u8* codes(int i, int half) const { return unit + 32 * (i * count + own) + 16 * half; }
  DEV const u8* header() const { return unit + 128 * count + 16 * own; }
  DEV const u8* high(int i, int half) const { return codes(i, half) + 16 * (apart & 0xffff); }
  DEV const u8* d() const { return unit + 2 * ((apart >> 16) + own); }
};
struct StepRows {  // of a matrix
  const u8* weights;
  const uint4* table;  // (slices, rows)
  int rows, slices, least, extra;  // blocks of a slice; slices with one more
  DEV StepRows(const Planes& w, int rows, int blocks)
      : weights(w.p0), table((const uint4*)w.p1), rows(rows), slices((int)(i64)w.p2),
        least(blocks / slices), extra(blocks - least * slices) {}
  DEV int slice_of(int b) const {
    const int longer = extra * (least + 1);
    return slices == 1 ? 0 : b < longer ? b / (least + 1) : extra + (b - longer) / least;
  }
  DEV StepBlock find(int row, int b) const {
    const uint4 entry = __ldg(table + (i64)slice_of(b) * rows + min(row, rows - 1));
    return {weights + 16 * (i64)entry.x, entry.y, (entry.z & 0xff) + b - (entry.z >> 16),
            entry.z >> 8 & 0xff};
  }
};
constexpr u32 STEP_D = 3328, STEP_D_BITS = STEP_D + 4 * 16;  // in a slot
// 16 rows x 256 columns to a slot, by all lanes. Each second pair of rows takes its pieces in another order: eight
// lanes write to different banks.
template <bool SIX>
DEV void copy_unit(const StepRows& rows, int tile, int b, u32 slot, int lane) {
  const int r = lane >> 1, half = lane & 1, turn = r >> 1 & 1;
  const StepBlock block = rows.find(16 * tile + r, b);
  const u32 to = slot + 1024 * (r >> 3) + 16 * (4 * (r & 7) + 2 * half);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int i = k ^ (SIX ? turn : 2 * turn);
    copy16(to + (SIX ? 16 * (i & 1) + 512 * (i >> 1) : 16 * (i >> 1) + 512 * (i & 1)),
           block.codes(i, half));
  }
  if (!SIX) {
    if (half == 0) copy16(slot + 2048 + 16 * r, block.header());
    return;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int i = k ^ turn;
    copy16(slot + 2048 + 512 * (r >> 3) + 16 * (4 * (r & 7) + 2 * half + i), block.high(i, half));
  }
  const u64 d = (u64)block.d();
  const u32 is_second = __ballot_sync(~0u, d & 2);
  if (half == 0)
    copy16(slot + 3072 + 16 * r, block.header());
  else
    copy4(slot + STEP_D + 4 * r, (const u8*)(d & ~3ull));
  if (lane == 0) store_shared<u32>(slot + STEP_D_BITS, is_second);
}
// Bits of d of a row of Q6_K in a slot.
DEV u32 step_d(u32 slot, int row) {
  const u32 is_second = load_shared<u32>(slot + STEP_D_BITS) >> (2 * row) & 1;
  return load_shared<u32>(slot + STEP_D + 4 * row) >> (16 * is_second) & 0xffff;
}
