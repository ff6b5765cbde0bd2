/* Groups of 32 columns of each quantised type as small integers with their factors. The bytes of a
 * block are described in ops/dequantize_torch.py; factors are formed in the order written there. */
#include "decode.h"
#include "decode_tables.h"
#include "float_bytes.h"

static void set_factors(tc_codes *out, float d, float m) {
    out->d[0] = out->d[1] = d;
    out->m[0] = out->m[1] = m;
}

static void set_half_factors(tc_codes *out, float first, float second) {
    out->d[0] = first;
    out->d[1] = second;
    out->m[0] = out->m[1] = -0.0f;
}

/* ---- blocks of one group ---- */

static void codes_q4_0(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_sub(vb_load_nibbles(block + 2), vb_set(8)));
    set_factors(out, tc_f16_at(block), -0.0f);
}

static void codes_q4_1(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_load_nibbles(block + 4));
    set_factors(out, tc_f16_at(block), tc_f16_at(block + 2));
}

static void codes_q5_0(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_sub(vb_or(vb_load_nibbles(block + 6), vb_spread(block + 2)), vb_set(16)));
    set_factors(out, tc_f16_at(block), -0.0f);
}

static void codes_q5_1(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_or(vb_load_nibbles(block + 8), vb_spread(block + 4)));
    set_factors(out, tc_f16_at(block), tc_f16_at(block + 2));
}

static void codes_q8_0(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_load(block + 2));
    set_factors(out, tc_f16_at(block), -0.0f);
}

static void codes_iq4_nl(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    vb_store(out->q, vb_look_up(tc_iq4_values, vb_load_nibbles(block + 2)));
    set_factors(out, tc_f16_at(block), -0.0f);
}

static void codes_mxfp4(const uint8_t *block, unsigned group, tc_codes *out) {
    (void)group;
    uint32_t e = block[0], bits = e < 2 ? 0x200000u << e : (e - 1) << 23; /* 2^(e - 128) */
    float d;
    memcpy(&d, &bits, 4);
    vb_store(out->q, vb_look_up(tc_e2m1_doubles, vb_load_nibbles(block + 1)));
    set_factors(out, d, -0.0f);
}

/* ---- blocks of eight groups ---- */

static void codes_q2_k(const uint8_t *block, unsigned group, tc_codes *out) {
    const uint8_t *qs = block + 16 + 32 * (group / 4), *scales = block + 2 * group;
    float d = tc_f16_at(block + 80), dmin = tc_f16_at(block + 82);
    vb_store(out->q, vb_and(vb_shr(vb_load(qs), 2 * (group % 4)), vb_set(3)));
    for (int h = 0; h < 2; ++h) {
        out->d[h] = d * (float)(scales[h] & 15);
        out->m[h] = -(dmin * (float)(scales[h] >> 4));
    }
}

static float scale_q3_k(const uint8_t *scales, int j) {
    int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
    return (float)((low | (scales[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32);
}

static void codes_q3_k(const uint8_t *block, unsigned group, tc_codes *out) {
    float d = tc_f16_at(block + 108);
    vb low = vb_and(vb_shr(vb_load(block + 32 + 32 * (group / 4)), 2 * (group % 4)), vb_set(3));
    vb bit = vb_and(vb_shr(vb_load(block), group), vb_set(1));
    vb_store(out->q, vb_sub(vb_or(low, vb_shl(bit, 2)), vb_set(4)));
    set_half_factors(out, d * scale_q3_k(block + 96, 2 * group), d * scale_q3_k(block + 96, 2 * group + 1));
}

/* Scales and minima of Q4_K and Q5_K. */
static void set_factors_k(const uint8_t *block, unsigned group, tc_codes *out) {
    const uint8_t *b = block + 4;
    int scale, min;
    if (group < 4) {
        scale = b[group] & 63;
        min = b[group + 4] & 63;
    } else {
        scale = (b[group + 4] & 15) | b[group - 4] >> 6 << 4;
        min = b[group + 4] >> 4 | b[group] >> 6 << 4;
    }
    set_factors(out, tc_f16_at(block) * (float)scale, -(tc_f16_at(block + 2) * (float)min));
}

static void codes_q4_k(const uint8_t *block, unsigned group, tc_codes *out) {
    vb qs = vb_load(block + 16 + 32 * (group / 2));
    vb_store(out->q, vb_and(vb_shr(qs, 4 * (group % 2)), vb_set(15)));
    set_factors_k(block, group, out);
}

static void codes_q5_k(const uint8_t *block, unsigned group, tc_codes *out) {
    vb low = vb_and(vb_shr(vb_load(block + 48 + 32 * (group / 2)), 4 * (group % 2)), vb_set(15));
    vb bit = vb_and(vb_shr(vb_load(block + 16), group), vb_set(1));
    vb_store(out->q, vb_or(low, vb_shl(bit, 4)));
    set_factors_k(block, group, out);
}

static void codes_q6_k(const uint8_t *block, unsigned group, tc_codes *out) {
    int half = group / 4, quarter = group % 4;
    const int8_t *scales = (const int8_t *)block + 192 + 2 * group;
    float d = tc_f16_at(block + 208);
    vb low = vb_load(block + 64 * half + 32 * (quarter % 2));
    low = vb_and(vb_shr(low, 4 * (quarter / 2)), vb_set(15));
    vb high = vb_and(vb_shr(vb_load(block + 128 + 32 * half), 2 * quarter), vb_set(3));
    vb_store(out->q, vb_sub(vb_or(low, vb_shl(high, 4)), vb_set(32)));
    set_half_factors(out, d * (float)scales[0], d * (float)scales[1]);
}

static void codes_iq4_xs(const uint8_t *block, unsigned group, tc_codes *out) {
    int low = block[4 + group / 2] >> 4 * (group % 2) & 15;
    int high = block[2 + group / 4] >> 2 * (group % 4) & 3;
    vb_store(out->q, vb_look_up(tc_iq4_values, vb_load_nibbles(block + 8 + 16 * group)));
    set_factors(out, tc_f16_at(block) * (float)((low | high << 4) - 32), -0.0f);
}

/* Two bits each of eight weights as the bytes of a word. */
static uint64_t spread_pairs(uint64_t pairs) {
    pairs = (pairs | pairs << 24) & 0x000000ff000000ff;
    pairs = (pairs | pairs << 12) & 0x000f000f000f000f;
    return (pairs | pairs << 6) & 0x0303030303030303;
}

/* Four times seven signs as bytes, whose eighth bit makes the number of bits even. */
static uint32_t spread_signs(uint32_t word) {
    uint32_t signs = (word & 0x7f) | (word << 1 & 0x7f00) | (word << 2 & 0x7f0000) | (word << 3 & 0x7f000000);
    uint32_t parity = signs ^ signs >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return signs | (parity & 0x01010101) << 7;
}

static void codes_iq2_xxs(const uint8_t *block, unsigned group, tc_codes *out) {
    static const int8_t magnitudes[16] = {8, 25, 43};
    const uint8_t *part = block + 2 + 8 * group;
    uint32_t word, signs;
    uint64_t pairs[4];
    memcpy(&word, part + 4, 4);
    signs = spread_signs(word);
    for (int i = 0; i < 4; ++i) pairs[i] = spread_pairs(tc_iq2_xxs_grid[part[i]]);
    vb q = vb_look_up(magnitudes, vb_words(pairs));
    vb minus = vb_sub(vb_set(0), vb_shr(vb_spread((const uint8_t *)&signs), 4)); /* all bits, or none */
    vb_store(out->q, vb_sub(q, vb_and(vb_shl(q, 1), minus)));
    set_factors(out, tc_f16_at(block) * (0.5f + (float)(word >> 28)) * 0.25f, -0.0f);
}

static const tc_format formats[] = {
    {TC_F32, 0, 4, 0, NULL},           {TC_F16, 0, 2, 0, NULL},           {TC_BF16, 0, 2, 0, NULL},
    {TC_Q4_0, 1, 18, 0, codes_q4_0},   {TC_Q4_1, 1, 20, 1, codes_q4_1},   {TC_Q5_0, 1, 22, 0, codes_q5_0},
    {TC_Q5_1, 1, 24, 1, codes_q5_1},   {TC_Q8_0, 1, 34, 0, codes_q8_0},   {TC_Q2_K, 8, 84, 1, codes_q2_k},
    {TC_Q3_K, 8, 110, 0, codes_q3_k},  {TC_Q4_K, 8, 144, 1, codes_q4_k},  {TC_Q5_K, 8, 176, 1, codes_q5_k},
    {TC_Q6_K, 8, 210, 0, codes_q6_k},  {TC_IQ2_XXS, 8, 66, 0, codes_iq2_xxs},
    {TC_IQ4_NL, 1, 18, 0, codes_iq4_nl},
    {TC_IQ4_XS, 8, 136, 0, codes_iq4_xs},
    {TC_MXFP4, 1, 17, 0, codes_mxfp4},
};

const tc_format *tc_find_format(int32_t type) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; ++i)
        if (formats[i].type == type) return &formats[i];
    return NULL;
}
