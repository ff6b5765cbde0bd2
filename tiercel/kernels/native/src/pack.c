/* From the blocks of a file to tiles. The codes of one row and group move as 32-bit words: word v of
 * a row's 16 bytes of nibbles is what vector v of `codes4` has for that row. */
#include <string.h>

#include "native.h"
#include "tiles.h"

enum { PIECE_TILES = 4 };
static const uint64_t LOW_NIBBLES = 0x0f0f0f0f0f0f0f0f;

TC_EXPORT int64_t tc_tiles_bytes(int32_t type, int64_t rows, int64_t cols) {
    tc_tile_format format = tc_tile_format_of(type);
    if (!format.groups || rows <= 0 || cols <= 0 || cols % (TC_GROUP * format.groups)) return 0;
    return (rows + TC_TILE_ROWS - 1) / TC_TILE_ROWS * tc_tile_bytes(format, cols);
}

/* Writes one row's words to the vectors of a group, of which `out` points to the row's first. */
static inline void put_words(uint8_t *out, const uint8_t *words, int num_vectors) {
    for (int v = 0; v < num_vectors; ++v) memcpy(out + 32 * v, words + 4 * v, 4);
}

/* The nibbles of 32 consecutive bytes, the high ones or the low ones, as a group's codes. */
static inline void put_nibbles(uint8_t *out, const uint8_t *bytes, int high) {
    uint64_t words[4];
    memcpy(words, bytes, 32);
    for (int i = 0; i < 2; ++i) {
        if (high)
            words[i] = (words[i] >> 4 & LOW_NIBBLES) | (words[i + 2] & ~LOW_NIBBLES);
        else
            words[i] = (words[i] & LOW_NIBBLES) | (words[i + 2] & LOW_NIBBLES) << 4;
    }
    put_words(out, (const uint8_t *)words, 4);
}

/* Bit j of a nibble to bit 8 * j. */
static inline uint32_t spread_bits(uint32_t nibble) { return nibble * 0x00204081u & 0x01010101u; }

/* The fifth bits of Q5_0 and Q5_1: bit c of a word belongs to column c = 4 * s + j. */
static inline void put_bit5_of_word(uint8_t *out, const uint8_t *bytes) {
    uint32_t columns, bits = 0;
    memcpy(&columns, bytes, 4);
    for (int s = 0; s < 8; ++s) bits |= spread_bits(columns >> 4 * s & 15) << s;
    memcpy(out, &bits, 4);
}

/* The fifth bits of Q5_K: bit `group` of byte c belongs to column c. */
static inline void put_bit5_of_bytes(uint8_t *out, const uint8_t *bytes, int group) {
    uint32_t columns, bits = 0;
    for (int s = 0; s < 8; ++s) {
        memcpy(&columns, bytes + 4 * s, 4);
        bits |= (columns >> group & 0x01010101u) << s;
    }
    memcpy(out, &bits, 4);
}

/* The upper two bits of Q6_K: bits 2 * quarter and 2 * quarter + 1 of byte c belong to column c. */
static inline void put_bits56(uint8_t *out, const uint8_t *bytes, int quarter) {
    uint32_t columns, bits;
    for (int half = 0; half < 2; ++half) {
        bits = 0;
        for (int i = 0; i < 4; ++i) {
            memcpy(&columns, bytes + 16 * half + 4 * i, 4);
            bits |= (columns >> 2 * quarter & 0x03030303u) << 2 * i;
        }
        memcpy(out + 32 * half, &bits, 4);
    }
}

/* One block of a type whose block is one group. */
static inline void pack_group(int32_t type, const uint8_t *block, uint8_t *record, int row) {
    tc_tile_format format = tc_tile_format_of(type);
    int halves = format.header_bytes / 16;
    uint8_t *bits = record + format.header_bytes + 4 * row;
    const uint8_t *codes = block + format.block_bytes - (type == TC_Q8_0 ? 32 : 16);
    for (int i = 0; i < halves; ++i) memcpy(record + 16 * i + 2 * row, block + 2 * i, 2);
    if (format.bits_bytes) put_bit5_of_word(bits, block + 2 * halves);
    put_words(bits + format.bits_bytes, codes, format.code_bytes / 32);
}

/* The 6-bit scales and minimums of Q4_K and Q5_K. */
static inline void put_scales_and_mins(const uint8_t *packed, uint8_t *groups, int64_t group_bytes) {
    for (int g = 0; g < 8; ++g) {
        uint8_t *out = groups + g * group_bytes;
        if (g < 4) {
            out[0] = packed[g] & 63;
            out[8] = packed[g + 4] & 63;
        } else {
            out[0] = (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
            out[8] = packed[g + 4] >> 4 | packed[g] >> 6 << 4;
        }
    }
}

static inline void pack_q45_k(int32_t type, const uint8_t *block, uint8_t *record, int row) {
    tc_tile_format format = tc_tile_format_of(type);
    int64_t group_bytes = tc_tile_group_bytes(format);
    uint8_t *groups = record + format.header_bytes;
    const uint8_t *codes = block + format.block_bytes - 128;
    memcpy(record + 2 * row, block, 2);
    memcpy(record + 16 + 2 * row, block + 2, 2);
    put_scales_and_mins(block + 4, groups + row, group_bytes);
    for (int g = 0; g < 8; ++g) {
        uint8_t *out = groups + g * group_bytes + format.scale_bytes + 4 * row;
        if (format.bits_bytes) put_bit5_of_bytes(out, block + 16, g);
        put_nibbles(out + format.bits_bytes, codes + 32 * (g / 2), g % 2);
    }
}

static inline void pack_q6_k(const uint8_t *block, uint8_t *record, int row) {
    tc_tile_format format = tc_tile_format_of(TC_Q6_K);
    memcpy(record + 2 * row, block + 208, 2);
    for (int g = 0; g < 8; ++g) {
        uint8_t *group = record + format.header_bytes + g * tc_tile_group_bytes(format);
        uint8_t *bits = group + format.scale_bytes + 4 * row;
        int half = g / 4, quarter = g % 4;
        group[row] = block[192 + 2 * g];
        group[8 + row] = block[193 + 2 * g];
        put_bits56(bits, block + 128 + 32 * half, quarter);
        put_nibbles(bits + format.bits_bytes, block + 64 * half + 32 * (quarter % 2), quarter / 2);
    }
}

static inline void pack_iq4_xs(const uint8_t *block, uint8_t *record, int row) {
    tc_tile_format format = tc_tile_format_of(TC_IQ4_XS);
    unsigned high = block[2] | block[3] << 8;
    memcpy(record + 2 * row, block, 2);
    for (int g = 0; g < 8; ++g) {
        uint8_t *group = record + format.header_bytes + g * tc_tile_group_bytes(format);
        unsigned low = block[4 + g / 2] >> 4 * (g % 2) & 15;
        group[row] = (uint8_t)((low | (high >> 2 * g & 3) << 4) - 32);
        put_words(group + format.scale_bytes + 4 * row, block + 8 + 16 * g, 4);
    }
}

static void pack_block(int32_t type, const uint8_t *block, uint8_t *record, int row) {
    switch (type) {
    case TC_Q4_0: pack_group(TC_Q4_0, block, record, row); break;
    case TC_IQ4_NL: pack_group(TC_IQ4_NL, block, record, row); break;
    case TC_Q4_1: pack_group(TC_Q4_1, block, record, row); break;
    case TC_Q5_0: pack_group(TC_Q5_0, block, record, row); break;
    case TC_Q5_1: pack_group(TC_Q5_1, block, record, row); break;
    case TC_Q8_0: pack_group(TC_Q8_0, block, record, row); break;
    case TC_Q4_K: pack_q45_k(TC_Q4_K, block, record, row); break;
    case TC_Q5_K: pack_q45_k(TC_Q5_K, block, record, row); break;
    case TC_Q6_K: pack_q6_k(block, record, row); break;
    case TC_IQ4_XS: pack_iq4_xs(block, record, row); break;
    }
}

typedef struct {
    const tc_weight *file;
    uint8_t *tiles;
} pack_task;

static void pack_tile(const tc_weight *file, int64_t tile, uint8_t *out) {
    tc_tile_format format = tc_tile_format_of(file->type);
    int64_t records = file->cols / (TC_GROUP * format.groups);
    int64_t record_bytes = tc_tile_record_bytes(format), first = tile * TC_TILE_ROWS;
    int num_rows = (int)(file->rows - first < TC_TILE_ROWS ? file->rows - first : TC_TILE_ROWS);
    if (num_rows < TC_TILE_ROWS) memset(out, 0, (size_t)(records * record_bytes));
    for (int64_t i = 0; i < records; ++i) {
        const uint8_t *block = file->data + first * file->row_bytes + i * format.block_bytes;
        for (int row = 0; row < num_rows; ++row)
            pack_block(file->type, block + row * file->row_bytes, out + i * record_bytes, row);
    }
}

static void run_pack_piece(const void *arg, int64_t piece, int worker) {
    const pack_task *task = arg;
    const tc_weight *file = task->file;
    int64_t num_tiles = (file->rows + TC_TILE_ROWS - 1) / TC_TILE_ROWS;
    int64_t tile_bytes = tc_tile_bytes(tc_tile_format_of(file->type), file->cols);
    int64_t first = piece * PIECE_TILES, last = first + PIECE_TILES;
    (void)worker;
    if (last > num_tiles) last = num_tiles;
    for (int64_t tile = first; tile < last; ++tile)
        pack_tile(file, tile, task->tiles + tile * tile_bytes);
}

TC_EXPORT void tc_pack_tiles(tc_pool *pool, const tc_weight *file, uint8_t *tiles) {
    pack_task arg = {file, tiles};
    int64_t num_tiles = (file->rows + TC_TILE_ROWS - 1) / TC_TILE_ROWS;
    tc_task task = {run_pack_piece, &arg, (num_tiles + PIECE_TILES - 1) / PIECE_TILES};
    tc_pool_run(pool, &task, 1);
}
