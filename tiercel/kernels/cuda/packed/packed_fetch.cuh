// packed_matvec: how a unit of the types of packed_fields.cuh reaches shared memory, from either
// layout. Macros besides QTYPE: IN_FILE (layout), TAIL (see packed_matvec.cu), SLOT (bytes of a
// unit).
//
// A unit is 16 rows x 256 columns: a block of each row, or two groups of four blocks of 32 columns.
// The second group of a row's last unit may be missing (TAIL 1..4): it is zeros in the slot. The
// slot holds the planes of quant.PLANES one after the other. So from planes, each piece of 16 bytes
// is copied to where it is read. From the file, two bytes at a time are carried there: slow, but no
// type has code of its own.
#pragma once

#include "packed/packed_fields.cuh"
#include "packed/packed_ptx.cuh"

static_assert(SLOT == plane_at(NUM_FIELDS), "SLOT");
constexpr bool IS_HALF = TAIL > 0 && TAIL <= 4;  // a row's last unit has one group

struct Source {  // the next unit of a warp
  Planes w;
  int unit, blocks, rows, lane;  // tile * blocks + unit of the row
  DEV Source(const Planes& w, i64 unit, int blocks, int rows, int lane)
      : w(w), unit((int)unit), blocks(blocks), rows(rows), lane(lane) {}
  DEV void advance(int by) { unit += by; }
#if IN_FILE
  template <int P> DEV void carry(u32 slot, int tile, int b) const {
    constexpr Field f = FIELDS[P];
    constexpr int WIDTH = width_of(f);
#pragma unroll 4
    for (int at = 2 * lane; at < UNIT_GROUPS * group_bytes(P); at += 64) {
      // The order of a plane: group, half of the rows, piece, row, outer, inner, byte.
      int rest = at / WIDTH;
      const int inner = rest % f.inner, outer = rest / f.inner % f.outer;
      rest /= f.inner * f.outer;
      const int row = rest % 8, piece = rest / 8 % f.pieces, half = rest / (8 * f.pieces) % 2;
      const int place = f.is_woven ? (piece * f.inner + inner) * f.outer + outer
                                   : (outer * f.pieces + piece) * f.inner + inner;
      const int byte = place * WIDTH + at % WIDTH;
      const int block = (b * UNIT_GROUPS + at / group_bytes(P)) * GROUP + byte / f.size;
      u16 v = 0;
      const int in_file = min(tile * 16 + 8 * half + row, rows - 1);
      if (block < num_blocks())
        v = __ldg((const u16*)(w.p0 + ((i64)in_file * num_blocks() + block) * FILE_BYTES + f.start +
                               byte % f.size));
      store_shared<u16>(slot + plane_at(P) + at, v);
    }
  }
  DEV int num_blocks() const {  // of a row
    return GROUP == 1 ? blocks : TAIL ? 8 * blocks - 8 + TAIL : 8 * blocks;
  }
  DEV void fetch(u32 slot) const {
    const int tile = unit / blocks, b = unit - tile * blocks;
    carry<0>(slot, tile, b), carry<1>(slot, tile, b);
    if constexpr (NUM_FIELDS > 2) carry<2>(slot, tile, b);
    if constexpr (NUM_FIELDS > 3) carry<3>(slot, tile, b);
  }
#else
  template <int P> DEV void copy(u32 slot, const u8* plane, i64 group, int groups) const {
    constexpr int BYTES = UNIT_GROUPS * group_bytes(P);
    const u8* from = plane + group * group_bytes(P) + 16 * lane;
#pragma unroll
    for (int i = 0; i < BYTES; i += 512) {
      const u32 to = slot + plane_at(P) + i + 16 * lane;
      if (BYTES - i < 512 && 16 * lane >= BYTES - i) continue;
      if constexpr (IS_HALF)
        copy16_of(to, from + i, i + 16 * lane < groups * group_bytes(P) ? 16 : 0);
      else
        copy16(to, from + i);
    }
  }
  DEV void fetch(u32 slot) const {
    i64 group = (i64)unit * UNIT_GROUPS;
    int groups = UNIT_GROUPS;
    if constexpr (IS_HALF) {
      const int tile = unit / blocks;
      group -= tile;
      if (unit - tile * blocks == blocks - 1) groups = 1;
    }
    copy<0>(slot, w.p0, group, groups), copy<1>(slot, w.p1, group, groups);
    if constexpr (NUM_FIELDS > 2) copy<2>(slot, w.p2, group, groups);
    if constexpr (NUM_FIELDS > 3) copy<3>(slot, w.p3, group, groups);
  }
#endif
};
