#include "float_tiles_decode.h"
#include "decode_tables.h"
#include "float_bytes.h"

#define TC_ALWAYS static inline __attribute__((always_inline))

/* Byte by byte, bits `from` and up to where a code has bits `to` and up. */
TC_ALWAYS vb move_bits(vb a, int from, int to, int mask) {
    return vb_and(from < to ? vb_shl(a, to - from) : vb_shr(a, from - to), vb_set(mask));
}

/* 4 columns of 8 rows: w = d * q + m, each operator rounding once. */
TC_ALWAYS void put_columns(vb codes, vf d, vf m, int has_minima, float *out) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        vf w = vf_mul(d, vb_column(codes, j));
        vf_store(out + TC_TILE_ROWS * j, has_minima ? vf_add(w, m) : w);
    }
}

/* Factors of a group: of columns 0..15 and 16..31, and what is added. */
typedef struct {
    vf d[2], m;
} factors;

TC_ALWAYS vf minus(vf a) { return vf_sub(vf_set(-0.0f), a); }

TC_ALWAYS factors read_factors(int32_t type, const uint8_t *header, const uint8_t *group) {
    const int8_t *scales = (const int8_t *)group;
    vf d = vf_load_f16((const uint16_t *)header), first = d, second = d, m = vf_set(0.0f);
    if (type == TC_Q4_1 || type == TC_Q5_1) m = vf_load_f16((const uint16_t *)header + TC_TILE_ROWS);
    if (type == TC_Q4_K || type == TC_Q5_K) {
        vf dmin = vf_load_f16((const uint16_t *)header + TC_TILE_ROWS);
        m = minus(vf_mul(dmin, vf_from_i8(scales + TC_TILE_ROWS)));
    }
    if (type == TC_Q4_K || type == TC_Q5_K || type == TC_Q6_K || type == TC_IQ4_XS)
        first = second = vf_mul(d, vf_from_i8(scales));
    if (type == TC_Q6_K) second = vf_mul(d, vf_from_i8(scales + TC_TILE_ROWS));
    return (factors){{first, second}, m};
}

/* Nibbles of vector v's half h, with the bits above them, as the integers that d multiplies. */
TC_ALWAYS vb read_codes(int32_t type, const uint8_t *bits, vb packed, int v, int h) {
    vb q = vb_and(h ? vb_shr(packed, 4) : packed, vb_set(15));
    if (type == TC_Q5_0 || type == TC_Q5_1 || type == TC_Q5_K)
        q = vb_or(q, move_bits(vb_load(bits), 4 * h + v, 4, 0x10));
    if (type == TC_Q6_K) q = vb_or(q, move_bits(vb_load(bits + 32 * h), 2 * v, 4, 0x30));
    if (type == TC_Q4_0) q = vb_sub(q, vb_set(8));
    if (type == TC_Q5_0) q = vb_sub(q, vb_set(16));
    if (type == TC_Q6_K) q = vb_sub(q, vb_set(32));
    if (type == TC_IQ4_NL || type == TC_IQ4_XS) q = vb_look_up(tc_iq4_values, q);
    return q;
}

TC_ALWAYS void decode_group(int32_t type, const uint8_t *header, const uint8_t *group, float *out) {
    const tc_tile_format format = tc_tile_format_of(type);
    const int has_minima = type == TC_Q4_1 || type == TC_Q5_1 || type == TC_Q4_K || type == TC_Q5_K;
    const uint8_t *bits = group + format.scale_bytes, *codes = bits + format.bits_bytes;
    const factors by = read_factors(type, header, group);
    if (type == TC_Q8_0) {
        for (int v = 0; v < 8; ++v)
            put_columns(vb_load(codes + 32 * v), by.d[0], by.m, 0, out + 32 * v);
        return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        vb packed = vb_load(codes + 32 * v);
        for (int h = 0; h < 2; ++h)
            put_columns(read_codes(type, bits, packed, v, h), by.d[h], by.m, has_minima,
                        out + TC_TILE_ROWS * (16 * h + 4 * v));
    }
}

TC_ALWAYS void decode_groups(int32_t type, const uint8_t *tile, int64_t first, int64_t count, float *out) {
    const tc_tile_format format = tc_tile_format_of(type);
    for (int64_t g = first; g < first + count; ++g, out += TC_GROUP * TC_TILE_ROWS) {
        const uint8_t *header = tile + g / format.groups * tc_tile_record_bytes(format);
        int64_t in_record = g % format.groups * tc_tile_group_bytes(format);
        decode_group(type, header, header + format.header_bytes + in_record, out);
    }
}

#define CASE(type) \
    case type: decode_groups(type, tile, first, count, out); break

void tc_decode_tile(int32_t type, const uint8_t *tile, int64_t first, int64_t count, float *out) {
    switch (type) {
        CASE(TC_Q4_0);
        CASE(TC_Q4_1);
        CASE(TC_Q5_0);
        CASE(TC_Q5_1);
        CASE(TC_Q8_0);
        CASE(TC_IQ4_NL);
        CASE(TC_Q4_K);
        CASE(TC_Q5_K);
        CASE(TC_Q6_K);
        CASE(TC_IQ4_XS);
    }
}
