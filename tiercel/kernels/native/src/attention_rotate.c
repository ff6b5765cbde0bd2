/* Norm and rotation of heads, and the writes to the cache. */
#include "attention.h"
#include "simd.h"

static void norm_head(const float *weight, float eps, int64_t count, float *x) {
    float scale = tc_inverse_rms(x, count, eps);
    int64_t i = 0;
    for (; i + TC_LANES <= count; i += TC_LANES)
        vf_store(x + i, vf_mul(vf_mul(vf_load(x + i), vf_set(scale)), vf_load(weight + i)));
    for (; i < count; ++i) x[i] = x[i] * scale * weight[i];
}

void tc_rotate_head(const tc_attention *a, const float *weight, int64_t position, float *x) {
    int64_t half = a->half, i = 0;
    const float *cosines = a->rope + position * 2 * half, *sines = cosines + half;
    float *second = x + half;
    if (weight) norm_head(weight, a->eps, a->head_dim, x);
    for (; i + TC_LANES <= half; i += TC_LANES) {
        vf x0 = vf_load(x + i), x1 = vf_load(second + i), c = vf_load(cosines + i), s = vf_load(sines + i);
        vf_store(x + i, vf_sub(vf_mul(x0, c), vf_mul(x1, s)));
        vf_store(second + i, vf_add(vf_mul(x1, c), vf_mul(x0, s)));
    }
    for (; i < half; ++i) {
        float x0 = x[i], x1 = second[i], c = cosines[i], s = sines[i];
        x[i] = x0 * c - x1 * s;
        second[i] = x1 * c + x0 * s;
    }
}

void tc_round_to_cache(const float *x, int type, int64_t count, void *out) {
    uint16_t *halves = out;
    int64_t i = 0;
    if (type == TC_F32) {
        memmove(out, x, (size_t)count * sizeof *x);
    } else if (type == TC_F16) {
        for (; i + TC_LANES <= count; i += TC_LANES) vf_store_f16(halves + i, vf_load(x + i));
        for (; i < count; ++i) halves[i] = tc_to_f16_bits(x[i]);
    } else {
        for (; i < count; ++i) halves[i] = tc_to_bf16_bits(x[i]);
    }
}

void tc_widen_row(const void *row, int type, int64_t count, int64_t pitch, float *out) {
    const uint16_t *halves = row;
    int64_t i = 0;
    if (type == TC_F32) {
        memmove(out, row, (size_t)count * sizeof *out);
        i = count;
    } else if (type == TC_F16) {
        for (; i + TC_LANES <= count; i += TC_LANES) vf_store(out + i, vf_load_f16(halves + i));
        for (; i < count; ++i) out[i] = tc_from_f16_bits(halves[i]);
    } else {
        for (; i + TC_LANES <= count; i += TC_LANES) vf_store(out + i, vf_load_bf16(halves + i));
        for (; i < count; ++i) out[i] = tc_from_bf16_bits(halves[i]);
    }
    for (; i < pitch; ++i) out[i] = 0;
}

/* Rounds values in place, without a cache. */
static void round_in_place(int type, int64_t count, float *x) {
    uint16_t halves[TC_LANES];
    for (int64_t i = 0; type != TC_F32 && i < count; i += TC_LANES) {
        int64_t some = count - i < TC_LANES ? count - i : TC_LANES;
        tc_round_to_cache(x + i, type, some, halves);
        tc_widen_row(halves, type, some, some, x + i);
    }
}

void tc_write_token(const tc_attention *a, int64_t token, int kv_head) {
    float *k = tc_head(a, token, a->num_heads + kv_head);
    float *v = tc_head(a, token, a->num_heads + a->num_kv_heads + kv_head);
    int64_t slot = a->slots[token], size = a->cache_type == TC_F32 ? 4 : 2;
    tc_rotate_head(a, a->k_norm, a->positions[token], k);
    if (slot < 0) {
        round_in_place(a->cache_type, a->head_dim, k);
        round_in_place(a->cache_type, a->head_dim, v);
        return;
    }
    int64_t at = (slot * a->num_kv_heads + kv_head) * a->head_dim * size;
    tc_round_to_cache(k, a->cache_type, a->head_dim, (uint8_t *)a->k_cache + at);
    tc_round_to_cache(v, a->cache_type, a->head_dim, (uint8_t *)a->v_cache + at);
}
