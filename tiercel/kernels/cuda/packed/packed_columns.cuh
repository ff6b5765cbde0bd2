// The order of the columns of a unit in the image of tokens (packed_places.cuh): that of the weights'
// fragments. Lane t of step s multiplies four neighbouring columns, at the places 2 t, 2 t + 8,
// 2 t + 1, 2 t + 9 of the step. Orders:
//   4   Q4_K: s = 2 (4 j + k) + high: from column 64 t + 32 high + 16 j + 4 k
//   6   Q6_K: s = 4 k + i: from 128 (t / 2) + 16 (t % 2) + 32 i + 4 k
//   32  types with a scale for 32 columns: s = 2 j + half: from 32 j + 16 half + 4 t
#pragma once

#include "include/types.cuh"

template <int OF> DEV int column_of(int s, int t) {
  return OF == 4   ? 64 * t + 32 * (s & 1) + 4 * (s >> 1)
         : OF == 6 ? 128 * (t >> 1) + 16 * (t & 1) + 32 * (s & 3) + 4 * (s >> 2)
                     : 16 * s + 4 * t;
}
struct ColumnPlace { int step, lane; };
template <int OF> DEV ColumnPlace place_of(int column) {  // the inverse
  if constexpr (OF == 4)
    return {(column >> 5 & 1) | (column >> 2 & 7) << 1, column >> 6};
  else if constexpr (OF == 6)
    return {(column >> 5 & 3) | (column >> 2 & 3) << 2, (column >> 7) * 2 + (column >> 4 & 1)};
  else
    return {column >> 4, column >> 2 & 3};
}
