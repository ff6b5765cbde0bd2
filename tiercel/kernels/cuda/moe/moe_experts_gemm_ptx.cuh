// Instructions of moe_experts_gemm: products of a warpgroup in bfloat16, of 16 to 128 tokens. On a
// processor tests/cuda_on_cpu/moe_device.hpp replaces this file.
#pragma once

#include "include/hopper.cuh"

#define G0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define G1 G0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define G2 G1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define G3 G2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define G4 G3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define G5 G4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define G6 G5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define G7 G6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define F8(i) F4(i), F4(i + 4)
#define S0 F8(0)
#define S1 S0, F8(8)
#define S2 S1, F8(16)
#define S3 S2, F8(24)
#define S4 S3, F8(32)
#define S5 S4, F8(40)
#define S6 S5, F8(48)
#define S7 S6, F8(56)
// i0 is the number of sums, and so on.
#define FROM_REGISTERS(n, regs, sums, i0, i1, i2, i3, i4, i5)                                     \
  asm volatile("{ .reg .b64 db; mov.b64 db, {%" i4 ", %" i5 "};\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" regs "}, {%" i0 ", %" i1 \
               ", %" i2 ", %" i3 "}, db, 1, 1, 1, 0; }\n"                                        \
               : sums : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(DESC_HI))
// d += 64 rows x 16 columns of weights, a warp's fragment, times those of the tokens at b.
template <int M> DEV void product_bf16(float (&d)[M], const u32* a, u32 b) {
  if constexpr (M == 8) FROM_REGISTERS("16", G0, S0, "8", "9", "10", "11", "12", "13");
  if constexpr (M == 16) FROM_REGISTERS("32", G1, S1, "16", "17", "18", "19", "20", "21");
  if constexpr (M == 24) FROM_REGISTERS("48", G2, S2, "24", "25", "26", "27", "28", "29");
  if constexpr (M == 32) FROM_REGISTERS("64", G3, S3, "32", "33", "34", "35", "36", "37");
  if constexpr (M == 40) FROM_REGISTERS("80", G4, S4, "40", "41", "42", "43", "44", "45");
  if constexpr (M == 48) FROM_REGISTERS("96", G5, S5, "48", "49", "50", "51", "52", "53");
  if constexpr (M == 56) FROM_REGISTERS("112", G6, S6, "56", "57", "58", "59", "60", "61");
  if constexpr (M == 64) FROM_REGISTERS("128", G7, S7, "64", "65", "66", "67", "68", "69");
}
