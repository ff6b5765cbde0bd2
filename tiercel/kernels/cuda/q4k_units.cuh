// Units of K-quants for tensor cores: 16 rows x 256 columns of weights to fragments of
// mma.m16n8k16. No #include. Macros: QTYPE (4: Q4_K, 6: Q6_K), NT (tiles of 8 tokens),
// IN_FILE (layout of the weights).
//
// Lane = 4 g + t of a warp holds rows g and g + 8, as the product wants it. Which columns a lane
// multiplies is free as long as both operands agree, so lane t takes whole groups of its own:
//   Q4_K  64 t .. 64 t + 63, two groups of 32: byte l of its 32 is weight 64 t + l (low nibble) and
//         64 t + 32 + l (high)
//   Q6_K  with h = t / 2, e = t % 2: weights 128 h + 32 i + 16 e + l, i < 4, l < 16: four groups of
//         16; ql[64 h + 16 e + l] holds i = 0 and 2, ql[64 h + 32 + 16 e + l] holds i = 1 and 3
// A word of four bytes (l .. l + 3) gives two half2: bytes 0 and 1, and bytes 2 and 3.
//
// An integer q in the low bits of an fp16 is the subnormal q * 2^-24. Subnormals are exact in mul,
// fma and mma, so no conversion is needed; the factor 2^24 is applied to the result. High nibbles
// are used in place as 16 q, with the scale divided by 16.
//   Q4_K  operand = scale * q <= 945: exact. The minima are one product more: (mn of a lane's two
//         groups) x (means of x over groups, as two fp16: value and rest).
//   Q6_K  operand = scale * (q - 32), |.| <= 4096: rounded to 11 bits, as a weight in fp16 is.
// d multiplies the float32 sums of a unit.
//
// A unit in shared memory ("slot"), 16 bytes of lane l at 16 l of each 512:
//   Q4_K 2304: rows g (j = 0, 1: bytes 16 j.. of the lane's 32), rows g + 8 (j = 0, 1), 16 headers
//   Q6_K 3360: ql of rows g (two pieces), of rows g + 8, qh of rows g, of rows g + 8,
//              scales of 16 rows x 16 bytes, d of 16 rows x 2 bytes
#define DEV __device__ __forceinline__
typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

#if QTYPE == 4
#define SLOT 2304
#define FILE_BYTES 144
#else
#define SLOT 3360
#define FILE_BYTES 210
#endif

// ---- PTX
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV uint4 lds16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEV uint2 lds8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
DEV u32 lds2(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
DEV float ldsf(u32 a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a));
  return v;
}
DEV void sts16(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
DEV void sts8(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
DEV void sts2(u32 a, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(v) : "memory"); }
DEV void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEV u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV float half_to_float(u32 bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
  return f;
}
DEV u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV u32 word(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }
// Bytes 0 and 1 of v, or 2 and 3, to the low bytes of two halves.
DEV u32 widen(u32 v, int second) { return __byte_perm(v, 0, second ? 0x4342 : 0x4140); }
// Byte k of v in both halves, as the fp16 1024 + byte.
DEV u32 byte_pair(u32 v, int k) { return __byte_perm(v, 0x64646464u, 0x4040u | k | k << 8); }

// ---- activations
// Of a unit, lane t takes 8 pieces of 8 columns from token n = 8 nt + g, and, for Q4_K, the means of
// its two groups as two fp16 values and two rests.
// They lie in shared memory: piece p of lane t, token n, unit b at
// (b * 8 + p) * STEP(m) + n * 64 + 16 t, means behind all at (b * m + n) * 32 + 8 t. Columns n >= m
// repeat the last token; their products are never stored. STEP is padded so that lanes which stage
// neighbouring columns write to different banks.
#if QTYPE == 4
#define STEP(m) (64 * (m) + 16)
#else
#define STEP(m) (64 * (m) + 32)
#endif
struct Tokens {
  u32 x[NT], rests[NT], step;
  DEV uint4 piece(int nt, int p) const { return lds16(x[nt] + p * step); }
#if QTYPE == 4
  DEV uint2 means(int nt) const { return lds8(rests[nt]); }
#else
  DEV uint2 means(int) const { return make_uint2(0, 0); }
#endif
  DEV Tokens(u32 at, u32 means, int m, int b, int lane) : step(STEP(m)) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int n = min(8 * nt + g, m - 1);
      x[nt] = at + b * 8 * step + n * 64 + 16 * t, rests[nt] = means + (b * m + n) * 32 + 8 * t;
    }
  }
};
// Where a lane puts the lane-th 8 columns of a unit of a token, from the token's first place there.
DEV u32 piece_place(int lane, u32 step) {
  const int j = lane >> 2, q = lane & 3;  // group of 32 columns, piece of it
  const int t = QTYPE == 4 ? j >> 1 : 2 * (j >> 2) + (q >> 1);
  const int p = QTYPE == 4 ? 4 * (j & 1) + q : 2 * (j & 3) + (q & 1);
  return p * step + 16 * t;
}
#if QTYPE == 4
// Means of a unit's groups: sums by a product whose row i selects the columns of lane t = i.
DEV void put_means(const Tokens& tokens, u32 to, int m, int nt, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const u32 one = g == t ? 0x3c003c00u : 0;
  float sum[2][4] = {};
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    const uint4 v = tokens.piece(nt, p);
    mma(sum[p >> 2], one, 0, one, 0, v.x, v.y);
    mma(sum[p >> 2], one, 0, one, 0, v.z, v.w);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float low = sum[0][e] * (1.f / 32), high = sum[1][e] * (1.f / 32);
    const u32 a = float_to_half(low), b = float_to_half(high);
    const u32 c = float_to_half(low - half_to_float(a)), d = float_to_half(high - half_to_float(b));
    const int n = 8 * nt + 2 * t + e;
    if (g < 4 && n < m) sts8(to + n * 32 + 8 * g, a | b << 16, c | d << 16);
  }
}
#endif

// ---- fetching a unit
struct Planes {
  // SOA: Q4_K qs, header; Q6_K ql, qh, scales, d. FILE: the first alone.
  const u8 *p0, *p1, *p2, *p3;
};
#if IN_FILE
#if QTYPE == 6
DEV void copy16_by_2(u32 to, const u8* from) {  // Q6_K blocks are 2-byte aligned
  const u16* p = (const u16*)from;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __ldg(p + 2 * i) | (u32)__ldg(p + 2 * i + 1) << 16;
  sts16(to, v[0], v[1], v[2], v[3]);
}
#endif
struct Source {  // the next unit of a warp
  Planes w;
  i64 unit;  // tile * blocks + block
  int blocks, rows, lane;
  DEV Source(const Planes& w, i64 unit, int blocks, int rows, int lane)
      : w(w), unit(unit), blocks(blocks), rows(rows), lane(lane) {}
  DEV void advance(int by) { unit += by; }
  DEV void fetch(u32 slot) const {
    const int g = lane >> 2, t = lane & 3, tile = (int)(unit / blocks), b = (int)(unit % blocks);
#pragma unroll
    for (int r8 = 0; r8 < 2; ++r8) {
      const int row = min(tile * 16 + 8 * r8 + g, rows - 1);
      const u8* block = w.p0 + ((i64)row * blocks + b) * FILE_BYTES;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 to = slot + 1024 * r8 + 512 * j + 16 * lane;
#if QTYPE == 4
        copy16(to, block + 16 + 32 * t + 16 * j);
#else
        copy16_by_2(to, block + 64 * (t >> 1) + 32 * j + 16 * (t & 1));
#endif
      }
#if QTYPE == 4
      if (t == 0) copy16(slot + 2048 + 16 * (8 * r8 + g), block);
#else
      copy16_by_2(slot + 2048 + 512 * r8 + 16 * lane, block + 128 + 16 * t);
      if (t == 0) {
        copy16_by_2(slot + 3072 + 16 * (8 * r8 + g), block + 192);
        sts2(slot + 3328 + 2 * (8 * r8 + g), __ldg((const u16*)(block + 208)));
      }
#endif
    }
  }
};
#elif QTYPE == 4
struct Source {  // the next unit of a warp, at the lane's bytes of each plane
  const u8 *qs, *header;
  int lane;
  DEV Source(const Planes& w, i64 unit, int, int, int lane)
      : qs(w.p0 + unit * 2048 + 16 * lane), header(w.p1 + unit * 256 + 16 * lane), lane(lane) {}
  DEV void advance(int by) { qs += (i64)by * 2048, header += (i64)by * 256; }
  DEV void fetch(u32 slot) const {
    slot += 16 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(slot + 512 * i, qs + 512 * i);
    if (lane < 16) copy16(slot + 2048, header);
  }
};
#else
struct Source {  // the next unit of a warp, at the lane's bytes of each plane
  const u8 *ql, *qh, *rest;
  int lane;
  DEV Source(const Planes& w, i64 unit, int, int, int lane)
      : ql(w.p0 + unit * 2048 + 16 * lane), qh(w.p1 + unit * 1024 + 16 * lane),
        rest(lane < 16 ? w.p2 + unit * 256 + 16 * lane : w.p3 + unit * 32 + 16 * (lane - 16)),
        lane(lane) {}
  DEV void advance(int by) {
    ql += (i64)by * 2048, qh += (i64)by * 1024, rest += (i64)by * (lane < 16 ? 256 : 32);
  }
  DEV void fetch(u32 slot) const {
    slot += 16 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(slot + 512 * i, ql + 512 * i);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy16(slot + 2048 + 512 * i, qh + 512 * i);
    if (lane < 18) copy16(slot + 3072, rest);  // 16 rows of scales, two pieces of d
  }
};
#endif
#if __CUDA_ARCH__ >= 900 && !IN_FILE
DEV void prefetch(const u8* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
// Ask the L2 for some units of a tile.
DEV void prefetch_units(const Planes& w, i64 unit, int count) {
#if QTYPE == 4
  prefetch(w.p0 + unit * 2048, count * 2048), prefetch(w.p1 + unit * 256, count * 256);
#else
  prefetch(w.p0 + unit * 2048, count * 2048), prefetch(w.p1 + unit * 1024, count * 1024);
  prefetch(w.p2 + unit * 256, count * 256), prefetch(w.p3 + unit * 32, count * 32);
#endif
}
#else
DEV void prefetch_units(const Planes&, i64, int) {}
#endif

// ---- multiplying a unit: sum[nt] += d * (operand x tokens), in units of 2^-24
#if QTYPE == 4
struct Scales {  // of a row and the lane's two groups
  u32 low, high, mins;
  float d, dmin;
};
DEV Scales unpack(const uint4& header, int t) {
  // Six-bit fields of the four groups of the block's half; see kernels/dequantize.py.
  const bool second = t >= 2;
  const u32 shift = second ? 2 : 0, low = second ? 0x30303030u : 0x3f3f3f3fu;
  const u32 high = second ? 0x0f0f0f0fu : 0u;
  const u32 sc = ((header.y >> shift) & low) | (header.w & high);
  const u32 mn = ((header.z >> shift) & low) | ((header.w >> 4) & high);
  const u32 k = 2 * (t & 1);
  Scales s;
  s.low = add2(byte_pair(sc, k), 0xe400e400u);                         // - 1024
  s.high = fma2(byte_pair(sc, k + 1), 0x2c002c00u, 0xd400d400u);       // / 16 - 64
  s.mins = __byte_perm(mn, 0, 0x4040u | k | (k + 1) << 8);
  s.d = half_to_float(header.x & 0xffff), s.dmin = half_to_float(header.x >> 16);
  return s;
}
struct Unit {
  Scales s0, s1;
  uint4 w0[2], w1[2];
  DEV Unit(u32 slot, int lane)
      : s0(unpack(lds16(slot + 2048 + 16 * (lane >> 2)), lane & 3)),
        s1(unpack(lds16(slot + 2176 + 16 * (lane >> 2)), lane & 3)) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      w0[j] = lds16(slot + 512 * j + 16 * lane), w1[j] = lds16(slot + 1024 + 512 * j + 16 * lane);
  }
  DEV void operands(u32 (&a)[2][4], int p) const {
    const u32 mask = p < 4 ? 0x000f000fu : 0x00f000f0u;
    const u32 f0 = p < 4 ? s0.low : s0.high, f1 = p < 4 ? s1.low : s1.high;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 r0 = word(w0[p >> 1 & 1], 2 * (p & 1) + i);
      const u32 r1 = word(w1[p >> 1 & 1], 2 * (p & 1) + i);
      a[i][0] = mul2(widen(r0, 0) & mask, f0), a[i][1] = mul2(widen(r1, 0) & mask, f1);
      a[i][2] = mul2(widen(r0, 1) & mask, f0), a[i][3] = mul2(widen(r1, 1) & mask, f1);
    }
  }
  DEV void add(float (&sum)[4], const float (&part)[4], uint2 means) const {
    const float m0 = -32.f * s0.dmin, m1 = -32.f * s1.dmin;
    float least[4] = {};
    mma(least, s0.mins, s1.mins, s0.mins, s1.mins, means.x, means.y);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sum[c] = fmaf(c < 2 ? s0.d : s1.d, part[c], sum[c]);
      sum[c] = fmaf(c < 2 ? m0 : m1, least[c], sum[c]);
    }
  }
};
#else
struct Scales {  // of a row and the lane's four groups: scale (/ 16 for high nibbles), -32 scale
  u32 scale[4], offset[4];
  float d;
};
DEV Scales unpack(u32 slot, int row, int t) {
  const uint2 half = lds8(slot + 3072 + 16 * row + 8 * (t >> 1));
  const u32 bytes = __byte_perm(half.x, half.y, t & 1 ? 0x7531 : 0x6420) ^ 0x80808080u;
  Scales s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 v = byte_pair(bytes, i);  // 1152 + scale
    s.scale[i] = i < 2 ? add2(v, 0xe480e480u) : fma2(v, 0x2c002c00u, 0xd480d480u);
    s.offset[i] = mul2(s.scale[i], i < 2 ? 0x80208020u : 0x82008200u);
  }
  s.d = half_to_float(lds2(slot + 3328 + 2 * row));
  return s;
}
// Weights i of two bytes: q of six bits (times 16 for i >= 2) to the operand.
DEV u32 operand(u32 ql, u32 qh, int i, const Scales& s) {
  const u32 high = qh << (4 - 2 * (i & 1));  // 2 bits to place 4 (low nibbles) or 8 (high)
  const u32 q = i < 2 ? (ql & 0x000f000fu) | (high & 0x00300030u)
                      : (ql & 0x00f000f0u) | (high & 0x03000300u);
  return fma2(q, s.scale[i], s.offset[i]);
}
struct Unit {
  Scales s0, s1;
  uint4 l0[2], l1[2], h0, h1;
  DEV Unit(u32 slot, int lane)
      : s0(unpack(slot, lane >> 2, lane & 3)), s1(unpack(slot, (lane >> 2) + 8, lane & 3)) {
    slot += 16 * lane;
    l0[0] = lds16(slot), l0[1] = lds16(slot + 512), h0 = lds16(slot + 2048);
    l1[0] = lds16(slot + 1024), l1[1] = lds16(slot + 1536), h1 = lds16(slot + 2560);
  }
  DEV void operands(u32 (&a)[2][4], int p) const {
    const int i = p >> 1;
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const int k = 2 * (p & 1) + o;
      const u32 x0 = word(l0[i & 1], k), x1 = word(l1[i & 1], k), y0 = word(h0, k), y1 = word(h1, k);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[o][2 * h] = operand(widen(x0, h), widen(y0, h), i, s0);
        a[o][2 * h + 1] = operand(widen(x1, h), widen(y1, h), i, s1);
      }
    }
  }
  DEV void add(float (&sum)[4], const float (&part)[4], uint2) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = fmaf(c < 2 ? s0.d : s1.d, part[c], sum[c]);
  }
};
#endif
// Units of TILES tiles with the same columns share the tokens' fragments. Pieces that come from the
// same words follow each other.
DEV void multiply(float (&sum)[TILES][NT][4], u32 slot, const Tokens& tokens, int lane) {
  const Unit first(slot, lane), second(slot + (TILES - 1) * SLOT, lane);
  float part[TILES][NT][4] = {};
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    const int p = 4 * (q & 1) + (q >> 1);
    uint4 v[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) v[nt] = tokens.piece(nt, p);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      u32 a[2][4];
      (i ? second : first).operands(a, p);
#pragma unroll
      for (int o = 0; o < 2; ++o)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          mma(part[i][nt], a[o][0], a[o][1], a[o][2], a[o][3],
              word(v[nt], 2 * o), word(v[nt], 2 * o + 1));
    }
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const uint2 means = tokens.means(nt);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      (i ? second : first).add(sum[i][nt], part[i][nt], means);
    }
  }
}
