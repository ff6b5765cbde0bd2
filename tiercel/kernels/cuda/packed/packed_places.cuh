// The order of columns in the image of tokens (packed_image.cu), which is that of the weights'
// fragments: lane t of step s multiplies four neighbouring columns of a unit of 256, at the places 2 t,
// 2 t + 8, 2 t + 1, 2 t + 9 of the step.
//   Q4_K    s = 2 (4 j + k) + high: from column 64 t + 32 high + 16 j + 4 k
//   Q6_K    s = 4 k + i: from 128 (t / 2) + 16 (t % 2) + 32 i + 4 k
//   others  s = 2 j + half: from 32 j + 16 half + 4 t
#pragma once

#include "include/types.cuh"

template <int TYPE> DEV int column_of(int s, int t) {
  return TYPE == 4   ? 64 * t + 32 * (s & 1) + 4 * (s >> 1)
         : TYPE == 6 ? 128 * (t >> 1) + 16 * (t & 1) + 32 * (s & 3) + 4 * (s >> 2)
                     : 16 * s + 4 * t;
}
struct Place { int step, lane; };
template <int TYPE> DEV Place place_of(int column) {  // the inverse
  if constexpr (TYPE == 4)
    return {(column >> 5 & 1) | (column >> 2 & 7) << 1, column >> 6};
  else if constexpr (TYPE == 6)
    return {(column >> 5 & 3) | (column >> 2 & 3) << 2, (column >> 7) * 2 + (column >> 4 & 1)};
  else
    return {column >> 4, column >> 2 & 3};
}
