// PTX instructions of fused_decode_step.cu besides those of hopper.cuh and exchange_ptx.cuh. On a
// processor tests/cuda_on_cpu/device.hpp replaces the three of them.
#pragma once

#include "include/half_ptx.cuh"
#include "include/hopper.cuh"

// Unsigned weights, signed activations.
DEV int dp4a_us(u32 w, u32 a, int c) {
  int d;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(a), "r"(c));
  return d;
}
// Both signed.
DEV int dp4a_ss(u32 w, u32 a, int c) {
  int d;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(a), "r"(c));
  return d;
}
// Bytes of a and b (0 to 3, 4 to 7) that the four lowest nibbles of `places` name; with a nibble's
// highest bit set, the sign of the byte for each of its bits.
DEV u32 permute(u32 a, u32 b, u32 places) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(places));
  return d;
}
DEV void store_relaxed_word(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Without a bound of its own: the copies that it waits for are bounded by MOST_TICKS.
DEV void slot_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
template <bool TRANSPOSED> DEV void load_matrices(u32 (&r)[4], u32 a) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
// Rows 8 to 15 of A are zero.
DEV void mma_k16(float (&d)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, "
               "{%7,%8}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}
DEV void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
               "{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
// The value, of which the compiler knows nothing: what is computed from it is not moved out of the
// loop over phases, where it would cost the products registers.
DEV int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Read again at each call, where a register that keeps it would be spilled.
DEV int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// Of 96 registers that a warp begins with, producers need 32: consumers get 112.
DEV void drop_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); }
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 112;"); }
