/* Sizes and offsets of layout TILES, one row of a table per type; native.h says what the fields of
 * a record are. */
#ifndef TIERCEL_TILES_H
#define TIERCEL_TILES_H

#include "native.h"

enum {
    TC_Q4_0 = 2,
    TC_Q4_1 = 3,
    TC_Q5_0 = 6,
    TC_Q5_1 = 7,
    TC_Q8_0 = 8,
    TC_Q4_K = 12,
    TC_Q5_K = 13,
    TC_Q6_K = 14,
    TC_IQ4_NL = 20,
    TC_IQ4_XS = 23
};

/* A record is a header, the float16 scales of 8 rows, and groups of 32 columns. A group is its
 * integer scales, then the bits above the fourth, then codes. */
typedef struct {
    int header_bytes;
    int groups; /* in a record, as in a block of the file */
    int scale_bytes, bits_bytes, code_bytes;
    int block_bytes; /* of the file: one row, 32 * groups columns */
} tc_tile_format;

/* All zeros for a type without tiles. */
static inline tc_tile_format tc_tile_format_of(int32_t type) {
    switch (type) {
    case TC_Q4_0: return (tc_tile_format){16, 1, 0, 0, 128, 18};
    case TC_Q4_1: return (tc_tile_format){32, 1, 0, 0, 128, 20};
    case TC_Q5_0: return (tc_tile_format){16, 1, 0, 32, 128, 22};
    case TC_Q5_1: return (tc_tile_format){32, 1, 0, 32, 128, 24};
    case TC_Q8_0: return (tc_tile_format){16, 1, 0, 0, 256, 34};
    case TC_IQ4_NL: return (tc_tile_format){16, 1, 0, 0, 128, 18};
    case TC_Q4_K: return (tc_tile_format){32, 8, 16, 0, 128, 144};
    case TC_Q5_K: return (tc_tile_format){32, 8, 16, 32, 128, 176};
    case TC_Q6_K: return (tc_tile_format){16, 8, 16, 64, 128, 210};
    case TC_IQ4_XS: return (tc_tile_format){16, 8, 8, 0, 128, 136};
    default: return (tc_tile_format){0, 0, 0, 0, 0, 0};
    }
}

static inline int64_t tc_tile_group_bytes(tc_tile_format format) {
    return format.scale_bytes + format.bits_bytes + format.code_bytes;
}

static inline int64_t tc_tile_record_bytes(tc_tile_format format) {
    return format.header_bytes + format.groups * tc_tile_group_bytes(format);
}

/* Bytes of one tile, all columns of 8 rows. */
static inline int64_t tc_tile_bytes(tc_tile_format format, int64_t cols) {
    return cols / (TC_GROUP * format.groups) * tc_tile_record_bytes(format);
}

/* The 16 values of a code of IQ4_NL and IQ4_XS. */
#define TC_IQ4_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113

#endif
