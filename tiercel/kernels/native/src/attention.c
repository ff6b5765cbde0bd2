/* Attention of one layer as tasks of the pool.
 *
 * A unit is a run of tokens with consecutive positions: the new tokens of a request, or one item
 * after its prefix, whose keys are those of the cache below `num_cached` and the step's own after.
 * An item's positions continue after the prefix, so it is computed as if it were alone with it.
 *
 * A piece is one tile of a unit's queries with all heads of one key/value head, and all splits of
 * its keys, or only one split where the unit is a large part of the step. Then the piece of a tile
 * that is done last merges the splits, always in rising order.
 *
 * Where every unit is one tile of few tokens without items (decoding), a piece norms, rotates and
 * writes the keys of its own splits itself and there is one task; else a task before does it.
 */
#include <stdatomic.h>

#include "attention.h"
#include "simd.h"

enum {
    TILE_ROWS = 64,      /* queries times heads of a tile, or one query */
    MAX_FUSED = 16,      /* new tokens of a request in a step of one task */
    TOKENS_OF_PIECE = 4, /* of the task that writes the cache */
    PIECES_OF_THREAD = 8,
    DIRECT_ROWS = 4,     /* a tile of more reads a copy of keys and values in float32 */
};

typedef struct {
    int32_t request, token, num_tokens;
    int32_t position;          /* of the first token */
    int32_t num_cached, own;   /* keys from position num_cached on are of tokens `own`, own + 1, ... */
    int32_t num_tiles, splits; /* splits: 0, or pieces of a tile and head, one for each split */
    int32_t first_split;
    int64_t first_piece;
    int64_t partials; /* floats before those of the unit's splits */
    int64_t counters; /* before those of the unit's tiles and heads */
} unit;

typedef struct {
    int num_units, is_fused, num_threads;
    int tile_tokens, tile_rows, pitch;
    int64_t num_pieces, num_partials, num_counters;
    int64_t worker_floats;
    /* Offsets into the scratch, in floats. */
    int64_t units_at, counters_at, partials_at, workers_at, num_floats;
} plan;

static int64_t pad_floats(int64_t count) { return (count + 15) / 16 * 16; }
static int32_t min_32(int32_t a, int32_t b) { return a < b ? a : b; }

/* ---- units ---- */

static int64_t first_index(const tc_attention *a, int request) {
    int32_t start = a->starts[request];
    return a->prefix_len ? a->positions[start] : a->seq_lens[request] - (a->starts[request + 1] - start);
}

/* The unit that begins at a token of a request. */
static unit make_unit(const tc_attention *a, int request, int32_t token) {
    int32_t start = a->starts[request], end = a->starts[request + 1];
    int32_t index = (int32_t)first_index(a, request) + token - start;
    unit u = {.request = request, .token = token, .position = index, .num_cached = INT32_MAX};
    if (!a->prefix_len || index < a->prefix_len[request]) {
        u.num_tokens = end - token;
        if (a->prefix_len) u.num_tokens = min_32(u.num_tokens, a->prefix_len[request] - index);
        return u;
    }
    int32_t item = a->item_start[token];
    u.num_cached = a->prefix_len[request];
    u.position = u.num_cached + index - item;
    u.own = token - (index - item);
    while (token + u.num_tokens < end && a->item_start[token + u.num_tokens] == item) ++u.num_tokens;
    return u;
}

/* Fills `next` with the unit after it, from one of zeros on; 0 after the last. */
static int next_unit(const tc_attention *a, unit *next) {
    int request = next->request;
    int32_t token = next->token + next->num_tokens;
    if (token >= a->starts[a->num_reqs]) return 0;
    while (token >= a->starts[request + 1]) ++request;
    *next = make_unit(a, request, token);
    return 1;
}

static int64_t first_seen(const tc_attention *a, int64_t position) {
    int64_t first = a->window ? position - a->window + 1 : 0;
    return first > 0 ? first : 0;
}

/* What a tile of the unit costs, in keys times queries. */
static int64_t tile_cost(const tc_attention *a, const unit *u, int tile_tokens) {
    int64_t end = u->position + u->num_tokens;
    return (end - first_seen(a, u->position)) * min_32(tile_tokens, u->num_tokens);
}

static void place_unit(const tc_attention *a, plan *p, int64_t total_cost, unit *u) {
    int64_t end = u->position + u->num_tokens;
    u->num_tiles = (u->num_tokens + p->tile_tokens - 1) / p->tile_tokens;
    u->first_split = (int32_t)(first_seen(a, u->position) / TC_KEY_SPLIT);
    int32_t splits = (int32_t)((end + TC_KEY_SPLIT - 1) / TC_KEY_SPLIT) - u->first_split;
    int64_t pieces = (int64_t)u->num_tiles * a->num_kv_heads;
    int is_large = tile_cost(a, u, p->tile_tokens) * p->num_threads * PIECES_OF_THREAD > total_cost;
    u->splits = splits > 1 && p->num_threads > 1 && is_large ? splits : 0;
    u->first_piece = p->num_pieces;
    u->partials = p->num_partials;
    u->counters = p->num_counters;
    p->num_pieces += u->splits ? pieces * u->splits : pieces;
    if (!u->splits) return;
    p->num_partials += pieces * u->splits * p->tile_rows * (p->pitch + 2);
    p->num_counters += pieces;
}

/* Plans a step, and writes its units if `units` is not NULL. */
static plan make_plan(const tc_attention *a, int num_threads, unit *units) {
    int group = a->num_heads / a->num_kv_heads, tokens = TILE_ROWS / group;
    plan p = {.num_threads = num_threads, .is_fused = !a->prefix_len};
    p.tile_tokens = tokens < 4 ? (tokens ? tokens : 1) : tokens / 4 * 4;
    p.tile_rows = p.tile_tokens * group;
    p.pitch = (a->head_dim + TC_LANES - 1) / TC_LANES * TC_LANES;
    int64_t total_cost = 0;
    for (unit u = {0}; next_unit(a, &u); ++p.num_units) {
        int32_t tiles = (u.num_tokens + p.tile_tokens - 1) / p.tile_tokens;
        total_cost += tiles * tile_cost(a, &u, p.tile_tokens) * a->num_kv_heads;
        if (tiles > 1 || u.num_tokens > MAX_FUSED) p.is_fused = 0;
    }
    for (unit u = {0}; next_unit(a, &u);) {
        place_unit(a, &p, total_cost, &u);
        if (units) *units++ = u;
    }
    int64_t unit_floats = (int64_t)sizeof(unit) / 4 * p.num_units;
    p.worker_floats = pad_floats(3 * p.tile_rows * p.pitch) + pad_floats(p.tile_rows * TC_KEY_BLOCK) +
                      pad_floats(2 * TC_KEY_BLOCK * p.pitch) + pad_floats(5 * p.tile_rows);
    p.units_at = pad_floats((int64_t)sizeof(plan) / 4);
    p.counters_at = p.units_at + pad_floats(unit_floats);
    p.partials_at = p.counters_at + pad_floats(p.num_counters);
    p.workers_at = p.partials_at + pad_floats(p.num_partials);
    p.num_floats = p.workers_at + p.worker_floats * num_threads;
    return p;
}

/* ---- keys of a block ---- */

/* Pointers to cached keys and values at positions first .. last - 1. */
static void find_cached(const tc_attention *a, const unit *u, int64_t kv_head, int64_t first,
                        int64_t last, const void **keys, const void **values) {
    const int32_t *table = a->tables + a->rows[u->request] * a->max_blocks;
    int64_t width = (int64_t)a->head_dim * (a->cache_type == TC_F32 ? 4 : 2);
    int64_t step = a->num_kv_heads * width, at = first / a->block_size, offset = first % a->block_size;
    while (first < last) {
        int64_t end = first + a->block_size - offset;
        int64_t from = ((int64_t)table[at++] * a->block_size + offset) * step + kv_head * width;
        for (offset = 0; first < last && first < end; ++first, from += step) {
            *keys++ = (const uint8_t *)a->k_cache + from;
            *values++ = (const uint8_t *)a->v_cache + from;
        }
    }
}

/* Pointers to keys and values of the step itself, from token `own` on. */
static void find_own(const tc_attention *a, int64_t own, int64_t kv_head, int64_t count,
                     const void **keys, const void **values) {
    for (int64_t i = 0; i < count; ++i) {
        keys[i] = tc_head(a, own + i, a->num_heads + kv_head);
        values[i] = tc_head(a, own + i, a->num_heads + a->num_kv_heads + kv_head);
    }
}

/* Whether a block that ends at `last` is read as a copy in float32. */
static int is_copied(const tc_attention *a, const unit *u, int rows, int64_t last) {
    return a->head_dim % TC_LANES ||
           (a->cache_type != TC_F32 && (rows > DIRECT_ROWS || last > u->num_cached));
}

/* Keys at positions first .. last - 1, of the block that begins at `base`. */
static void gather_block(const tc_attention *a, const unit *u, const tc_tile *tile, int64_t kv_head,
                         int64_t base, int64_t first, int64_t last, tc_key_block *block) {
    int is_wide = is_copied(a, u, tile->rows, last);
    int64_t middle = first > u->num_cached ? first : last < u->num_cached ? last : u->num_cached;
    block->first = (int)(first - base);
    block->last = (int)(last - base);
    block->type = is_wide ? TC_F32 : a->cache_type;
    const void **keys = block->keys + block->first, **values = block->values + block->first;
    find_cached(a, u, kv_head, first, middle, keys, values);
    find_own(a, u->own + middle - u->num_cached, kv_head, last - middle, keys + (middle - first),
             values + (middle - first));
    for (int j = block->first; is_wide && j < block->last; ++j) {
        int type = base + j < middle ? a->cache_type : TC_F32;
        float *key = tile->keys + (int64_t)j * tile->pitch, *value = tile->values + (int64_t)j * tile->pitch;
        tc_widen_row(block->keys[j], type, a->head_dim, tile->pitch, key);
        tc_widen_row(block->values[j], type, a->head_dim, tile->pitch, value);
        block->keys[j] = key;
        block->values[j] = value;
    }
    /* Keys are scored by eights. */
    for (int j = block->first / 8 * 8; j < block->first; ++j) block->keys[j] = block->keys[block->first];
    for (int j = block->last; j < (block->last + 7) / 8 * 8; ++j) block->keys[j] = keys[0];
}

/* ---- pieces ---- */

typedef struct {
    const tc_attention *a;
    const plan *p;
    const unit *u;
    int kv_head;
    int32_t token, num_tokens, position; /* of the tile */
    int64_t first_seen, end;             /* keys that some query of the tile sees */
} piece_of;

static tc_tile make_tile(const piece_of *x, int worker) {
    const plan *p = x->p;
    int rows = p->tile_rows, pitch = p->pitch, group = x->a->num_heads / x->a->num_kv_heads;
    float *at = x->a->scratch + p->workers_at + worker * p->worker_floats;
    tc_tile tile = {.rows = x->num_tokens * group, .group = group, .pitch = pitch};
    tile.q = at;
    tile.sums = tile.q + rows * pitch;
    tile.all_sums = tile.sums + rows * pitch;
    tile.scores = at + pad_floats(3 * rows * pitch);
    tile.keys = tile.scores + pad_floats(rows * TC_KEY_BLOCK);
    tile.values = tile.keys + TC_KEY_BLOCK * pitch;
    tile.most = tile.keys + pad_floats(2 * TC_KEY_BLOCK * pitch);
    tile.total = tile.most + rows;
    tile.all_most = tile.total + rows;
    tile.all_total = tile.all_most + rows;
    tile.rescale = tile.all_total + rows;
    return tile;
}

static void load_queries(const piece_of *x, const tc_tile *tile) {
    const tc_attention *a = x->a;
    for (int row = 0; row < tile->rows; ++row) {
        int64_t token = x->token + row / tile->group;
        float *q = tile->q + (int64_t)row * tile->pitch;
        const float *head = tc_head(a, token, x->kv_head * tile->group + row % tile->group);
        tc_widen_row(head, TC_F32, a->head_dim, tile->pitch, q);
        if (x->p->is_fused) tc_rotate_head(a, a->q_norm, a->positions[token], q);
        for (int i = 0; i < tile->pitch; i += TC_LANES)
            vf_store(q + i, vf_mul(vf_load(q + i), vf_set(a->scale)));
    }
}

/* The part of the block at `base` that is in first .. end - 1. */
static void gather_part(const piece_of *x, const tc_tile *tile, int64_t base, int64_t first, int64_t end,
                        tc_key_block *block) {
    int64_t from = first > base ? first : base;
    int64_t to = end < base + TC_KEY_BLOCK ? end : base + TC_KEY_BLOCK;
    gather_block(x->a, x->u, tile, x->kv_head, base, from, to, block);
}

/* Attends to keys first .. end - 1 of one split. */
static void attend_split(const piece_of *x, tc_tile *tile, int64_t first, int64_t end) {
    const unit *u = x->u;
    int64_t base = first / TC_KEY_BLOCK * TC_KEY_BLOCK;
    tc_key_block blocks[2];
    for (int64_t p = first; x->p->is_fused && p < end; ++p)
        if (p >= u->position) tc_write_token(x->a, u->token + p - u->position, x->kv_head);
    tc_clear_sums(tile->sums, tile->most, tile->total, tile->rows, tile->pitch);
    if (base < end) gather_part(x, tile, base, first, end, blocks);
    for (int i = 0; base < end; base += TC_KEY_BLOCK, i = !i) {
        int64_t after = base + TC_KEY_BLOCK;
        /* Only a whole block, and not one that would be copied over this one. */
        int is_next = after + TC_KEY_BLOCK <= end && !is_copied(x->a, u, tile->rows, after + TC_KEY_BLOCK);
        const tc_key_block *next = is_next ? &blocks[!i] : NULL;
        if (next) gather_part(x, tile, after, first, end, &blocks[!i]);
        tc_attend_block(tile, &blocks[i], next, base, x->position, x->a->window);
        if (!next && after < end) gather_part(x, tile, after, first, end, &blocks[!i]);
    }
}

static void attend_split_at(const piece_of *x, tc_tile *tile, int64_t split) {
    int64_t first = split * TC_KEY_SPLIT, end = first + TC_KEY_SPLIT;
    attend_split(x, tile, first > x->first_seen ? first : x->first_seen, end < x->end ? end : x->end);
}

static void store_result(const piece_of *x, const tc_tile *tile) {
    const tc_attention *a = x->a;
    for (int row = 0; row < tile->rows; ++row) {
        int64_t token = x->token + row / tile->group, head = x->kv_head * tile->group + row % tile->group;
        float *out = a->out + (token * a->num_heads + head) * a->head_dim;
        const float *sums = tile->all_sums + (int64_t)row * tile->pitch;
        float total = tile->all_total[row], factor = total == 0 ? 0 : 1 / total;
        for (int i = 0; i < a->head_dim; ++i) out[i] = sums[i] * factor;
    }
}

static void attend_all_splits(const piece_of *x, tc_tile *tile) {
    tc_clear_sums(tile->all_sums, tile->all_most, tile->all_total, tile->rows, tile->pitch);
    for (int64_t split = x->first_seen / TC_KEY_SPLIT; split * TC_KEY_SPLIT < x->end; ++split) {
        attend_split_at(x, tile, split);
        tc_merge_split(tile, tile->sums, tile->most, tile->total);
    }
    store_result(x, tile);
}

/* One split; the last of a tile's pieces merges them all. `tile_head` counts tiles and heads. */
static void attend_one_split(const piece_of *x, tc_tile *tile, int64_t tile_head, int split) {
    const plan *p = x->p;
    const unit *u = x->u;
    int rows = tile->rows;
    int64_t partial = p->tile_rows * (p->pitch + 2);
    atomic_int *done = (atomic_int *)(x->a->scratch + p->counters_at) + u->counters + tile_head;
    float *parts = x->a->scratch + p->partials_at + u->partials + tile_head * u->splits * partial;
    tc_tile own = *tile;
    own.sums = parts + split * partial;
    own.most = own.sums + p->tile_rows * p->pitch;
    own.total = own.most + p->tile_rows;
    attend_split_at(x, &own, u->first_split + split);
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < u->splits) return;
    atomic_store_explicit(done, 0, memory_order_relaxed); /* the tasks may run again */
    tc_clear_sums(tile->all_sums, tile->all_most, tile->all_total, rows, tile->pitch);
    for (int i = 0; i < u->splits; ++i, parts += partial) {
        const float *most = parts + p->tile_rows * p->pitch;
        tc_merge_split(tile, parts, most, most + p->tile_rows);
    }
    store_result(x, tile);
}

static const unit *unit_of_piece(const unit *units, int count, int64_t piece) {
    int first = 0;
    while (count > 1) {
        int half = count / 2;
        if (units[first + half].first_piece <= piece) first += half, count -= half;
        else count = half;
    }
    return units + first;
}

static void attend_piece(const void *arg, int64_t piece, int worker) {
    const tc_attention *a = arg;
    const plan *p = (const plan *)a->scratch;
    const unit *u = unit_of_piece((const unit *)(a->scratch + p->units_at), p->num_units, piece);
    int64_t at = piece - u->first_piece;
    piece_of x = {.a = a, .p = p, .u = u, .kv_head = (int)(at % a->num_kv_heads)};
    at /= a->num_kv_heads;
    int split = u->splits ? (int)(at % u->splits) : 0;
    if (u->splits) at /= u->splits;
    /* The last tiles first: they see most keys. */
    int32_t tile_at = u->num_tiles - 1 - (int32_t)at, skipped = tile_at * p->tile_tokens;
    x.token = u->token + skipped;
    x.num_tokens = min_32(p->tile_tokens, u->num_tokens - skipped);
    x.position = u->position + skipped;
    x.first_seen = first_seen(a, x.position);
    x.end = x.position + x.num_tokens;
    tc_tile tile = make_tile(&x, worker);
    load_queries(&x, &tile);
    if (u->splits) {
        attend_one_split(&x, &tile, (int64_t)tile_at * a->num_kv_heads + x.kv_head, split);
    } else {
        attend_all_splits(&x, &tile);
    }
}

/* Norms, rotations and cache writes of some tokens. */
static void write_piece(const void *arg, int64_t piece, int worker) {
    const tc_attention *a = arg;
    int64_t last = (piece + 1) * TOKENS_OF_PIECE;
    (void)worker;
    if (last > a->num_tokens) last = a->num_tokens;
    for (int64_t token = piece * TOKENS_OF_PIECE; token < last; ++token) {
        for (int head = 0; head < a->num_heads; ++head)
            tc_rotate_head(a, a->q_norm, a->positions[token], tc_head(a, token, head));
        for (int head = 0; head < a->num_kv_heads; ++head) tc_write_token(a, token, head);
    }
}

/* ---- the interface ---- */

int64_t tc_attention_scratch(const tc_attention *a, int num_threads) {
    return make_plan(a, num_threads, NULL).num_floats;
}

int tc_attention_tasks(const tc_attention *a, int num_threads, tc_task *tasks) {
    int count = 0;
    plan *p = (plan *)a->scratch;
    *p = make_plan(a, num_threads, (unit *)(a->scratch + pad_floats((int64_t)sizeof(plan) / 4)));
    memset(a->scratch + p->counters_at, 0, (size_t)p->num_counters * sizeof(float));
    if (!p->is_fused)
        tasks[count++] =
            (tc_task){write_piece, a, (a->num_tokens + TOKENS_OF_PIECE - 1) / TOKENS_OF_PIECE};
    tasks[count++] = (tc_task){attend_piece, a, p->num_pieces};
    return count;
}

void tc_attention_run(tc_pool *pool, const tc_attention *a) {
    tc_task tasks[TC_ATTENTION_TASKS];
    tc_pool_run(pool, tasks, tc_attention_tasks(a, tc_pool_size(pool), tasks));
}
