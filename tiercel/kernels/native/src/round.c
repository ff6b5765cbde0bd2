/* Activations rounded to 8 bits; native.h has the layout of a row. */
#include <math.h>
#include <string.h>

#include "native.h"
#include "simd.h"

TC_EXPORT int64_t tc_rounded_bytes(int64_t cols) {
    int64_t groups = cols / TC_GROUP;
    int64_t bytes = cols + groups * (int64_t)(2 * sizeof(float) + 2 * sizeof(int16_t));
    return (bytes + 63) / 64 * 64;
}

/* max|x| of a group. As bits, magnitudes have the order of their values, with NaN above all, so a
 * NaN or an infinity among them makes the scale, and each result, NaN or infinite. */
static inline float largest_magnitude(const float *x) {
    uint32_t bits[TC_GROUP], most[TC_LANES] = {0}, top = 0;
    float value;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < TC_GROUP; i += TC_LANES)
        for (int lane = 0; lane < TC_LANES; ++lane) {
            uint32_t magnitude = bits[i + lane] & 0x7fffffff;
            most[lane] = magnitude > most[lane] ? magnitude : most[lane];
        }
    for (int lane = 0; lane < TC_LANES; ++lane) top = most[lane] > top ? most[lane] : top;
    memcpy(&value, &top, 4);
    return value;
}

/* q = round(x / d), limited to -127 .. 127: where d is subnormal its own rounding is coarse. */
static inline void round_group(const float *x, float d, int8_t *q) {
    float rounded[TC_GROUP];
    for (int i = 0; i < TC_GROUP; i += TC_LANES) {
        vf scaled = vf_round(vf_div(vf_load(x + i), vf_set(d)));
        vf_store(rounded + i, vf_min(vf_max(scaled, vf_set(-127.0f)), vf_set(127.0f)));
    }
    for (int i = 0; i < TC_GROUP; ++i) q[i] = (int8_t)(int32_t)rounded[i];
}

void tc_round_row(const float *x, int64_t first, int64_t count, int64_t cols, uint8_t *row) {
    int64_t groups = cols / TC_GROUP;
    uint8_t *scales = row + cols, *scaled_sums = scales + 4 * groups, *sums = scaled_sums + 4 * groups;
    for (int64_t done = 0; done < count; done += TC_GROUP) {
        int64_t group = (first + done) / TC_GROUP;
        int8_t *q = (int8_t *)row + first + done;
        float d = largest_magnitude(x + done) / 127.0f, scaled_sum;
        int16_t halves[2] = {0, 0};
        if (d != 0.0f)
            round_group(x + done, d, q);
        else
            memset(q, 0, TC_GROUP);
        for (int i = 0; i < TC_GROUP / 2; ++i) {
            halves[0] = (int16_t)(halves[0] + q[i]);
            halves[1] = (int16_t)(halves[1] + q[i + TC_GROUP / 2]);
        }
        scaled_sum = d * (float)(halves[0] + halves[1]);
        memcpy(scales + 4 * group, &d, 4);
        memcpy(scaled_sums + 4 * group, &scaled_sum, 4);
        memcpy(sums + 4 * group, halves, 4);
    }
}
