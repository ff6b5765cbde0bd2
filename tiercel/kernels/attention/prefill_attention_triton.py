"""Prefill attention in Triton, and the merge of parts; see prefill_attention.py."""

import triton
import triton.language as tl


@triton.jit
def _page_offsets(
    table_ptr,  # (max_blocks,) of one request
    first,  # a multiple of BLOCK_N
    end,  # keys of the request, > first
    slot_stride,  # elements from one slot of the cache to the next
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where keys first .. first + BLOCK_N - 1 begin, in int64; keys from `end` on: as end - 1."""
    if PAGE % BLOCK_N == 0:  # one page per step: its number is one load
        block = tl.load(table_ptr + first // PAGE).to(tl.int64)
        slots = block * PAGE + (first % PAGE + tl.arange(0, BLOCK_N))
    else:
        keys = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)
        slots = tl.load(table_ptr + keys // PAGE).to(tl.int64) * PAGE + keys % PAGE
    return slots * slot_stride


@triton.jit
def _load_keys(
    ptr,  # keys or values of one head
    offsets,  # (BLOCK_N,) int64
    is_key,  # (BLOCK_N,)
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """(BLOCK_N, DIMS) of keys or values; masked: zeros outside."""
    dims = tl.arange(0, DIMS)
    places = ptr + offsets[:, None] + dims[None, :]
    if IS_MASKED or DIMS != HEAD_DIM:
        loaded = tl.load(places, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(places)
    return loaded


@triton.jit
def _attend(q, k, v, is_seen, acc, m, total, scale_log2, cap_scale, IS_MASKED: tl.constexpr):
    """One step of the online softmax in base 2; m starts finite, so unseeing rows stay at zero.

    cap_scale: None, or scale / softcap; then scale_log2 is softcap * log2(e).
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if cap_scale is not None:  # tanh; 2 * log2(e)
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale * 2.8853900817779268) + 1.0)
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - m_new[:, None])
    decay = tl.exp2(m - m_new)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, m_new, total


@triton.jit
def _attend_pages(
    q,  # (BLOCK_M, DIMS)
    acc,
    m,
    total,
    k_ptr,  # the cache's keys of one head
    v_ptr,
    table_ptr,  # (max_blocks,) of the request
    index,  # (BLOCK_M,) of the row's token; rises
    position,  # (BLOCK_M,) of the row's token in its own sequence
    is_row,  # (BLOCK_M,)
    first_index,  # of the tile
    end,  # after the tile's last token
    prefix,
    begin,  # the first key of the part, a multiple of BLOCK_N
    slot_stride,
    scale_log2,
    cap_scale,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys of the prefix: [begin, full) is seen by every row, [full, stop) is masked."""
    stop = tl.minimum(prefix, end)
    full = tl.maximum(tl.minimum(prefix, first_index + 1) // BLOCK_N * BLOCK_N, begin)
    if HAS_WINDOW:
        lowest = tl.min(tl.where(is_row, position, 2147483647), axis=0) - window + 1
        begin = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
        full = begin
    cols = tl.arange(0, BLOCK_N)
    for first in range(begin, full, BLOCK_N):
        places = _page_offsets(table_ptr, first, stop, slot_stride, PAGE, BLOCK_N)
        k = _load_keys(k_ptr, places, cols < stop, HEAD_DIM, DIMS, False)
        v = _load_keys(v_ptr, places, cols < stop, HEAD_DIM, DIMS, False)
        acc, m, total = _attend(q, k, v, is_row, acc, m, total, scale_log2, cap_scale, False)
    bound = tl.minimum(prefix, index + 1)
    for first in range(full, stop, BLOCK_N):
        keys = first + cols
        is_seen = keys[None, :] < bound[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > (position - window)[:, None])
        places = _page_offsets(table_ptr, first, stop, slot_stride, PAGE, BLOCK_N)
        k = _load_keys(k_ptr, places, keys < stop, HEAD_DIM, DIMS, True)
        v = _load_keys(v_ptr, places, keys < stop, HEAD_DIM, DIMS, True)
        acc, m, total = _attend(q, k, v, is_seen, acc, m, total, scale_log2, cap_scale, True)
    return acc, m, total


@triton.jit
def _attend_items(
    q,  # (BLOCK_M, DIMS)
    acc,
    m,
    total,
    k_ptr,  # keys of one head at the row of key `low`
    v_ptr,
    index,  # (BLOCK_M,) of the row's token
    start,  # (BLOCK_M,) of the row's item
    low,  # index of the tile's first item key
    end,  # after the tile's last token
    k_stride,
    v_stride,
    scale_log2,
    cap_scale,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys of the tile's items, [low, end), always masked."""
    for first in range(low, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        is_seen = (keys[None, :] <= index[:, None]) & (keys[None, :] >= start[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > (index - window)[:, None])
        rows = (keys - low).to(tl.int64)
        k = _load_keys(k_ptr, rows * k_stride, keys < end, HEAD_DIM, DIMS, True)
        v = _load_keys(v_ptr, rows * v_stride, keys < end, HEAD_DIM, DIMS, True)
        acc, m, total = _attend(q, k, v, is_seen, acc, m, total, scale_log2, cap_scale, True)
    return acc, m, total


# Not specialised: a kernel for each divisibility of a length would be compiled between two steps.
# fmt: off
@triton.jit(do_not_specialize=["table_stride", "kv_heads", "window", "cap_scale"])
def prefill_attention_kernel(
    q_ptr,  # (T, heads, HEAD_DIM)
    k_cache_ptr,  # (num_blocks, PAGE, kv_heads, HEAD_DIM)
    v_cache_ptr,  # like k_cache
    k_new_ptr,  # (T, kv_heads, HEAD_DIM)
    v_new_ptr,  # like k_new
    out_ptr,  # (rows, heads, HEAD_DIM) contiguous
    sums_ptr,  # (rows, heads) float32 log2 of the sums, where IS_PART
    item_start_ptr,  # (T,) int32
    tiles_ptr,  # (num_tiles, 8) int32
    counter_ptr,  # (4,) int32: two of another kernel's, number of tiles, heads_first
    tables_ptr,  # (R, max_blocks) int32
    q_stride, k_stride, v_stride,  # elements from one token to the next, of q, k_new and v_new
    table_stride,
    kv_heads,
    scale_log2,  # scale * log2(e), > 0; with a soft-cap, softcap * log2(e)
    cap_scale,  # scale / softcap, None without
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # power of two, >= HEAD_DIM
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """Attend one tile of one key/value head, or a part of its page keys."""
    program = tl.program_id(0)
    # In device memory, so that a graph serves any number of tiles.
    num_tiles = tl.load(counter_ptr + 2)
    if program >= num_tiles * kv_heads:
        return
    tile, kv_head = program % num_tiles, program // num_tiles
    if tl.load(counter_ptr + 3) > 0:
        tile, kv_head = program // kv_heads, program % kv_heads
    tile_ptr = tiles_ptr + tile * 8
    q_row = tl.load(tile_ptr).to(tl.int64)  # 64-bit: rows * stride passes 2**31
    num_tokens, first_index = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    request, prefix = tl.load(tile_ptr + 3).to(tl.int64), tl.load(tile_ptr + 4)
    begin, out_row = tl.load(tile_ptr + 6), tl.load(tile_ptr + 7).to(tl.int64)
    end = first_index + num_tokens

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIMS)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = tokens < num_tokens
    is_place = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_places = (q_row + tokens) * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_places[:, None] + dims[None, :], mask=is_place, other=0.0)
    index = first_index + tokens
    start, position = index, index  # an item's positions continue after the prefix
    if HAS_ITEMS:
        start = tl.load(item_start_ptr + q_row + tokens, mask=is_row, other=0)
        position = tl.where(index >= prefix, prefix + index - start, index)

    acc = tl.zeros((BLOCK_M, DIMS), dtype=tl.float32)
    m = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    dim = kv_head * HEAD_DIM
    acc, m, total = _attend_pages(
        q, acc, m, total, k_cache_ptr + dim, v_cache_ptr + dim, tables_ptr + request * table_stride,
        index, position, is_row, first_index, end, prefix, begin, kv_heads * HEAD_DIM,
        scale_log2, cap_scale, window, HEAD_DIM, DIMS, PAGE, BLOCK_N, HAS_WINDOW,
    )
    if HAS_ITEMS:
        low = tl.load(tile_ptr + 5)
        new_row = q_row + low - first_index
        acc, m, total = _attend_items(
            q, acc, m, total, k_new_ptr + new_row * k_stride + dim,
            v_new_ptr + new_row * v_stride + dim, index, start, low, end, k_stride, v_stride,
            scale_log2, cap_scale, window, HEAD_DIM, DIMS, BLOCK_N, HAS_WINDOW,
        )

    out = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row that saw nothing stays zero
    out_rows = (out_row + tokens) * (kv_heads * GROUP) + heads
    places = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=is_place)
    if IS_PART:
        tl.store(sums_ptr + out_rows, m + tl.log2(total), mask=is_row)  # log2(0) is -inf
# fmt: on


@triton.jit(do_not_specialize=["rows", "heads", "part_stride"])
def merge_parts_kernel(
    partials_ptr,  # (part rows, heads, HEAD_DIM) float32, each divided by its own sum
    sums_ptr,  # (part rows, heads) float32, log2
    parts_ptr,  # (T, 2) int32: row of the first part, number
    out_ptr,  # (T, heads, HEAD_DIM)
    lse_ptr,  # (T, heads) float32, natural; or None
    rows,  # T * heads
    heads,
    part_stride,  # rows between parts
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # power of two, >= HEAD_DIM
    BLOCK: tl.constexpr,  # rows of a program
):
    """Weigh the parts of some rows of the result by their sums."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    token, head = row // heads, row % heads
    first = tl.load(parts_ptr + 2 * token, mask=is_row, other=0)
    count = tl.load(parts_ptr + 2 * token + 1, mask=is_row, other=0)
    dims = tl.arange(0, DIMS)
    acc = tl.zeros((BLOCK, DIMS), dtype=tl.float32)
    m = tl.full((BLOCK,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(tl.max(count, axis=0)):
        place = (first + part * part_stride).to(tl.int64) * heads + head
        is_here = is_row & (part < count)
        own = tl.load(sums_ptr + place, mask=is_here, other=float("-inf"))
        mask = is_here[:, None] & (dims < HEAD_DIM)[None, :]
        x = tl.load(partials_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, own)
        weight, decay = tl.exp2(own - m_new), tl.exp2(m - m_new)
        acc = acc * decay[:, None] + weight[:, None] * x
        total = total * decay + weight
        m = m_new
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = out_ptr + row.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (m + tl.log2(total)) * 0.6931471805599453, mask=is_row)
