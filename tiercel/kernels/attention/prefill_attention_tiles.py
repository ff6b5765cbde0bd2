"""Tiles of a prefill attention step, planned on the host from the lengths it knows.

A request has a prefix of P tokens (a plain one: all its tokens), which items may follow. The rows
of a tile are some consecutive tokens of one request times the heads that share a key/value head.
Tiles are planned once per step, the longest first, and serve every layer.

    row of the table, int32: first row of q | tokens | index of the first token | request
                             | end of page keys | index of the first item key
                             | first page key | row of the result

A tile without item keys has the index after its last token in the sixth column. A tile's item keys
run from there to its last token, and its page keys to the smaller of their end, which is P, and
that token.

Few tiles leave processors idle while each walks a long prefix. So a tile can be cut into parts
along its page keys (`cut_tiles`): rows of the same form with other ends. Results of parts go to
rows of their own and are merged by weights from their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

ModelKey = tuple[torch.dtype, int, int, int]
TILE_INTS = 8
PART_KEYS = 128  # parts end at its multiples: the page step of the CUDA kernel
# A part costs about two steps beside its own, and the merge as much as two more: to be worth it,
# parts must save this many steps of the longest tile.
_LEAST_SAVED, _LEAST_STEPS = 5, 3


class PrefillAttentionConfig(Struct, frozen=True):
    """Which kernel, and the Triton kernel's launch.

    Attributes:
        variant: "plain" or "fast" of the CUDA kernel, or "triton".
        block_m: packed rows of a tile, tokens times heads of a group.
        block_n: keys of a step.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    variant: Literal["plain", "fast", "triton"]
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class PrefillAttentionPlan(Struct, frozen=True):
    """The tiles of one step on the device; serves all layers of one kind, on one stream.

    Attributes:
        config: see `select_prefill_attention`.
        model: dtype, head_dim, query heads of a key/value head and block_size that it was made for.
        tiles: (num_tiles, 8) int32, see above; of a buffer, as many as it holds.
        item_start: (T,) int32; read only where a tile has item keys.
        counter: (4,) int32: two zeros, the CUDA kernel's work counter, which leaves zeros; the
            number of tiles; 1 where neighbouring programs take the heads of one tile instead of the
            tiles of one head. Causal tokens want it (S 2048: 513 TFLOP/s against 402, H200).
        parts: (T, 2) int32, the row of each token's first part and the number of its parts, where
            tiles were cut; else empty, and results are final.
        has_items: whether any tile has item keys.
        num_tokens: T.
        num_part_rows: rows of the results of all parts.
        part_stride: rows from one part of a token to its next.
    """

    config: PrefillAttentionConfig
    model: ModelKey
    tiles: Tensor
    item_start: Tensor
    counter: Tensor
    parts: Tensor
    has_items: bool
    num_tokens: int
    num_part_rows: int
    part_stride: int


def make_tiles(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix_lens: Sequence[int],
    item_start: npt.NDArray[np.int32] | None,
    tokens_per_tile: int,
) -> npt.NDArray[np.int32]:
    """Cut every request's new tokens into tiles, longest first.

    Args:
        query_lens: new tokens of each request.
        context_lens: its length with them.
        prefix_lens: P of each request; its context or more: no items.
        item_start: (T,) index of the first token of each token's item; read from P on. A token's
            own index + 1 sees the prefix alone.
        tokens_per_tile: > 0.

    Returns:
        (num_tiles, 8) int32, see above; page keys begin with the first, results are rows of q.
    """
    lengths, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    counts = -(-lengths // tokens_per_tile)
    request = np.repeat(np.arange(len(lengths)), counts)
    place = tokens_per_tile * (np.arange(len(request)) - (np.cumsum(counts) - counts)[request])
    tokens = np.minimum(tokens_per_tile, lengths[request] - place)
    first = (contexts - lengths)[request]
    row = (np.cumsum(lengths) - lengths)[request] + place
    index, end = first + place, first + place + tokens
    prefix = np.minimum(np.asarray(prefix_lens, np.int64), contexts)[request]
    low = end.copy()
    if item_start is not None:
        has_items = np.flatnonzero(end > prefix)
        start = item_start[(row + np.maximum(prefix - index, 0))[has_items]]
        # Where every token sees the prefix alone one key is loaded all the same, and masked:
        # a tile with P = 0 needs a step, to store its zeros.
        low[has_items] = np.minimum(np.maximum(start, prefix[has_items]), end[has_items] - 1)
    zero = np.zeros_like(row)
    tiles = np.stack((row, tokens, index, request, prefix, low, zero, row), axis=1)
    order = np.argsort(low - end - np.minimum(prefix, end), kind="stable")
    return np.ascontiguousarray(tiles[order].astype(np.int32))


def page_steps(tiles: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """(num_tiles,) steps of PART_KEYS page keys of whole tiles."""
    wide = tiles.astype(np.int64)
    end: npt.NDArray[np.int64] = np.minimum(wide[:, 4], wide[:, 1] + wide[:, 2])
    return (end + PART_KEYS - 1) // PART_KEYS


def part_steps(tiles: npt.NDArray[np.int32], kv_heads: int, processors: int) -> int:
    """Page steps of a part at most, so that all parts run together; 0: whole tiles are best."""
    steps = page_steps(tiles)
    longest, total = int(steps.max(initial=0)), int(steps.sum())
    if len(steps) * kv_heads > processors:
        return 0
    least = max(_LEAST_STEPS, -(-total * kv_heads // processors))
    for most in range(least, longest - _LEAST_SAVED + 1):
        if int((-(-steps // most)).clip(1).sum()) * kv_heads <= processors:
            return most
    return 0


def cut_tiles(
    tiles: npt.NDArray[np.int32], steps_per_part: int, tokens_per_tile: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Cut page keys of tiles into parts, which share one token range.

    Args:
        tiles: (num_tiles, 8) int32 of `make_tiles`.
        steps_per_part: of PART_KEYS keys, > 0.
        tokens_per_tile: of `make_tiles`; rows from one part of a token to its next.

    Returns:
        (num_parts, 8) int32 tiles, and (T, 2) int32 the row of each token's first part and their
        number. Item keys belong to the first part.
    """
    _, tokens, index, _, prefix, _, _, _ = tiles.T.astype(np.int64)
    end = index + tokens
    steps = page_steps(tiles)
    counts = (-(-steps // steps_per_part)).clip(1)
    firsts = np.cumsum(counts) - counts
    own = np.repeat(np.arange(len(tiles)), counts)
    part = np.arange(len(own)) - firsts[own]
    # Even parts: the last of three would else be short, and the first two as long as before.
    begin = PART_KEYS * (steps[own] * part // counts[own])
    stop = PART_KEYS * (steps[own] * (part + 1) // counts[own])
    cut = tiles[own].copy()
    cut[:, 4] = np.where(part == counts[own] - 1, prefix[own], stop)
    cut[part > 0, 5] = end[own][part > 0]
    cut[:, 6] = begin
    cut[:, 7] = tokens_per_tile * np.arange(len(own))
    rows = np.zeros((int(tokens.sum()), 2), np.int32)
    for tile, (row, count) in enumerate(tiles[:, :2].tolist()):
        rows[row : row + count, 0] = tokens_per_tile * firsts[tile] + np.arange(count)
        rows[row : row + count, 1] = counts[tile]
    return cut, rows
