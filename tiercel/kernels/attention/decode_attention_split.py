"""Decode attention of 16 bits on tensor cores, for few new tokens per request.

cuda/decode_attention_split.cu computes splits and adds them up, to groups of 8 and to rows, as far
as one CTA has them. cuda/decode_attention_merge.cu adds up the remaining sums. Splits and groups
end at fixed positions, and both kernels add splits to groups and groups to rows, one at a time, in
order: a token's result is bit for bit the same alone, in any batch, beside any drafts and under any
bound of the lengths. The distribution of the work has no effect on a result: every CTA takes an
equal share of all tiles of all requests, which it finds from lengths on the device, so nothing
waits for the longest request.

Floor: visible keys and values are read once. Partials add (head_dim + 2) * 4 bytes per row and sum
that another CTA's is added to, written and read in the last-level cache.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.kernels.runtime import rtc

LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30  # longer than any sequence, and no sum with it passes 2**31

CAPABILITY = (8, 0)  # cp.async, ldmatrix, m16n8k16 of bfloat16
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
LEAST_BLOCK = 64  # tokens, which blocks must be a multiple of
TILE_KEYS = {64: 128, 128: 64, 256: 64}  # of the kernel, by head_dim

# Where splits end; part of every result. 128 keys keep short contexts fast (one request of 1,024:
# 64 CTAs), and a row's workspace grows with their number.
FINE_KEYS, FINE_END = 128, 2048
MIDDLE_KEYS, MIDDLE_END = 256, 32768
COARSE_KEYS = 512

_THREADS = 128
# Tiles of rows, by head_dim, from which on the first kernel adds up splits. With fewer, rows are
# shared by many CTAs, and the second kernel begins sooner if it need not find their parts: 8 x 600
# (64 tiles) takes 8.9 us without sums and 9.8 with them, but 8 x 8,192 69.5 and 65.2. 16 x 600 (128
# tiles) 12.0 and 12.5, 16 x 2,048 36.2 and 33.8; whole steps of 16 requests of 512 tokens took 7%
# longer with them than another day's without (H200, docs/notes/attention.md).
LEAST_FOLDED = {64: 128, 128: 192, 256: 128}
# Tiles of rows, up to which units are ordered by splits, then heads, as in the cache: so 1 x 3,000
# takes 7.4 us, by heads 8.0; 4 x 600 6.0 and 6.3; 4 x 4,096 the same; 1 x 32,768 38.9 and 38.4.
# Beyond, long rows lose: 8 x 600 (64 tiles) 9.6 and 9.8, but 8 x 8,192 71.9 and 70.0 (H200).
MOST_HEADS_INSIDE = 32
H200_SMEM = 227 << 10


@dataclass(frozen=True, slots=True)
class DecodeAttentionSplitConfig:
    """A launch; no part of the result.

    Attributes:
        row_tiles: of 8 rows, that one pass over the keys serves.
        stages: tiles of keys and values of a CTA, in flight or in use.
        ctas: resident on an SM.
        room: CTAs that the registers of an SM hold, more than `ctas` where merges wait beside them.
        kept: requests at most, whose lengths are in shared memory.
        shared_sums: whether sums of rows are in shared memory, while those of groups are in
            registers.
    """

    row_tiles: int
    stages: int
    ctas: int
    room: int
    kept: int = 512
    shared_sums: bool = True

    def smem_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory of a CTA, as cuda/decode_attention_sums.cuh lays it out."""
        rows, keys = 8 * self.row_tiles, TILE_KEYS[head_dim]
        stage = (2 * keys + rows) * head_dim * 2
        sums = rows * (4 * head_dim + 32) if self.shared_sums else 0
        lengths = 4 * (3 * self.kept + 1)
        return self.stages * stage + rows * (2 * keys + 2 * 4 * 4 + 4) + sums + lengths


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """A launch of the second kernel; no part of the result.

    Attributes:
        batch: splits whose loads a warp issues together.
        warps: of a CTA.
        columns: of a row, that a lane adds up: 1 or 2.
        ctas: that the registers of an SM hold: those that wait beside the first kernel need room.
    """

    batch: int
    warps: int
    columns: int
    ctas: int


_FOLDED_MERGE = MergeConfig(16, 8, 1, 4)
# By splits of a row: few are loaded all together.
_MERGES = (
    (8, MergeConfig(8, 8, 1, 5)),
    (32, MergeConfig(32, 8, 1, 3)),
    (1 << 30, MergeConfig(48, 8, 1, 2)),
)
# Many splits of few rows: 1 x 16,384 20.0 us instead of 21.0, but 8 x 8,192, whose merges
# do not all wait beside the first kernel, 71.9 instead of 69.5 (H200).
_MERGE_OF_FEW_ROWS = MergeConfig(72, 4, 1, 3)
_FEW_RESULTS = 1 << 14  # elements
# More results than CTAs of a column a lane can wait for, one an SM beside the first kernel: half as
# many CTAs, of which two fit. Under a bound of 40,960 tokens 16 x 600 takes 13.1 us, 15.2 by the
# launch for so many splits; 23 x 600 17.7 and 23.4; 16 x 2,048 37.3 and 39.5 (H200).
_MERGE_OF_MANY_ROWS = MergeConfig(16, 8, 2, 4)
_RESULTS_OF_CTA = 256  # of 8 warps, a column a lane

# (head_dim, most rows): best first; the last one needs the least memory (H200; variants:
# docs/notes/attention.md).
_LAUNCHES = {
    (64, 8): (DecodeAttentionSplitConfig(1, 3, 2, 4), DecodeAttentionSplitConfig(1, 2, 1, 1)),
    (64, 16): (
        DecodeAttentionSplitConfig(2, 3, 2, 2, kept=72),
        DecodeAttentionSplitConfig(2, 2, 1, 1),
    ),
    (64, 24): (
        DecodeAttentionSplitConfig(3, 3, 2, 2, kept=96, shared_sums=False),
        DecodeAttentionSplitConfig(3, 2, 1, 1),
    ),
    (64, 32): (DecodeAttentionSplitConfig(4, 2, 2, 2),),
    (128, 8): (
        DecodeAttentionSplitConfig(1, 3, 2, 4, kept=376),
        DecodeAttentionSplitConfig(1, 2, 1, 1),
    ),
    (128, 16): (
        DecodeAttentionSplitConfig(2, 3, 2, 2, kept=192, shared_sums=False),
        DecodeAttentionSplitConfig(2, 2, 1, 1),
    ),
    (128, 24): (DecodeAttentionSplitConfig(3, 2, 2, 2),),
    (128, 32): (
        DecodeAttentionSplitConfig(4, 2, 2, 2),
        DecodeAttentionSplitConfig(4, 2, 1, 1, shared_sums=False),
    ),
    (256, 8): (DecodeAttentionSplitConfig(1, 3, 1, 1), DecodeAttentionSplitConfig(1, 2, 1, 1)),
    (256, 16): (
        DecodeAttentionSplitConfig(2, 3, 1, 1, shared_sums=False),
        DecodeAttentionSplitConfig(2, 2, 1, 1, shared_sums=False),
    ),
}
_MOST_ROWS = {64: 32, 128: 32, 256: 16}


@functools.cache
def is_supported(head_dim: int, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    """Whether a CUDA device runs the kernels on a cache like this; no part of a batch."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    is_cache = head_dim in HEAD_DIMS and dtype in DTYPES and block_size % LEAST_BLOCK == 0
    return is_cache and _LAUNCHES[head_dim, 8][-1].smem_bytes(head_dim) <= rtc.max_smem_bytes(
        device
    )


def select_decode_attention_split(
    head_dim: int, rows: int, smem_limit: int = H200_SMEM
) -> DecodeAttentionSplitConfig:
    """Choose the launch for requests of at most `rows` queries times heads of a group. Pure.

    smem_limit: bytes of shared memory that a CTA may have.
    """
    fitting = (most for dim, most in _LAUNCHES if dim == head_dim and rows <= most)
    launches = _LAUNCHES[head_dim, next(fitting, _MOST_ROWS[head_dim])]
    fitting_launches = (one for one in launches if one.smem_bytes(head_dim) <= smem_limit)
    return next(fitting_launches, launches[-1])


def num_splits(max_seq_len: int, max_query_len: int, window: int) -> int:
    """The most splits that one request's visible keys touch, at least 1."""
    fine = min(max_seq_len, FINE_END)
    middle = min(max_seq_len, MIDDLE_END) - fine
    coarse = max(0, max_seq_len - MIDDLE_END)
    splits = -(-fine // FINE_KEYS) + -(-middle // MIDDLE_KEYS) + -(-coarse // COARSE_KEYS)
    if window:  # the window of each new token; its ends may be anywhere in a split
        seen = window + max_query_len - 1
        splits = min(splits, 1 + -(-(seen - 1) // FINE_KEYS))
    return max(1, splits)


def attention_source(
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    config: DecodeAttentionSplitConfig,
    *,
    folds: bool,
    order: int = 0,
) -> rtc.KernelSource:
    """The first kernel as built for one kind of call; `order` of an image's columns."""
    macros = (
        *_split_macros(head_dim, dtype, config, folds=folds),
        ("IMAGE", order),
        ("BLOCK_SIZE", block_size),
        ("STAGES", config.stages),
        ("CTAS", config.room),
        ("KEPT", config.kept),
        ("SHARED_SUMS", int(config.shared_sums)),
    )
    return rtc.KernelSource("decode_attention_split", macros)


def select_folds(head_dim: int, row_tiles: int, slots: int) -> bool:
    """Whether the first kernel adds up a row's splits as far as one CTA has them. Pure.

    Args:
        head_dim: of the cache.
        row_tiles: of all requests and key heads.
        slots: splits of a row at most; with one there is no second kernel.
    """
    return row_tiles >= LEAST_FOLDED[head_dim] or slots == 1


def select_heads_inside(row_tiles: int) -> bool:
    """Whether units are ordered by splits, then heads, where the first kernel adds nothing. Pure.

    Args:
        row_tiles: of all requests and key heads.
    """
    return row_tiles <= MOST_HEADS_INSIDE


def select_merge(results: int, slots: int, num_sms: int, *, folds: bool) -> MergeConfig:
    """Choose the launch for `results` elements, each of at most `slots` splits. Pure."""
    if folds:
        return _FOLDED_MERGE
    if results > num_sms * _RESULTS_OF_CTA:
        return _MERGE_OF_MANY_ROWS
    if slots > _MERGES[1][0] and results <= _FEW_RESULTS:
        return _MERGE_OF_FEW_ROWS
    return next(merge for most, merge in _MERGES if slots <= most)


def merge_source(
    head_dim: int,
    dtype: torch.dtype,
    config: DecodeAttentionSplitConfig,
    merge: MergeConfig,
    *,
    folds: bool,
    order: int = 0,
) -> rtc.KernelSource:
    """The second kernel as built for one kind of call; `order` of an image's columns."""
    if not folds:
        config = _LAUNCHES[head_dim, 8][0]  # any: not read
    macros = (
        *_split_macros(head_dim, dtype, config, folds=folds),
        ("IMAGE", order),
        ("BATCH", merge.batch),
        ("WARPS", merge.warps),
        ("COLUMNS", merge.columns),
        ("CTAS", merge.ctas),
    )
    return rtc.KernelSource("decode_attention_merge", macros)


def _split_macros(
    head_dim: int, dtype: torch.dtype, config: DecodeAttentionSplitConfig, *, folds: bool
) -> tuple[tuple[str, int], ...]:
    return (
        ("D", head_dim),
        ("IS_BF16", int(dtype == torch.bfloat16)),
        ("FINE_KEYS", FINE_KEYS),
        ("FINE_END", FINE_END),
        ("MIDDLE_KEYS", MIDDLE_KEYS),
        ("MIDDLE_END", MIDDLE_END),
        ("COARSE_KEYS", COARSE_KEYS),
        ("NR", config.row_tiles),
        ("TILE", TILE_KEYS[head_dim]),
        ("FOLDS", int(folds)),
    )


@functools.cache  # every layer calls it
def load_decode_attention_split(
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    group: int,
    queries: int,
    device: torch.device,
    order: int = 0,
) -> None:
    """Load all that launches of up to `queries` tokens may need; call it before the first step."""
    limit = rtc.max_smem_bytes(device)
    rows = range(group, queries * group + 1, group)
    configs = {select_decode_attention_split(head_dim, count, limit) for count in rows}
    sources: dict[rtc.KernelSource, int] = {}
    for config, folds in itertools.product(configs, (False, True)):
        source = attention_source(head_dim, dtype, block_size, config, folds=folds, order=order)
        sources[source] = config.smem_bytes(head_dim)
        few_or_many = (_MERGE_OF_FEW_ROWS, _MERGE_OF_MANY_ROWS)
        merges = (_FOLDED_MERGE,) if folds else (*few_or_many, *(one for _, one in _MERGES))
        for merge in merges:
            sources[merge_source(head_dim, dtype, config, merge, folds=folds, order=order)] = 0
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source, smem_bytes in sources.items():
        rtc.load_kernel(source, device, smem_bytes)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_decode_attention_split(
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
    config: DecodeAttentionSplitConfig,
    *,
    shares: int = 0,
    folds: bool | None = None,
    heads_inside: bool | None = None,
    order: int = 0,
) -> None:
    """Enqueue both kernels on the current stream; the op has checked and allocated.

    Launches may be dependent (`rtc.launch`), and lengths, tables, rows and keys of places before
    the new tokens are read before the wait: between their writing and the kernel ahead of this one
    there must be a kernel that lets nothing start early, `prepare_step` or one of PyTorch's.

    Args:
        q: (tokens, heads, head_dim), unit inner stride, outer strides multiples of 8.
        k_cache: (blocks, block_size, kv_heads, head_dim) contiguous, dtype of q.
        v_cache: like k_cache.
        block_tables: (engine rows, max_blocks) int32, unit inner stride.
        rows: (reqs,) int32, of the tables.
        cu_seqlens_q: (reqs + 1,) int32.
        seq_lens: (reqs,) int32.
        partials: (tokens * heads, slots, head_dim) float32, slots >= `num_splits`; overwritten.
        stats: (tokens * heads, slots, 2) float32; overwritten.
        out: (tokens, heads * head_dim), dtype of q; with an order an image for packed_gemm.
        scale: multiplies the scores.
        window: 0 is none.
        max_query_len: bounds the new tokens of a request.
        config: from `select_decode_attention_split`.
        shares: CTAs among which the work is spread; 0: all that the device holds together.
        folds: None for the choice of `select_folds`; without effect on the result.
        heads_inside: None for the choice of `select_heads_inside`; without effect on the result.
        order: of the image's columns; 0 for rows.
    """
    (tokens, heads, head_dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    reqs, slots, group = seq_lens.shape[0], partials.shape[1], heads // kv_heads
    width = heads * head_dim
    if not tokens:
        return
    shares = shares or _num_sms(q.device) * config.ctas
    tiles = reqs * kv_heads * -(-max_query_len * group // (8 * config.row_tiles))
    folds = select_folds(head_dim, tiles, slots) if folds is None else folds
    source = attention_source(head_dim, q.dtype, block_size, config, folds=folds, order=order)
    of_both = [*map(rtc.pointer, (cu_seqlens_q, seq_lens, partials, stats, out))]
    tile = (out.shape[1] // width,) if order else ()
    sizes = [*map(ctypes.c_int, (reqs, kv_heads, group, slots, window or NO_WINDOW, *tile))]
    given = [
        *map(rtc.pointer, (q, k_cache, v_cache, block_tables, rows)),
        *of_both,
        *map(ctypes.c_int64, (q.stride(0), q.stride(1), block_tables.stride(0))),
        *sizes,
        ctypes.c_float(scale * LOG2_E),
        ctypes.c_int(select_heads_inside(tiles) if heads_inside is None else heads_inside),
    ]
    launch = functools.partial(rtc.launch, is_dependent=rtc.is_dependent(q.device))
    launch(rtc.load_kernel(source, q.device, config.smem_bytes(head_dim)), shares, _THREADS, given)
    if slots == 1 and folds:
        return  # no row is shared
    merge = select_merge(tokens * width, slots, _num_sms(q.device), folds=folds)
    source = merge_source(head_dim, q.dtype, config, merge, folds=folds, order=order)
    launch(
        rtc.load_kernel(source, q.device),
        shares if folds else -(-width // (32 * merge.columns * merge.warps)),
        32 * merge.warps,
        [*of_both, *sizes, ctypes.c_int(max_query_len)],
        grid_y=1 if folds else reqs * max_query_len,
    )
