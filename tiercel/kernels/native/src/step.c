/* Layers of a dense decoder as one list of tasks, so that a whole step is one run of the pool.
 *
 *     norm, round | q k v | attention | round | o | norm, round | gate, up, act, round | down
 *
 * Each of these is a task; its pieces are tokens, or blocks of output rows x blocks of tokens. What a
 * task leaves to the next is in the step's scratch memory.
 */
#include "products.h"

enum {
    PART_TASKS = 8 + TC_ATTENTION_TASKS, /* of a layer, at most */
    MLP_ROWS = 128,  /* of gate and of up in a piece, at most; whole groups of what is rounded */
    TOKENS = 64,     /* of a piece of gate and up, whose results are on the stack */
    PIECES_PER_THREAD = 4,
    ALIGNMENT = 64
};

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where everything is in the scratch memory of a step. */
typedef struct {
    float *update;  /* (T, hidden) of the part before */
    float *normed;  /* (T, hidden) */
    float *heads;   /* (T, rows of q, k and v) */
    float *context; /* (T, rows of q), from attention */
    float *act;     /* (T, intermediate) */
    float *attention; /* scratch of attention, of each kind of layer */
    int64_t attention_floats;
    uint8_t *normed_q, *context_q, *act_q; /* the same rounded */
    int64_t hidden_bytes, context_bytes, act_bytes; /* of a rounded row */
    tc_task *tasks;
    struct layer_args *args;
} buffers;

/* A product by matrices end to end. */
typedef struct {
    const tc_weight *weights;
    int32_t num_weights;
    const float *bias;
    tc_input input;
    float *y;
    int64_t ldy, num_pieces;
} product;

typedef struct {
    const tc_decoder *decoder;
    const tc_step *step;
    const buffers *buffers;
    const float *update, *update_weight, *weight; /* update NULL: nothing to add yet */
} norm_args;

typedef struct {
    const tc_weight *weights;
    const tc_decoder *decoder;
    const buffers *buffers;
    tc_input input;
    int64_t token_blocks, block_rows;
    int32_t num_weights;
} mlp_args;

typedef struct layer_args {
    norm_args attn_norm, mlp_norm;
    product qkv, output, down;
    tc_attention attention;
    mlp_args mlp;
} layer_args;

static uint8_t *take(uint8_t **next, int64_t bytes) {
    uint8_t *found = *next;
    *next += round_up(bytes, ALIGNMENT);
    return found;
}

/* Rounded rows; NULL where products take floats, as those of columns that are not whole groups do. */
static uint8_t *take_rounded(uint8_t **next, const tc_decoder *d, int64_t tokens, int64_t cols,
                             int64_t *row_bytes) {
    int rounds = d->rounds && cols % TC_GROUP == 0;
    *row_bytes = rounds ? tc_rounded_bytes(cols) : 0;
    uint8_t *found = take(next, tokens * *row_bytes);
    return rounds ? found : NULL;
}

static int64_t head_rows(const tc_decoder *d) {
    return (int64_t)(d->num_heads + 2 * d->num_kv_heads) * d->head_dim;
}

/* What attention needs to know of a step; pointers to data of the step may be missing. */
static void describe_attention(tc_attention *a, const tc_decoder *d, const tc_layer *layer,
                               const tc_step *s) {
    *a = (tc_attention){
        .num_heads = d->num_heads,
        .num_kv_heads = d->num_kv_heads,
        .head_dim = d->head_dim,
        .half = d->half,
        .window = layer->window,
        .scale = d->scale,
        .eps = d->eps,
        .q_norm = layer->q_norm,
        .k_norm = layer->k_norm,
        .rope = layer->rope,
        .k_cache = layer->k_cache,
        .v_cache = layer->v_cache,
        .cache_type = d->cache_type,
        .block_size = d->block_size,
        .num_reqs = s->num_reqs,
        .num_tokens = s->num_tokens,
        .max_blocks = s->max_blocks,
        .rows = s->rows,
        .starts = s->starts,
        .seq_lens = s->seq_lens,
        .positions = s->positions,
        .prefix_len = s->prefix_len,
        .item_start = s->item_start,
    };
}

/* Layers of one window plan their attention alike: 0 for those like the first layer, and so on. */
static int attention_kind(const tc_decoder *d, int index) {
    int first = 0, kind = 0;
    while (d->layers[first].window != d->layers[index].window) ++first;
    for (int i = 0; i < first; ++i) {
        int is_new = 1;
        for (int j = 0; j < i; ++j) is_new &= d->layers[j].window != d->layers[i].window;
        kind += is_new;
    }
    return kind;
}

/* Lays out `memory`; returns its size. */
static int64_t lay_out(buffers *b, const tc_decoder *d, const tc_step *s, int num_threads,
                       uint8_t *memory) {
    int64_t tokens = s->num_tokens, width = (int64_t)d->num_heads * d->head_dim;
    int kinds = 0;
    b->attention_floats = 0;
    for (int i = 0; i < d->num_layers; ++i) {
        tc_attention a;
        if (attention_kind(d, i) < kinds) continue;
        ++kinds;
        describe_attention(&a, d, &d->layers[i], s);
        int64_t floats = round_up(tc_attention_scratch(&a, num_threads), ALIGNMENT);
        if (floats > b->attention_floats) b->attention_floats = floats;
    }
    uint8_t *next = memory;
    b->update = (float *)take(&next, tokens * d->hidden * 4);
    b->normed = (float *)take(&next, tokens * d->hidden * 4);
    b->heads = (float *)take(&next, tokens * head_rows(d) * 4);
    b->context = (float *)take(&next, tokens * width * 4);
    b->act = (float *)take(&next, tokens * d->intermediate * 4);
    b->attention = (float *)take(&next, kinds * b->attention_floats * 4);
    b->normed_q = take_rounded(&next, d, tokens, d->hidden, &b->hidden_bytes);
    b->context_q = take_rounded(&next, d, tokens, width, &b->context_bytes);
    b->act_q = take_rounded(&next, d, tokens, d->intermediate, &b->act_bytes);
    b->tasks = (tc_task *)take(&next, (int64_t)sizeof(tc_task) * (d->num_layers * PART_TASKS + 1));
    b->args = (layer_args *)take(&next, (int64_t)sizeof(layer_args) * (d->num_layers + 1));
    return next - memory;
}

int64_t tc_step_scratch(const tc_decoder *decoder, const tc_step *step, int num_threads) {
    buffers b;
    return lay_out(&b, decoder, step, num_threads, NULL);
}

/* ---- tasks ---- */

static void add_and_norm(const void *arg, int64_t token, int worker) {
    const norm_args *n = arg;
    const buffers *b = n->buffers;
    int64_t hidden = n->decoder->hidden;
    (void)worker;
    float *out = b->normed + token * hidden;
    tc_norm_row(n->step->x + token * hidden, n->update ? n->update + token * hidden : NULL,
                n->update_weight, n->weight, n->decoder->eps, hidden, out);
    if (b->normed_q) tc_round_row(out, 0, hidden, hidden, b->normed_q + token * b->hidden_bytes);
}

/* After the last layer: its update, which nobody norms any more. */
static void add_update(const void *arg, int64_t token, int worker) {
    const norm_args *n = arg;
    int64_t hidden = n->decoder->hidden;
    float *x = n->step->x + token * hidden;
    const float *update = n->update + token * hidden;
    (void)worker;
    if (n->update_weight) {
        tc_norm_row(x, update, n->update_weight, n->update_weight, n->decoder->eps, hidden,
                    n->buffers->normed + token * hidden);
        return;
    }
    for (int64_t i = 0; i < hidden; ++i) x[i] += update[i];
}

static void round_context(const void *arg, int64_t token, int worker) {
    const norm_args *n = arg;
    const buffers *b = n->buffers;
    int64_t width = (int64_t)n->decoder->num_heads * n->decoder->head_dim;
    (void)worker;
    tc_round_row(b->context + token * width, 0, width, width, b->context_q + token * b->context_bytes);
}

/* Some rows of an input. */
static tc_input slice(const tc_input *in, int64_t first, int64_t rows) {
    tc_input part = *in;
    part.x += first * in->ldx;
    if (part.q) part.q += first * in->q_bytes;
    part.rows = rows;
    return part;
}

static void multiply(const void *arg, int64_t piece, int worker) {
    const product *p = arg;
    (void)worker;
    tc_multiply_piece(p->weights, p->num_weights, p->bias, &p->input, piece, p->num_pieces, p->y, p->ldy);
}

/* A few rows, from `first` on, of matrices end to end. */
static void multiply_rows(const tc_weight *w, int64_t first, int64_t rows, const tc_input *in, float *y,
                          int64_t ldy) {
    for (; first >= w->rows; ++w) first -= w->rows;
    tc_matmul(w, first, first + rows, in, y, ldy);
}

static void gate_and_up(const void *arg, int64_t piece, int worker) {
    const mlp_args *m = arg;
    const buffers *b = m->buffers;
    int64_t inner = m->decoder->intermediate;
    int64_t first = piece / m->token_blocks * m->block_rows, token = piece % m->token_blocks * TOKENS;
    int64_t rows = least(m->block_rows, inner - first);
    tc_input in = slice(&m->input, token, least(TOKENS, m->input.rows - token));
    float gate[TOKENS * MLP_ROWS], up[TOKENS * MLP_ROWS];
    (void)worker;
    multiply_rows(m->weights, first, rows, &in, gate, MLP_ROWS);
    multiply_rows(m->weights, inner + first, rows, &in, up, MLP_ROWS);
    for (int64_t t = 0; t < in.rows; ++t) {
        float *out = b->act + (token + t) * inner + first;
        tc_act_mul_row(gate + t * MLP_ROWS, up + t * MLP_ROWS, m->decoder->activation, rows, out);
        if (b->act_q) tc_round_row(out, first, rows, inner, b->act_q + (token + t) * b->act_bytes);
    }
}

/* ---- the list of tasks ---- */

static tc_input floats(const float *x, int64_t cols, const uint8_t *q, int64_t q_bytes, int64_t rows) {
    return (tc_input){x, cols, q, q_bytes, rows, cols};
}

static tc_task *add(tc_task *next, tc_task_fn fn, const void *arg, int64_t num_pieces) {
    *next = (tc_task){fn, arg, num_pieces};
    return next + 1;
}

static tc_task *add_product(tc_task *next, product *p, int num_threads) {
    p->num_pieces = tc_num_pieces(p->weights, p->num_weights, p->input.rows, num_threads);
    return add(next, multiply, p, p->num_pieces);
}

static tc_task *add_layer(tc_task *next, const tc_decoder *d, const tc_step *s, const buffers *b,
                          int32_t index, int num_threads) {
    const tc_layer *layer = &d->layers[index];
    layer_args *args = &b->args[index];
    int64_t tokens = s->num_tokens, width = (int64_t)d->num_heads * d->head_dim;
    tc_input normed = floats(b->normed, d->hidden, b->normed_q, b->hidden_bytes, tokens);
    tc_input context = floats(b->context, width, b->context_q, b->context_bytes, tokens);
    tc_input act = floats(b->act, d->intermediate, b->act_q, b->act_bytes, tokens);

    args->attn_norm = (norm_args){d, s, b, NULL, NULL, layer->attn_norm};
    if (index) { /* the first layer has no update to add, whatever norms it has */
        args->attn_norm.update = b->update;
        args->attn_norm.update_weight = layer->attn_update_norm;
    }
    next = add(next, add_and_norm, &args->attn_norm, tokens);
    args->qkv = (product){layer->qkv, layer->num_qkv, layer->qkv_bias, normed, b->heads, head_rows(d), 0};
    next = add_product(next, &args->qkv, num_threads);

    describe_attention(&args->attention, d, layer, s);
    args->attention.tables = s->tables + layer->group * s->table_rows * s->max_blocks;
    args->attention.slots = s->slots + layer->group * tokens;
    args->attention.heads = b->heads;
    args->attention.out = b->context;
    args->attention.scratch = b->attention + attention_kind(d, index) * b->attention_floats;
    next += tc_attention_tasks(&args->attention, num_threads, next);

    if (b->context_q) next = add(next, round_context, &args->attn_norm, tokens);
    args->output =
        (product){layer->output, layer->num_output, layer->output_bias, context, b->update, d->hidden, 0};
    next = add_product(next, &args->output, num_threads);

    args->mlp_norm = (norm_args){d, s, b, b->update, layer->mlp_update_norm, layer->mlp_norm};
    next = add(next, add_and_norm, &args->mlp_norm, tokens);
    int64_t token_blocks = (tokens + TOKENS - 1) / TOKENS;
    int64_t share = d->intermediate * token_blocks / ((int64_t)num_threads * PIECES_PER_THREAD);
    int64_t block_rows = least(MLP_ROWS, round_up(share > 0 ? share : 1, TC_GROUP));
    args->mlp = (mlp_args){layer->gate_up, d, b, normed, token_blocks, block_rows, layer->num_gate_up};
    int64_t blocks = (d->intermediate + block_rows - 1) / block_rows;
    next = add(next, gate_and_up, &args->mlp, blocks * token_blocks);
    args->down = (product){layer->down, layer->num_down, NULL, act, b->update, d->hidden, 0};
    return add_product(next, &args->down, num_threads);
}

void tc_run_layers(tc_pool *pool, const tc_decoder *decoder, const tc_step *step, int32_t first,
                   int32_t last) {
    int num_threads = tc_pool_size(pool);
    buffers b;
    lay_out(&b, decoder, step, num_threads, step->scratch);
    tc_task *next = b.tasks;
    for (int32_t i = first; i < last; ++i) next = add_layer(next, decoder, step, &b, i, num_threads);
    if (last == decoder->num_layers && last > 0) {
        norm_args *end = &b.args[last].attn_norm;
        *end = (norm_args){decoder, step, &b, b.update, decoder->last_update_norm, NULL};
        next = add(next, add_update, end, step->num_tokens);
    }
    tc_pool_run(pool, b.tasks, (int)(next - b.tasks));
}
