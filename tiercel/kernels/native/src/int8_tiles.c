/* Products of tiles with activations of 8 bits: exact sums of integers over a group of 32 columns,
 * then, per output, acc = fma(dot, d * dx, acc), and where a type has minimums acc = fma(m, ds, acc),
 * in ascending groups. Q6_K's two scales of a group are integers and belong to the exact sum.
 *
 * Two tiles go side by side, so that a token's four columns are loaded once for 16 rows, and up to
 * TOKENS tokens. With more tokens, BLOCK_GROUPS groups are multiplied with TOKENS after TOKENS while
 * they are in the first cache. Codes are unpacked in registers, but where that costs much (bits
 * above the fourth) and there are many tokens, once for all of them. None of this changes the
 * operations of an output or their order. */
#include "int8_tiles.h"

#include "int8_simd.h"

enum {
    PAIR = 2, /* tiles side by side */
    TOKENS = TC_INT8_TOKENS,
    BLOCK_GROUPS = 32, /* at most 20 KB, unpacked ones; whole records */
    BLOCK_TOKENS = 128,
    FEW_TOKENS = 8 /* not worth unpacking */
};

/* A group of one tile, ready to be multiplied. */
typedef struct {
    const uint8_t *codes;  /* packed: bits above the fourth, then nibbles; else 8 vectors */
    const uint8_t *scales; /* Q6_K */
    vf d, m;
} group;

typedef struct {
    uint8_t codes[8][32];
    float d[TC_TILE_ROWS];
    float m[TC_TILE_ROWS]; /* of types with minimums */
    uint8_t scales[16];    /* of Q6_K */
} unpacked_group;

/* Where the parts of a rounded row are. */
typedef struct {
    const uint8_t *q, *d, *ds, *halves;
} token;

TC_INLINE token token_of(const tc_input *in, int64_t row) {
    const uint8_t *q = in->q + row * in->q_bytes, *d = q + in->cols;
    int64_t bytes = in->cols / TC_GROUP * 4;
    return (token){q, d, d + bytes, d + 2 * bytes};
}

TC_INLINE vf broadcast(const uint8_t *p) {
    float value;
    memcpy(&value, p, 4);
    return vf_set(value);
}

/* ---- what types have in common; `type` is a constant wherever these are called ---- */

TC_INLINE int has_minimums(int type) {
    return type == TC_Q4_1 || type == TC_Q5_1 || type == TC_Q4_K || type == TC_Q5_K;
}
TC_INLINE int has_bit5(int type) { return type == TC_Q5_0 || type == TC_Q5_1 || type == TC_Q5_K; }
TC_INLINE int is_iq4(int type) { return type == TC_IQ4_NL || type == TC_IQ4_XS; }
TC_INLINE int is_signed(int type) { return type == TC_Q8_0 || is_iq4(type); }
TC_INLINE int steps_per_sums(int type) {
    return is_signed(type) ? STEPS_8 : has_bit5(type) ? STEPS_5 : type == TC_Q6_K ? STEPS_6 : STEPS_4;
}
/* What is to be subtracted from all codes of a group. */
TC_INLINE int code_offset(int type) {
    return type == TC_Q4_0 ? 8 : type == TC_Q5_0 ? 16 : is_signed(type) ? SIGNED_OFFSET : 0;
}
/* Columns 4 * step .. 4 * step + 3 of a packed group. */
TC_INLINE b32 packed_codes(int type, const uint8_t *codes, int step) {
    int bits_bytes = has_bit5(type) ? 32 : type == TC_Q6_K ? 64 : 0;
    if (type == TC_Q8_0) return b32_signed_codes(b32_load(codes + 32 * step));
    b32 low = b32_nibbles(b32_load(codes + bits_bytes + 32 * (step % 4)), step / 4);
    if (is_iq4(type)) return b32_signed_codes(b32_iq4(low));
    if (has_bit5(type)) return b32_or(low, b32_bits_to_4(b32_load(codes), step, 0x10));
    if (type == TC_Q6_K)
        return b32_or(low, b32_bits_to_4(b32_load(codes + 32 * (step / 4)), 2 * (step % 4), 0x30));
    return low;
}

/* Group number `index` of a record. */
TC_INLINE group packed_group(int type, const uint8_t *record, int index) {
    tc_tile_format format = tc_tile_format_of(type);
    const uint8_t *scales = record + format.header_bytes + index * tc_tile_group_bytes(format);
    group w = {scales + format.scale_bytes, scales, vf_load_f16((const uint16_t *)record), vf_set(0.0f)};
    if (type == TC_IQ4_XS) w.d = vf_mul(w.d, vf_from_i8(scales));
    if (has_minimums(type)) {
        vf m = vf_load_f16((const uint16_t *)(record + 16));
        w.m = m;
        if (format.scale_bytes) {
            w.d = vf_mul(w.d, vf_from_u8(scales));
            w.m = vf_mul(vf_sub(vf_set(0.0f), m), vf_from_u8(scales + 8));
        }
    }
    return w;
}

/* ---- products ---- */

/* acc[tile][token] += one group of two tiles with num_x tokens; `index` is the group's number along
 * the columns. */
TC_INLINE void multiply_group(int type, int is_packed, int num_x, const group *w, const token *x,
                              int64_t index, vf (*acc)[TOKENS]) {
    int steps = steps_per_sums(type);
    sums part[PAIR][TOKENS];
    i32x8 dot[PAIR][TOKENS];
    TC_UNROLL
    for (int step = 0; step < 8; ++step) {
        b32 codes[PAIR];
        row_scales scales[PAIR];
        int is_last = step % steps == steps - 1;
        TC_UNROLL
        for (int k = 0; k < PAIR; ++k) {
            codes[k] = is_packed ? packed_codes(type, w[k].codes, step) : b32_load(w[k].codes + 32 * step);
            if (type == TC_Q6_K && is_last) scales[k] = row_scales_load(w[k].scales + step / 4 * 8);
        }
        TC_UNROLL
        for (int t = 0; t < num_x; ++t) {
            b32 columns = b32_columns(x[t].q + index * TC_GROUP + 4 * step);
            TC_UNROLL
            for (int k = 0; k < PAIR; ++k) {
                if (step % steps)
                    part[k][t] = sums_next(part[k][t], codes[k], columns);
                else if (is_signed(type))
                    part[k][t] = sums_first_signed(codes[k], columns);
                else
                    part[k][t] = sums_first(codes[k], columns);
                if (!is_last) continue;
                i32x8 total = type == TC_Q6_K ? sums_scaled(part[k][t], scales[k]) : sums_total(part[k][t]);
                dot[k][t] = step == steps - 1 ? total : i32x8_add(dot[k][t], total);
            }
        }
    }
    TC_UNROLL
    for (int t = 0; t < num_x; ++t) {
        vf d = broadcast(x[t].d + 4 * index);
        TC_UNROLL
        for (int k = 0; k < PAIR; ++k) {
            const uint8_t *halves = x[t].halves + 4 * index;
            i32x8 sum = dot[k][t];
            if (type == TC_Q6_K)
                sum = i32x8_sub(sum, scale_pairs_offset(scale_pairs_load(w[k].scales), halves));
            if (code_offset(type)) sum = i32x8_sub(sum, i32x8_offset(halves, code_offset(type)));
            acc[k][t] = vf_fma(i32x8_floats(sum), vf_mul(w[k].d, d), acc[k][t]);
            if (has_minimums(type)) acc[k][t] = vf_fma(w[k].m, broadcast(x[t].ds + 4 * index), acc[k][t]);
        }
    }
}

TC_INLINE void load_sums(int num_x, float (*sum)[PAIR][TC_TILE_ROWS], vf (*acc)[TOKENS]) {
    TC_UNROLL
    for (int t = 0; t < num_x; ++t) {
        TC_UNROLL
        for (int k = 0; k < PAIR; ++k) acc[k][t] = vf_load(sum[t][k]);
    }
}

TC_INLINE void store_sums(int num_x, vf (*acc)[TOKENS], float (*sum)[PAIR][TC_TILE_ROWS]) {
    TC_UNROLL
    for (int t = 0; t < num_x; ++t) {
        TC_UNROLL
        for (int k = 0; k < PAIR; ++k) vf_store(sum[t][k], acc[k][t]);
    }
}

/* Fetches a group of the tiles `ahead` bytes further, which the next two tiles' columns are: streams
 * as short as a row of tiles are over before the processor's own prefetching has begun. */
TC_INLINE void fetch_ahead(const uint8_t *const *tiles, int64_t at, int64_t bytes, int64_t ahead) {
    TC_UNROLL
    for (int k = 0; k < PAIR; ++k)
        for (int64_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(tiles[k] + at + line + ahead, 0, 2);
}

/* Adds groups first .. first + count - 1, whole records, of two tiles with num_x tokens to
 * sum[token][tile]. ahead: see `fetch_ahead`; 0 fetches nothing. */
TC_INLINE void multiply_packed(int type, int num_x, const uint8_t *const *tiles, int64_t first,
                               int64_t count, int64_t ahead, const token *x,
                               float (*sum)[PAIR][TC_TILE_ROWS]) {
    tc_tile_format format = tc_tile_format_of(type);
    int64_t record_bytes = tc_tile_record_bytes(format), group_bytes = record_bytes / format.groups;
    vf acc[PAIR][TOKENS];
    load_sums(num_x, sum, acc);
    for (int64_t i = first / format.groups; i < (first + count) / format.groups; ++i) {
        for (int g = 0; g < format.groups; ++g) {
            group w[PAIR];
            TC_UNROLL
            for (int k = 0; k < PAIR; ++k) w[k] = packed_group(type, tiles[k] + i * record_bytes, g);
            if (ahead) fetch_ahead(tiles, i * record_bytes + g * group_bytes, group_bytes, ahead);
            multiply_group(type, 1, num_x, w, x, i * format.groups + g, acc);
        }
    }
    store_sums(num_x, acc, sum);
}

/* The same of unpacked groups, of which block[0] is the first. */
TC_INLINE void multiply_unpacked(int type, int num_x, unpacked_group (*block)[PAIR], int64_t first,
                                 int64_t count, const token *x, float (*sum)[PAIR][TC_TILE_ROWS]) {
    vf acc[PAIR][TOKENS];
    load_sums(num_x, sum, acc);
    for (int64_t i = 0; i < count; ++i) {
        group w[PAIR];
        TC_UNROLL
        for (int k = 0; k < PAIR; ++k) {
            unpacked_group *from = &block[i][k];
            w[k] = (group){from->codes[0], from->scales, vf_load(from->d), vf_load(from->m)};
        }
        multiply_group(type, 0, num_x, w, x, first + i, acc);
    }
    store_sums(num_x, acc, sum);
}

TC_INLINE void unpack_groups(int type, const uint8_t *const *tiles, int64_t first, int64_t count,
                             unpacked_group (*block)[PAIR]) {
    tc_tile_format format = tc_tile_format_of(type);
    int64_t record_bytes = tc_tile_record_bytes(format);
    for (int64_t i = 0; i < count; ++i) {
        int64_t record = (first + i) / format.groups;
        int index = (int)((first + i) % format.groups);
        for (int k = 0; k < PAIR; ++k) {
            group w = packed_group(type, tiles[k] + record * record_bytes, index);
            unpacked_group *to = &block[i][k];
            TC_UNROLL
            for (int step = 0; step < 8; ++step)
                b32_store(to->codes[step], packed_codes(type, w.codes, step));
            vf_store(to->d, w.d);
            vf_store(to->m, w.m);
            if (type == TC_Q6_K) memcpy(to->scales, w.scales, 16);
        }
    }
}

/* ---- one function per type, and what chooses among them ---- */

typedef void packed_fn(const uint8_t *const *tiles, int64_t first, int64_t count, int64_t ahead,
                       const token *x, float (*sum)[PAIR][TC_TILE_ROWS]);
typedef void unpack_fn(const uint8_t *const *tiles, int64_t first, int64_t count,
                       unpacked_group (*block)[PAIR]);
typedef void unpacked_fn(unpacked_group (*block)[PAIR], int64_t first, int64_t count, const token *x,
                         float (*sum)[PAIR][TC_TILE_ROWS]);

typedef struct {
    packed_fn *packed[TOKENS]; /* of 1 to TOKENS tokens */
    unpack_fn *unpack;         /* NULL: types whose codes are unpacked each time */
    unpacked_fn *unpacked[TOKENS];
} functions;

#if TC_INT8_TOKENS == 4
#define EACH_COUNT(define, type) define(type, 1) define(type, 2) define(type, 3) define(type, 4)
#define ALL_COUNTS(name) name##_1, name##_2, name##_3, name##_4
#else
#define EACH_COUNT(define, type) define(type, 1)
#define ALL_COUNTS(name) name##_1
#endif
#define PACKED(type, num_x)                                                                        \
    static void packed_##type##_##num_x(const uint8_t *const *tiles, int64_t first, int64_t count, \
                                        int64_t ahead, const token *x,                             \
                                        float (*sum)[PAIR][TC_TILE_ROWS]) {                        \
        multiply_packed(TC_##type, num_x, tiles, first, count, ahead, x, sum);                     \
    }
#define PACKED_TYPE(type) EACH_COUNT(PACKED, type)
#define UNPACK(type)                                                                               \
    static void unpack_##type(const uint8_t *const *tiles, int64_t first, int64_t count,           \
                              unpacked_group (*block)[PAIR]) {                                     \
        unpack_groups(TC_##type, tiles, first, count, block);                                      \
    }
#define UNPACKED(type, num_x)                                                                      \
    static void unpacked_##type##_##num_x(unpacked_group (*block)[PAIR], int64_t first,            \
                                          int64_t count, const token *x,                           \
                                          float (*sum)[PAIR][TC_TILE_ROWS]) {                      \
        multiply_unpacked(TC_##type, num_x, block, first, count, x, sum);                          \
    }
#define UNPACKED_TYPE(type) EACH_COUNT(UNPACKED, type)

PACKED_TYPE(Q4_0)
PACKED_TYPE(Q4_1)
PACKED_TYPE(Q5_0)
PACKED_TYPE(Q5_1)
PACKED_TYPE(Q8_0)
PACKED_TYPE(Q4_K)
PACKED_TYPE(Q5_K)
PACKED_TYPE(Q6_K)
PACKED_TYPE(IQ4_NL)
PACKED_TYPE(IQ4_XS)
UNPACK(Q5_0)
UNPACK(Q5_1)
UNPACK(Q5_K)
UNPACK(Q6_K)
UNPACKED_TYPE(Q5_0)
UNPACKED_TYPE(Q5_1) /* of Q5_K too */
UNPACKED_TYPE(Q6_K)

static functions functions_of(int32_t type) {
    switch (type) {
    case TC_Q4_0: return (functions){{ALL_COUNTS(packed_Q4_0)}, 0, {0}};
    case TC_Q4_1: return (functions){{ALL_COUNTS(packed_Q4_1)}, 0, {0}};
    case TC_Q5_0: return (functions){{ALL_COUNTS(packed_Q5_0)}, unpack_Q5_0, {ALL_COUNTS(unpacked_Q5_0)}};
    case TC_Q5_1: return (functions){{ALL_COUNTS(packed_Q5_1)}, unpack_Q5_1, {ALL_COUNTS(unpacked_Q5_1)}};
    case TC_Q8_0: return (functions){{ALL_COUNTS(packed_Q8_0)}, 0, {0}};
    case TC_Q4_K: return (functions){{ALL_COUNTS(packed_Q4_K)}, 0, {0}};
    case TC_Q5_K: return (functions){{ALL_COUNTS(packed_Q5_K)}, unpack_Q5_K, {ALL_COUNTS(unpacked_Q5_1)}};
    case TC_Q6_K: return (functions){{ALL_COUNTS(packed_Q6_K)}, unpack_Q6_K, {ALL_COUNTS(unpacked_Q6_K)}};
    case TC_IQ4_NL: return (functions){{ALL_COUNTS(packed_IQ4_NL)}, 0, {0}};
    case TC_IQ4_XS: return (functions){{ALL_COUNTS(packed_IQ4_XS)}, 0, {0}};
    default: return (functions){{0}, 0, {0}};
    }
}

/* sum[token][tile] of all columns of two tiles. */
static void multiply_tiles(const functions *f, const uint8_t *const *tiles, const tc_input *in,
                           int64_t first_token, int64_t num_tokens, float (*sum)[PAIR][TC_TILE_ROWS]) {
    unpacked_group block[BLOCK_GROUPS][PAIR];
    int64_t groups = in->cols / TC_GROUP;
    int64_t block_groups = num_tokens > TOKENS ? BLOCK_GROUPS : groups;
    int64_t ahead = PAIR * (tiles[1] - tiles[0]);
    int unpacks = f->unpack && num_tokens > FEW_TOKENS;
    memset(sum, 0, sizeof sum[0] * (size_t)num_tokens);
    for (int64_t g = 0; g < groups; g += block_groups) {
        int64_t count = groups - g < block_groups ? groups - g : block_groups;
        if (unpacks) f->unpack(tiles, g, count, block);
        for (int64_t t = 0; t < num_tokens; t += TOKENS) {
            token x[TOKENS];
            int num_x = (int)(num_tokens - t < TOKENS ? num_tokens - t : TOKENS);
            for (int i = 0; i < num_x; ++i) x[i] = token_of(in, first_token + t + i);
            if (unpacks)
                f->unpacked[num_x - 1](block, g, count, x, sum + t);
            else
                f->packed[num_x - 1](tiles, g, count, t ? 0 : ahead, x, sum + t);
        }
    }
}

/* Rows row .. last - 1 of a tile, at most 8, to a token's outputs. */
static void put_rows(const float *sum, int64_t row, int64_t last, float *y) {
    int64_t count = last - row;
    if (count > 0) memcpy(y, sum, sizeof(float) * (size_t)(count < TC_TILE_ROWS ? count : TC_TILE_ROWS));
}

void tc_matmul_tiles_int8(const tc_weight *w, int64_t first, int64_t last, const tc_input *in, float *y,
                          int64_t ldy) {
    functions f = functions_of(w->type);
    float sum[BLOCK_TOKENS][PAIR][TC_TILE_ROWS];
    int64_t tile_bytes = tc_tile_bytes(tc_tile_format_of(w->type), w->cols);
    for (int64_t token = 0; token < in->rows; token += BLOCK_TOKENS) {
        int64_t num_tokens = in->rows - token < BLOCK_TOKENS ? in->rows - token : BLOCK_TOKENS;
        for (int64_t row = first; row < last; row += PAIR * TC_TILE_ROWS) {
            const uint8_t *tile = w->data + row / TC_TILE_ROWS * tile_bytes;
            /* A last tile without a neighbour is its own. */
            const uint8_t *tiles[PAIR] = {tile, row + TC_TILE_ROWS < last ? tile + tile_bytes : tile};
            multiply_tiles(&f, tiles, in, token, num_tokens, sum);
            for (int64_t t = 0; t < num_tokens; ++t)
                for (int k = 0; k < PAIR; ++k)
                    put_rows(sum[t][k], row + k * TC_TILE_ROWS, last,
                             y + (token + t) * ldy + row - first + k * TC_TILE_ROWS);
        }
    }
}
