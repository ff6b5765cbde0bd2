/* What the files of attention share.
 *
 * Arithmetic of one row (a token and a query head), which nothing else in the step changes:
 *   - keys are cut into blocks of 64 and splits of 256 at fixed positions of the sequence;
 *   - within a split, blocks in rising order update a maximum, a sum of exponentials and a weighted
 *     sum of values ("Online normalizer calculation for softmax", arXiv 1805.02867);
 *   - splits are merged in rising order. Splits and blocks in which a row sees nothing leave its
 *     bits as they are, so it does not matter which of them a tile visits.
 * So a token has the same bits whether its splits are computed one after the other or at the same
 * time, and whether it came alone or in a prompt.
 */
#ifndef TIERCEL_ATTENTION_H
#define TIERCEL_ATTENTION_H

#include "native.h"

enum { TC_KEY_BLOCK = 64, TC_KEY_SPLIT = 256 };

/* Rows of one key/value head: row t * group + g is query t and head g of the group. All arrays are
 * of one worker; `pitch` is head_dim rounded up to a multiple of 8, filled up with zeros. */
typedef struct {
    int rows, group, pitch;
    float *q;        /* (rows, pitch), times the scale */
    float *sums;     /* (rows, pitch), weighted values of the split so far */
    float *most;     /* (rows), the largest score of the split so far */
    float *total;    /* (rows), of exponentials of the split so far */
    float *scores;   /* (rows, TC_KEY_BLOCK) */
    float *rescale;  /* (rows) */
    float *keys;     /* (TC_KEY_BLOCK, pitch) */
    float *values;   /* (TC_KEY_BLOCK, pitch) */
    float *all_sums; /* as sums, most and total, of all splits so far */
    float *all_most, *all_total;
} tc_tile;

/* Keys and values of one block, one pointer a key. Keys outside of first .. last - 1 are repetitions
 * that nothing weighs. */
typedef struct {
    const void *keys[TC_KEY_BLOCK], *values[TC_KEY_BLOCK];
    int first, last; /* those that some row sees */
    int type;
} tc_key_block;

/* Adds a block whose first key is at position `base`; query t is at `position` + t. Entries of the
 * `next` block are fetched meanwhile; NULL for none. */
void tc_attend_block(tc_tile *tile, const tc_key_block *block, const tc_key_block *next, int64_t base,
                     int64_t position, int64_t window);
void tc_clear_sums(float *sums, float *most, float *total, int rows, int pitch);
/* Adds a split to all splits before it. */
void tc_merge_split(const tc_tile *tile, const float *sums, const float *most, const float *total);

/* Copies a row of floats or of a cache to floats and zeros up to `pitch`. */
void tc_widen_row(const void *row, int type, int64_t count, int64_t pitch, float *out);
/* Rounds a row to a cache's type. */
void tc_round_to_cache(const float *x, int type, int64_t count, void *out);

/* Norm and rotation of one head, in place; weight NULL for no norm. */
void tc_rotate_head(const tc_attention *a, const float *weight, int64_t position, float *x);
/* Norms and rotates the key of a token and copies key and value to its slot. Without a slot they are
 * rounded as the cache would. */
void tc_write_token(const tc_attention *a, int64_t token, int kv_head);

static inline float *tc_head(const tc_attention *a, int64_t token, int64_t head) {
    return a->heads + (token * (a->num_heads + 2 * a->num_kv_heads) + head) * a->head_dim;
}

#endif
