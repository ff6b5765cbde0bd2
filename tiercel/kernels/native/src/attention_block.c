/* Scores, softmax and weighted values of one block of keys.
 *
 * A score is a sum over 8 lanes of head_dim, so that keys are read as the cache has them; eight
 * results are reduced together. Weighted values are sums over keys in rising order. Few rows read
 * the cache directly, and each entry once; many rows share a copy in float32.
 */
#include <float.h>

#include "attention.h"
#include "simd.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { STEP = 3, MAX_STEP = 4 }; /* rows of one pass over the keys: 12 sums fit the registers */

INLINE vf load_entry(const void *row, int64_t at, int type) {
    if (type == TC_F16) return vf_load_f16((const uint16_t *)row + at);
    if (type == TC_BF16) return vf_load_bf16((const uint16_t *)row + at);
    return vf_load((const float *)row + at);
}

/* Entries of one key are as far apart as all heads are wide: too far for the processor to guess. */
INLINE void fetch(const void *row, int pitch, int type) {
    int bytes = pitch * (type == TC_F32 ? 4 : 2);
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const uint8_t *)row + at);
}

/* ---- scores ---- */

/* scores[r][j] of `rows` queries and `keys` keys, rows * keys <= 16. */
INLINE void score_some(const float *q, int pitch, const void *const *k, int type, int rows, int keys,
                       float *scores) {
    vf sums[16];
    float out[16];
    UNROLL for (int i = 0; i < 16; ++i) sums[i] = vf_set(0);
    for (int at = 0; at < pitch; at += TC_LANES) {
        vf query[MAX_STEP];
        UNROLL for (int r = 0; r < rows; ++r) query[r] = vf_hold(vf_load(q + r * pitch + at));
        UNROLL for (int j = 0; j < keys; ++j) {
            vf entry = load_entry(k[j], at, type);
            UNROLL for (int r = 0; r < rows; ++r)
                sums[r * keys + j] = vf_fma(query[r], entry, sums[r * keys + j]);
        }
    }
    vf_store(out, vf_sum_each(sums));
    if (rows * keys > 8) vf_store(out + 8, vf_sum_each(sums + 8));
    UNROLL for (int r = 0; r < rows; ++r)
        memcpy(scores + r * TC_KEY_BLOCK, out + r * keys, (size_t)keys * sizeof *out);
}

/* Keys first .. last - 1, multiples of 8. */
INLINE void score_rows(const tc_tile *tile, int row, int rows, const tc_key_block *block,
                       const tc_key_block *next, int first, int last, int type) {
    const float *q = tile->q + (int64_t)row * tile->pitch;
    float *scores = tile->scores + row * TC_KEY_BLOCK;
    int keys = rows == 1 ? 8 : rows == 4 ? 2 : 4;
    for (int j = first; j < last; j += keys) {
        for (int i = j; next && i < j + keys; ++i) fetch(next->keys[i], tile->pitch, type);
        score_some(q, tile->pitch, block->keys + j, type, rows, keys, scores + j);
    }
}

/* ---- weighted values ---- */

/* `vectors` vectors of columns from `at` on. */
INLINE void weigh_some(const tc_tile *tile, int row, int rows, const tc_key_block *block,
                       const tc_key_block *next, int first, int last, int at, int vectors, int type) {
    float *out = tile->sums + (int64_t)row * tile->pitch + at;
    const float *weights = tile->scores + row * TC_KEY_BLOCK;
    vf sums[12];
    UNROLL for (int r = 0; r < rows; ++r) {
        vf rescale = vf_set(tile->rescale[row + r]);
        UNROLL for (int i = 0; i < vectors; ++i)
            sums[r * vectors + i] = vf_mul(vf_load(out + r * tile->pitch + i * TC_LANES), rescale);
    }
    for (int j = first; j < last; ++j) {
        vf weight[MAX_STEP];
        if (next) fetch(next->values[j], tile->pitch, type);
        UNROLL for (int r = 0; r < rows; ++r) weight[r] = vf_hold(vf_set(weights[r * TC_KEY_BLOCK + j]));
        UNROLL for (int i = 0; i < vectors; ++i) {
            vf entry = load_entry(block->values[j], at + i * TC_LANES, type);
            UNROLL for (int r = 0; r < rows; ++r)
                sums[r * vectors + i] = vf_fma(weight[r], entry, sums[r * vectors + i]);
        }
    }
    UNROLL for (int r = 0; r < rows; ++r) {
        UNROLL for (int i = 0; i < vectors; ++i)
            vf_store(out + r * tile->pitch + i * TC_LANES, sums[r * vectors + i]);
    }
}

INLINE void weigh_rows(const tc_tile *tile, int row, int rows, const tc_key_block *block,
                       const tc_key_block *next, int first, int last, int type) {
    int vectors = rows == 4 ? 2 : 4, at = 0;
    for (; at + vectors * TC_LANES <= tile->pitch; at += vectors * TC_LANES)
        weigh_some(tile, row, rows, block, at ? NULL : next, first, last, at, vectors, type);
    for (; at < tile->pitch; at += TC_LANES)
        weigh_some(tile, row, rows, block, NULL, first, last, at, 1, type);
}

/* ---- the same for any number of rows and type: the constants choose the code ---- */

#define EACH_TYPE(call, rows)                    \
    do {                                         \
        if (block->type == TC_F16) {             \
            call(rows, TC_F16);                  \
        } else if (block->type == TC_BF16) {     \
            call(rows, TC_BF16);                 \
        } else {                                 \
            call(rows, TC_F32);                  \
        }                                        \
    } while (0)
#define SCORE(rows, type) score_rows(tile, row, rows, block, next, first, last, type)
#define WEIGH(rows, type) weigh_rows(tile, row, rows, block, next, first, last, type)

static void score(const tc_tile *tile, int row, int rows, const tc_key_block *block,
                  const tc_key_block *next, int first, int last) {
    switch (rows) {
    case 1: EACH_TYPE(SCORE, 1); break;
    case 2: EACH_TYPE(SCORE, 2); break;
    case 3: EACH_TYPE(SCORE, 3); break;
    default: EACH_TYPE(SCORE, 4);
    }
}

static void weigh(const tc_tile *tile, int row, int rows, const tc_key_block *block,
                  const tc_key_block *next, int first, int last) {
    switch (rows) {
    case 1: EACH_TYPE(WEIGH, 1); break;
    case 2: EACH_TYPE(WEIGH, 2); break;
    case 3: EACH_TYPE(WEIGH, 3); break;
    default: EACH_TYPE(WEIGH, 4);
    }
}

/* ---- softmax ---- */

/* Keys of the block that a row sees: first .. last - 1, possibly none. */
typedef struct {
    int first, last;
} seen;

static seen seen_keys(int64_t base, int64_t position, int64_t window) {
    int64_t first = window ? position - window + 1 - base : 0, last = position + 1 - base;
    first = first < 0 ? 0 : first;
    last = last > TC_KEY_BLOCK ? TC_KEY_BLOCK : last;
    return last > first ? (seen){(int)first, (int)last} : (seen){0, 0};
}

static inline int round_down(int value) { return value / TC_LANES * TC_LANES; }
static inline int round_up(int value) { return round_down(value + TC_LANES - 1); }

static void fill(float *x, int first, int last, float value) {
    for (int i = first; i < last; ++i) x[i] = value;
}

static inline int is_whole(seen keys) { return keys.last - keys.first == TC_KEY_BLOCK; }

/* The largest of a row's scores; those in the same vectors that it does not see become the least. */
static float largest_score(float *scores, seen keys) {
    vf most = vf_set(-FLT_MAX);
    if (is_whole(keys)) {
        UNROLL for (int j = 0; j < TC_KEY_BLOCK; j += TC_LANES) most = vf_max(most, vf_load(scores + j));
        return vf_largest(most);
    }
    fill(scores, round_down(keys.first), keys.first, -FLT_MAX);
    fill(scores, keys.last, round_up(keys.last), -FLT_MAX);
    for (int j = round_down(keys.first); j < keys.last; j += TC_LANES)
        most = vf_max(most, vf_load(scores + j));
    return vf_largest(most);
}

/* e^(score - most) in place of a vector of scores. */
static inline vf weigh_vector(float *scores, vf most) {
    vf weights = vf_exp(vf_sub(vf_load(scores), most));
    vf_store(scores, weights);
    return weights;
}

/* Scores to weights e^(score - most), and 0 for keys of first .. last that the row does not see.
 * Returns the sum. */
static float weights_of_scores(float *scores, seen keys, int first, int last, float most) {
    vf sum = vf_set(0), limit = vf_set(most);
    if (is_whole(keys)) {
        UNROLL for (int j = 0; j < TC_KEY_BLOCK; j += TC_LANES)
            sum = vf_add(sum, weigh_vector(scores + j, limit));
        return vf_sum(sum);
    }
    for (int j = round_down(keys.first); j < keys.last; j += TC_LANES) {
        weigh_vector(scores + j, limit);
        if (j < keys.first) fill(scores, j, keys.first, 0);
        if (j + TC_LANES > keys.last) fill(scores, keys.last, j + TC_LANES, 0);
        sum = vf_add(sum, vf_load(scores + j));
    }
    int none = keys.first == keys.last;
    fill(scores, first, none ? last : round_down(keys.first), 0);
    fill(scores, none ? last : round_up(keys.last), last, 0);
    return vf_sum(sum);
}

static void exp_all(float *x, int count) {
    int i = 0;
    for (; i + TC_LANES <= count; i += TC_LANES) vf_store(x + i, vf_exp(vf_load(x + i)));
    if (i < count) vf_store_first(x + i, vf_exp(vf_load_first(x + i, count - i)), count - i);
}

/* ---- a block ---- */

/* The keys that rows row .. row + rows - 1 see between them: ranges rise with the row. */
static seen seen_by_rows(const tc_tile *tile, int row, int rows, int64_t base, int64_t position,
                         int64_t window) {
    seen all = {TC_KEY_BLOCK, 0};
    for (int t = row / tile->group; t <= (row + rows - 1) / tile->group; ++t) {
        seen keys = seen_keys(base, position + t, window);
        if (keys.first == keys.last) continue;
        if (keys.first < all.first) all.first = keys.first;
        if (keys.last > all.last) all.last = keys.last;
    }
    return all.first < all.last ? all : (seen){0, 0};
}

/* Never one row alone after others, for which all keys would be read again. */
static int step_of(const tc_tile *tile, int row) {
    int left = tile->rows - row;
    return left <= MAX_STEP ? left : STEP;
}

void tc_attend_block(tc_tile *tile, const tc_key_block *block, const tc_key_block *next, int64_t base,
                     int64_t position, int64_t window) {
    int first = round_down(block->first), last = round_up(block->last);
    for (int row = 0, rows; row < tile->rows; row += rows) {
        rows = step_of(tile, row);
        seen some = seen_by_rows(tile, row, rows, base, position, window);
        if (some.first < some.last)
            score(tile, row, rows, block, row ? NULL : next, round_down(some.first), round_up(some.last));
    }
    for (int row = 0, t = 0; row < tile->rows; ++t) {
        seen keys = seen_keys(base, position + t, window);
        for (int g = 0; g < tile->group; ++g, ++row) {
            float largest = largest_score(tile->scores + row * TC_KEY_BLOCK, keys);
            float most = largest > tile->most[row] ? largest : tile->most[row];
            tile->rescale[row] = tile->most[row] - most;
            tile->most[row] = most;
        }
    }
    exp_all(tile->rescale, tile->rows);
    for (int row = 0, t = 0; row < tile->rows; ++t) {
        seen keys = seen_keys(base, position + t, window);
        for (int g = 0; g < tile->group; ++g, ++row) {
            float *scores = tile->scores + row * TC_KEY_BLOCK;
            float sum = weights_of_scores(scores, keys, first, last, tile->most[row]);
            tile->total[row] = tile->total[row] * tile->rescale[row] + sum;
        }
    }
    for (int row = 0, rows; row < tile->rows; row += rows) {
        rows = step_of(tile, row);
        seen some = seen_by_rows(tile, row, rows, base, position, window);
        if (some.first < some.last) weigh(tile, row, rows, block, row ? NULL : next, some.first, some.last);
    }
}

/* ---- splits ---- */

void tc_clear_sums(float *sums, float *most, float *total, int rows, int pitch) {
    memset(sums, 0, (size_t)rows * (size_t)pitch * sizeof *sums);
    memset(total, 0, (size_t)rows * sizeof *total);
    fill(most, 0, rows, -FLT_MAX);
}

void tc_merge_split(const tc_tile *tile, const float *sums, const float *most, const float *total) {
    for (int row = 0; row < tile->rows; ++row) {
        float before = tile->all_most[row], both = most[row] > before ? most[row] : before;
        float differences[TC_LANES] = {before - both, most[row] - both};
        vf_store(differences, vf_exp(vf_load(differences)));
        vf old = vf_set(differences[0]), new = vf_set(differences[1]);
        float *all = tile->all_sums + (int64_t)row * tile->pitch;
        const float *split = sums + (int64_t)row * tile->pitch;
        for (int at = 0; at < tile->pitch; at += TC_LANES)
            vf_store(all + at, vf_fma(vf_load(split + at), new, vf_mul(vf_load(all + at), old)));
        tile->all_most[row] = both;
        tile->all_total[row] = tile->all_total[row] * differences[0] + total[row] * differences[1];
    }
}
