/* Rows of layout FILE as floats, or as small integers with their factors. */
#ifndef TIERCEL_DECODE_H
#define TIERCEL_DECODE_H

#include "native.h"
#include "simd.h"

enum { TC_Q2_K = 10, TC_Q3_K = 11, TC_IQ2_XXS = 16, TC_MXFP4 = 39 }; /* others: tiles.h */

/* A group of 32 columns of a row: w = d[h] * q + m[h], with h = 0 for columns 0..15, else 1. Types
 * without minima have m = -0, which changes no bit of d * q. */
typedef struct {
    int8_t q[TC_GROUP];
    float d[2], m[2];
} tc_codes;

typedef void (*tc_codes_fn)(const uint8_t *block, unsigned group, tc_codes *out);

typedef struct {
    int32_t type;         /* GGML id */
    int32_t block_groups; /* groups of a block; 0 for plain floats */
    int32_t block_bytes;  /* of a weight for plain floats */
    int32_t has_minima;
    tc_codes_fn codes; /* of a group of a block; NULL for plain floats */
} tc_format;

/* NULL for a type that this library does not know. */
const tc_format *tc_find_format(int32_t type);

/* Group `group` (32 columns) of a row of a quantised type. */
static inline void tc_decode_codes(const tc_format *format, const uint8_t *row, int64_t group,
                                   tc_codes *out) {
    const uint8_t *block = row + group / format->block_groups * format->block_bytes;
    format->codes(block, (unsigned)(group % format->block_groups), out);
}

/* Columns [first, first + count) of a row, multiples of 32 unless the type is a plain float. Each
 * operator rounds once, so the bits are those of ops/dequantize_torch.py. */
void tc_decode_columns(const tc_format *format, const uint8_t *row, int64_t first, int64_t count,
                       float *out);

/* Eight plain floats at any address, where `type` is a constant. */
static inline vf tc_load_floats(int32_t type, const uint8_t *p) {
#if defined(__AVX2__) || defined(__ARM_NEON)
    if (type == TC_F32) return vf_load((const float *)p);
    return type == TC_F16 ? vf_load_f16((const uint16_t *)p) : vf_load_bf16((const uint16_t *)p);
#else
    float wide[TC_LANES];
    uint16_t half[TC_LANES];
    if (type == TC_F32) {
        memcpy(wide, p, sizeof wide);
        return vf_load(wide);
    }
    memcpy(half, p, sizeof half);
    return type == TC_F16 ? vf_load_f16(half) : vf_load_bf16(half);
#endif
}

/* The first `count` < 8 of them, then zeros; reads no byte beyond. */
static inline vf tc_load_some_floats(int32_t type, const uint8_t *p, int64_t count) {
    uint8_t bytes[4 * TC_LANES] = {0};
    memcpy(bytes, p, (size_t)(count * (type == TC_F32 ? 4 : 2)));
    return tc_load_floats(type, bytes);
}

#endif
