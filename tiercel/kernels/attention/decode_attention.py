"""Decode attention, for few new tokens per request over the paged cache: decode and verification.

Splits. The keys of a request are cut at fixed positions: every `fine_keys` up to `fine_end`, every
`coarse_keys` beyond. A program walks the tiles of some consecutive splits of one request and one
key/value head; at the end of each split it writes that split's maximum, sum and weighted values as
float32 partials and starts anew, so the partials of a split do not depend on which splits the
program was given. A second kernel merges a row's splits, chunk by chunk at fixed positions too.
Hence a token's result is bit for bit the same alone, in any batch, beside any drafts and under any
bound of the lengths. A batch only decides how many programs share the splits. A tile or split in
which a row sees nothing changes none of its bits: it adds zeros and scales by one.

Tiles. The rows of a tile are the queries of a request times the heads that share the key/value
head. Scores are computed transposed, (keys, rows): 64 keys are the M of a Hopper matrix product and
few rows its N, so 4 heads cost 16 columns instead of 64 rows. It also keeps each sum over keys in
one order for every width of the tile.

Floor: visible keys and values are read once. Partials add (head_dim + 2) * 4 bytes per row and
split, written and read again: 2% of the keys and values of 4096 for groups of 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import dependent_options, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30  # longer than any sequence, and no sum with it passes 2**31
LEAST_ROWS = 16  # N and M of the smallest matrix product


@dataclass(frozen=True, slots=True)
class DecodeAttentionConfig:
    """Where splits and tiles end, and how they are launched.

    Attributes:
        tile_keys: keys of one step of a program; divides the block size.
        most_rows: rows of a tile at most, a power of two.
        fine_keys: keys of a split that starts before `fine_end`; a multiple of tile_keys.
        fine_end: where splits of `coarse_keys` start; a multiple of fine_keys.
        coarse_keys: keys of the later splits, a multiple of tile_keys.
        programs: how many the grid should have, about; not part of any result.
        num_warps: of the first kernel.
        num_stages: tiles in flight plus one.
        merge_splits: splits that the second kernel reads together.
        merge_cols: columns of a head that one of its programs merges.
    """

    tile_keys: int
    most_rows: int
    fine_keys: int
    fine_end: int
    coarse_keys: int
    programs: int
    num_warps: int
    num_stages: int
    merge_splits: int = 32
    merge_cols: int = 32

    def num_splits(self, max_seq_len: int, max_query_len: int, window: int) -> int:
        """The most splits that one request's visible keys touch, at least 1."""
        fine, coarse = min(max_seq_len, self.fine_end), max(0, max_seq_len - self.fine_end)
        splits = max(1, -(-fine // self.fine_keys) + -(-coarse // self.coarse_keys))
        if window:  # the window of each new token; its ends may be anywhere in a split
            seen = window + max_query_len - 1
            splits = min(splits, 1 + -(-(seen - 1) // min(self.fine_keys, self.coarse_keys)))
        return splits

    def num_parts(self, num_splits: int, pairs: int) -> int:
        """Programs that share the splits of a request and head, of which there are `pairs`."""
        return min(num_splits, -(-self.programs // pairs))

    def rows(self, max_query_len: int, group: int) -> int:
        """Rows of a tile: the power of two that holds a request's, up to `most_rows`."""
        rows = 1 << (max_query_len * group - 1).bit_length()
        return min(self.most_rows, max(LEAST_ROWS, rows))


def select_decode_attention(head_dim: int, itemsize: int, block_size: int) -> DecodeAttentionConfig:
    """Choose splits and tiles. Pure, and blind to the batch: splits decide the bits of a result.

    itemsize: bytes of an element of the cache; block_size: a power of two, at least 16.
    """
    # Of 469 configs: within 1 point of the best fraction of the floor for heads of 128, within 4
    # for 64 and 256 (H200, results/paged_attention_h200.json).
    if itemsize == 4:  # no tensor cores: each operand of a product is in registers
        return DecodeAttentionConfig(16, LEAST_ROWS, 256, 2048, 512, 2112, 4, 2)
    if block_size < 64:
        # One shape of tile: across shapes, warps might share these short tiles in other orders.
        return DecodeAttentionConfig(block_size, LEAST_ROWS, 256, 2048, 512, 2112, 4, 4)
    if head_dim > 128:
        return DecodeAttentionConfig(64, 16, 128, 2048, 512, 2112, 4, 3)
    return DecodeAttentionConfig(64, 32, 128, 2048, 512, 2112, 4, 3)


@triton.jit
def split_of(key, FINE_KEYS: tl.constexpr, FINE_END: tl.constexpr, COARSE_KEYS: tl.constexpr):
    """The split that holds a position."""
    fine = tl.minimum(key, FINE_END) // FINE_KEYS
    return fine + tl.maximum(key - FINE_END, 0) // COARSE_KEYS


@triton.jit
def split_start(split, FINE_KEYS: tl.constexpr, FINE_END: tl.constexpr, COARSE_KEYS: tl.constexpr):
    """The first position of a split."""
    fine: tl.constexpr = FINE_END // FINE_KEYS
    return tl.minimum(split, fine) * FINE_KEYS + tl.maximum(split - fine, 0) * COARSE_KEYS


@triton.jit
def part_of(
    low,  # the first visible key
    seq_len,
    FINE_KEYS: tl.constexpr,
    FINE_END: tl.constexpr,
    COARSE_KEYS: tl.constexpr,
):
    """Keys [begin, end) of this program: the splits that begin in its share of visible keys.

    Shares are equal; the first split counts as beginning at `low`.
    """
    share = tl.cdiv(seq_len - low, tl.num_programs(1))
    begin = low + tl.program_id(1) * share
    end = begin + share
    first = split_of(begin, FINE_KEYS, FINE_END, COARSE_KEYS)
    last = split_of(end, FINE_KEYS, FINE_END, COARSE_KEYS)
    first_key = tl.maximum(split_start(first, FINE_KEYS, FINE_END, COARSE_KEYS), low)
    last_key = split_start(last, FINE_KEYS, FINE_END, COARSE_KEYS)
    begin = tl.where(begin < seq_len, first_key, seq_len)
    return begin, tl.where(end < seq_len, last_key, seq_len)


@triton.jit
def fold_tile(
    q_t,  # (D, ROWS)
    k,  # (TILE, D)
    v,  # (TILE, D)
    is_seen,  # (TILE, ROWS)
    scale_log2,
    maximum,  # (ROWS,) float32, of the split so far
    sums,  # (TILE, ROWS) float32
    acc,  # (D, ROWS) float32
):
    """Add the keys of a tile to a split; with a maximum of -inf the split starts here."""
    scores = tl.dot(k, q_t, input_precision="ieee") * scale_log2
    scores = tl.where(is_seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # nothing seen yet
    weights = tl.exp2(scores - shift[None, :])
    decay = tl.exp2(maximum - shift)[None, :]
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay, input_precision="ieee")
    return new_maximum, sums * decay + weights, acc


@triton.jit
def store_split(
    partials_ptr,
    stats_ptr,
    place,  # (ROWS,) int64, index of row and slot
    is_row,  # (ROWS,)
    maximum,
    sums,
    acc,
    HEAD_DIM: tl.constexpr,
):
    """Write the partials of a split."""
    cols = tl.arange(0, acc.shape[0])
    mask = is_row[None, :] & (cols < HEAD_DIM)[:, None]
    tl.store(partials_ptr + place[None, :] * HEAD_DIM + cols[:, None], acc, mask=mask)
    tl.store(stats_ptr + place * 2, maximum, mask=is_row)
    tl.store(stats_ptr + place * 2 + 1, tl.sum(sums, axis=0), mask=is_row)


# Not specialised: a kernel for each divisibility of a bound would be compiled between two steps.
@triton.jit(do_not_specialize=["kv_heads", "group", "slots", "window"])
def decode_attention_kernel(
    q_ptr,  # (tokens, heads, HEAD_DIM)
    k_ptr,  # (blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
    v_ptr,  # like k
    tables_ptr,  # (engine rows, max_blocks) int32
    rows_ptr,  # (reqs,) int32
    cu_seqlens_ptr,  # (reqs + 1,) int32
    seq_lens_ptr,  # (reqs,) int32
    partials_ptr,  # (tokens * heads, slots, HEAD_DIM) float32
    stats_ptr,  # (tokens * heads, slots, 2) float32: maximum and sum
    q_token_stride,  # elements from one token of q to the next
    q_head_stride,
    table_stride,  # elements from one row of the tables to the next
    kv_heads,
    group,  # heads per key/value head
    slots,  # splits that the partials have room for
    window,
    scale_log2,  # scale * log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, >= HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FINE_KEYS: tl.constexpr,
    FINE_END: tl.constexpr,
    COARSE_KEYS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Partials of some splits of one request, one key/value head and one tile of rows."""
    wait_for_inputs(IS_DEPENDENT)
    # Tiles of one head, then heads, run side by side: the former share keys, the latter blocks.
    row_tiles = tl.num_programs(0) // kv_heads
    kv_head = tl.program_id(0) // row_tiles
    request = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + request)
    queries = tl.load(cu_seqlens_ptr + request + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + request)
    low = tl.maximum(seq_len - queries - window + 1, 0)  # the first key that any query sees
    begin, end = part_of(low, seq_len, FINE_KEYS, FINE_END, COARSE_KEYS)
    first_row = tl.program_id(0) % row_tiles * ROWS
    if (begin >= end) | (first_row >= queries * group):
        return
    row = first_row + tl.arange(0, ROWS)
    is_row = row // group < queries
    # A row that does not exist is at a position that sees nothing.
    position = tl.where(is_row, seq_len - queries + row // group, -1)
    head = kv_head * group + row % group
    token = (first_token + row // group).to(tl.int64)  # tokens * heads * slots pass 2**31
    cols = tl.arange(0, BLOCK_D)
    in_head = cols < HEAD_DIM
    in_q = (token * q_token_stride + head * q_head_stride)[:, None] + cols[None, :]
    q = tl.load(q_ptr + in_q, mask=is_row[:, None] & in_head[None, :], other=0.0)
    in_tile, cache_stride = tl.arange(0, TILE), kv_heads * HEAD_DIM
    in_cache = kv_head * HEAD_DIM + in_tile[:, None] * cache_stride + cols[None, :]
    table_ptr = tables_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    out = (token * (kv_heads * group) + head) * slots
    out -= split_of(low, FINE_KEYS, FINE_END, COARSE_KEYS)  # slot 0 is the first visible split

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((TILE, ROWS), tl.float32)  # added up over keys at the end of a split only
    acc = tl.zeros((BLOCK_D, ROWS), tl.float32)
    block = tl.load(table_ptr + begin // BLOCK_SIZE)
    for tile in range(begin // TILE, tl.cdiv(end, TILE)):
        key = tile * TILE + in_tile
        # Nothing outside the visible keys is read: it may be another request's, or NaN.
        is_read = ((key >= low) & (key < seq_len))[:, None] & in_head[None, :]
        slot = block.to(tl.int64) * BLOCK_SIZE + tile % (BLOCK_SIZE // TILE) * TILE
        k = tl.load(k_ptr + slot * cache_stride + in_cache, mask=is_read, other=0.0)
        v = tl.load(v_ptr + slot * cache_stride + in_cache, mask=is_read, other=0.0)
        # One tile ahead. Loaded in the tile that needs it, the id would take a stage of the
        # pipeline, and no key would be in flight during the products (Triton 3.6, PTX read).
        next_key = tile * TILE + TILE
        block = tl.load(table_ptr + tl.minimum(next_key, end - 1) // BLOCK_SIZE)
        is_seen = (key[:, None] <= position[None, :]) & (key[:, None] > position[None, :] - window)
        maximum, sums, acc = fold_tile(tl.trans(q), k, v, is_seen, scale_log2, maximum, sums, acc)
        split = split_of(tile * TILE, FINE_KEYS, FINE_END, COARSE_KEYS)
        if (split_of(next_key, FINE_KEYS, FINE_END, COARSE_KEYS) > split) | (next_key >= end):
            store_split(partials_ptr, stats_ptr, out + split, is_row, maximum, sums, acc, HEAD_DIM)
            maximum = tl.full((ROWS,), float("-inf"), tl.float32)


@triton.jit(do_not_specialize=["heads", "slots", "window"])
def decode_attention_merge_kernel(
    partials_ptr,  # (tokens * heads, slots, HEAD_DIM) float32
    stats_ptr,  # (tokens * heads, slots, 2) float32: maximum and sum
    out_ptr,  # (tokens * heads, HEAD_DIM)
    cu_seqlens_ptr,  # (reqs + 1,) int32
    seq_lens_ptr,  # (reqs,) int32
    heads,
    slots,
    window,
    HEAD_DIM: tl.constexpr,
    FINE_KEYS: tl.constexpr,
    FINE_END: tl.constexpr,
    COARSE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits of one step
    COLS: tl.constexpr,  # columns of one program
    IS_DEPENDENT: tl.constexpr,
):
    """Some columns of one row of the result."""
    wait_for_inputs(IS_DEPENDENT)
    head = tl.program_id(0) % heads
    query = tl.program_id(1)
    request = tl.program_id(2)
    first_token = tl.load(cu_seqlens_ptr + request)
    queries = tl.load(cu_seqlens_ptr + request + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + request)
    if query >= queries:
        return
    cols = tl.program_id(0) // heads * COLS + tl.arange(0, COLS)
    in_head = cols < HEAD_DIM
    row = (first_token + query).to(tl.int64) * heads + head
    low = tl.maximum(seq_len - queries - window + 1, 0)
    position = seq_len - queries + query
    first = split_of(low, FINE_KEYS, FINE_END, COARSE_KEYS)
    last = tl.where(position < 0, -1, split_of(position, FINE_KEYS, FINE_END, COARSE_KEYS))

    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros((COLS,), tl.float32)
    # Chunks start at fixed splits, not at the first visible one, which drafts would move.
    for chunk in range(first // SPLITS, last // SPLITS + 1):
        split = chunk * SPLITS + tl.arange(0, SPLITS)
        is_split = (split >= first) & (split <= last)
        place = row * slots + split - first
        maxima = tl.load(stats_ptr + place * 2, mask=is_split, other=float("-inf"))
        sums = tl.load(stats_ptr + place * 2 + 1, mask=is_split, other=0.0)
        partials = tl.load(
            partials_ptr + place[:, None] * HEAD_DIM + cols[None, :],
            mask=is_split[:, None] & in_head[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - shift)
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(sums * weights, axis=0)
        acc = acc * decay + tl.sum(partials * weights[:, None], axis=0)
        maximum = new_maximum
    out = acc / tl.where(total == 0.0, 1.0, total)  # 0 where nothing is seen, as in padding
    tl.store(out_ptr + row * HEAD_DIM + cols, out.to(out_ptr.dtype.element_ty), mask=in_head)


def launch_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    partials: Tensor,
    stats: Tensor,
    out: Tensor,
    scale: float,
    window: int,
    max_query_len: int,
    config: DecodeAttentionConfig,
) -> None:
    """Enqueue both kernels on the current stream; the op has checked and allocated.

    Shapes are those at the kernels' parameters. All are contiguous but q and block_tables, of inner
    stride 1. Partials and stats, with a slot for each of `config.num_splits`, are overwritten. A
    window of 0 is none; max_query_len bounds the new tokens of a request.
    """
    reqs, (_, block_size, kv_heads, head_dim) = seq_lens.shape[0], k_cache.shape
    if q.shape[0] == 0:
        return
    heads, slots, group = q.shape[1], partials.shape[1], q.shape[1] // kv_heads
    row_tile = config.rows(max_query_len, group)
    row_tiles = triton.cdiv(max_query_len * group, row_tile)
    parts = config.num_parts(slots, reqs * kv_heads * row_tiles)
    splits = {
        "FINE_KEYS": config.fine_keys,
        "FINE_END": config.fine_end,
        "COARSE_KEYS": config.coarse_keys,
        # Whether a product and a sum are fused may differ among widths of the tile; so: never.
        "enable_fp_fusion": False,
        **dependent_options(q.device),
    }
    decode_attention_kernel[(kv_heads * row_tiles, parts, reqs)](
        q,
        k_cache,
        v_cache,
        block_tables,
        rows,
        cu_seqlens_q,
        seq_lens,
        partials,
        stats,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        kv_heads,
        group,
        slots,
        window or NO_WINDOW,
        scale * LOG2_E,
        HEAD_DIM=head_dim,
        BLOCK_D=max(LEAST_ROWS, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        TILE=config.tile_keys,
        ROWS=row_tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **splits,
    )
    col_tiles = triton.cdiv(head_dim, config.merge_cols)
    decode_attention_merge_kernel[(heads * col_tiles, max_query_len, reqs)](
        partials,
        stats,
        out,
        cu_seqlens_q,
        seq_lens,
        heads,
        slots,
        window or NO_WINDOW,
        HEAD_DIM=head_dim,
        SPLITS=config.merge_splits,
        COLS=config.merge_cols,
        num_warps=4,
        **splits,
    )
