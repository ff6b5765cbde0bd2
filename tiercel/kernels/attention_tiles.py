"""The host's part of prefill attention: tiles of a step, planned from lengths it knows.

A request has a prefix of P tokens (a plain one: all its tokens) and may have items behind it. The
rows of a tile are some consecutive tokens of one request times the heads that share a key/value
head. Tiles are planned once per step, the longest first, and serve every layer.

    row of the table, int32: first row of q | tokens | index of the first token | request
                             | P | index of the first item key | its row in k_new | 0

A tile without item keys has the index behind its tokens in the sixth place. A tile's item keys run
from there to its last token, and its page keys from 0 to the smaller of P and that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.errors import ArgumentError

if TYPE_CHECKING:
    from tiercel.kernels.multi_item_attention import MultiItemAttentionConfig

TILE_INTS = 8


@dataclass(frozen=True, slots=True)
class MultiItemAttentionPlan:
    """The tiles of one step on the device; serves all layers of one kind, on one stream.

    Attributes:
        config: see `select_multi_item_attention`.
        tiles: (num_tiles, 8) int32, see above.
        item_start: (T,) int32; read only where a tile has item keys.
        counter: (2,) int32 zeros, the CUDA kernel's work counter; it leaves zeros.
        heads_first: neighbouring programs take the heads of one tile instead of the tiles of one
            head. Causal tokens want it (S 2048: 513 TFLOP/s against 402, H200).
        has_items: whether any tile has item keys.
        num_tokens: T.
    """

    config: MultiItemAttentionConfig
    tiles: Tensor
    item_start: Tensor
    counter: Tensor
    heads_first: bool
    has_items: bool
    num_tokens: int


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
        (num_tiles, 8) int32, see above.
    """
    rows, costs, at = [], [], 0
    for request, (query_len, context_len, prefix_len) in enumerate(
        zip(query_lens, context_lens, prefix_lens, strict=True)
    ):
        first, prefix = context_len - query_len, min(prefix_len, context_len)
        place = np.arange(0, query_len, tokens_per_tile)
        tokens = np.minimum(tokens_per_tile, query_len - place)
        index, end = first + place, first + place + tokens
        low = end.copy()
        if item_start is not None and prefix < context_len:
            has_items = end > prefix
            start = item_start[at + np.maximum(index, prefix)[has_items] - first]
            # Where every token sees the prefix alone one key is loaded all the same, and masked:
            # a tile with P = 0 needs a step, to store its zeros.
            low[has_items] = np.minimum(np.maximum(start, prefix), end[has_items] - 1)
        columns = (at + place, tokens, index, request, prefix, low, at + low - first, 0)
        rows.append(np.stack(np.broadcast_arrays(*columns), axis=1))
        costs.append(np.minimum(prefix, end) + end - low)
        at += query_len
    order = np.argsort(-np.concatenate(costs), kind="stable")
    return np.ascontiguousarray(np.concatenate(rows)[order].astype(np.int32))


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Tiles of prompts on the host, for a plan whose place on the device is fixed.

    Attributes:
        config: how the kernel is launched.
        table: (num_tiles, 8) int32, see above.
    """

    config: MultiItemAttentionConfig
    table: npt.NDArray[np.int32]

    def plan(self, table: Tensor, num_tokens: int) -> MultiItemAttentionPlan:
        """The plan that reads `table`, (num_tiles, 8) int32 on the device, at each launch."""
        zeros = table.new_zeros(2)
        return MultiItemAttentionPlan(
            config=self.config,
            tiles=table,
            item_start=zeros[:0],
            counter=zeros,
            heads_first=True,
            has_items=False,
            num_tokens=num_tokens,
        )


def make_padded_tiles(
    config: MultiItemAttentionConfig,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    group: int,
    spare: int,
) -> PromptTiles:
    """As many tiles as `spare` prompts of so many tokens in all can have; group: heads of a tile.

    The cheapest tile fills the table up: one that is computed twice is written twice.
    """
    step = config.block_m // group  # tokens
    tiles = make_tiles(query_lens, context_lens, context_lens, None, step)
    missing = sum(query_lens) // step + spare - len(tiles)
    return PromptTiles(config, np.concatenate((tiles, np.repeat(tiles[-1:], missing, axis=0))))


def read_positions(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix_lens: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    longest: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """From positions within items, as FlashInfer takes them, to where items begin.

    Args:
        query_lens: new tokens of each request.
        context_lens: its length with them.
        prefix_lens: (R,) P of each request.
        positions: (R * stride,) of the tokens from P on: 1 to L within an item, 0 for a delimiter.
        longest: (R,) the longest item of each request.

    Returns:
        (T,) int32 `item_start`.

    Raises:
        ArgumentError: a prefix or a position cannot be.
    """
    stride = len(positions) // max(1, len(query_lens))
    starts = [np.zeros(0, np.int64)]
    for request, (new, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        prefix = int(prefix_lens[request])
        count = length - prefix
        if not 0 <= count <= stride:
            raise ArgumentError(
                f"multi_item_attention: request {request} has a prefix of {prefix} and a length of "
                f"{length} but token_pos_in_items_len={stride}.",
                hint="The prefix lies within the length, and what follows it within one row.",
            )
        own = positions[request * stride :][:count]
        _check_positions(own, int(longest[request]), request)
        whole = np.concatenate((np.zeros(prefix, np.int64), np.arange(prefix, length) - own + 1))
        starts.append(whole[length - new :])
    return np.concatenate(starts).astype(np.int32)


def _check_positions(own: npt.NDArray[np.int64], longest: int, request: int) -> None:
    """Positions count up from a delimiter, or from 1."""
    before = np.concatenate(([0], own[:-1]))
    is_sound = (own <= 1) | (own == before + 1)
    if not is_sound.all() or own.max(initial=0) > longest:
        bad = int(np.argmax(~is_sound | (own > longest)))
        raise ArgumentError(
            f"multi_item_attention: token_pos_in_items of request {request} is {own[bad]} at "
            f"{bad}, max_item_len {longest}.",
            hint="Positions count 1, 2, .. within an item, up to max_item_len, with 0 between.",
        )


def make_plan(
    config: MultiItemAttentionConfig,
    tiles: npt.NDArray[np.int32],
    item_start: npt.NDArray[np.int32] | None,
    device: torch.device,
) -> MultiItemAttentionPlan:
    """Copy a table to the device, without waiting for it."""
    starts = np.zeros(0, np.int32) if item_start is None else item_start
    host = torch.empty(
        tiles.size + 4 + starts.size, dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    parts = host.numpy()
    parts[: tiles.size] = tiles.ravel()
    parts[tiles.size : tiles.size + 4] = 0
    parts[tiles.size + 4 :] = starts
    data = host.to(device, non_blocking=True)
    table, counter, starts_there = data.split((tiles.size, 4, starts.size))
    is_item = tiles[:, 5] < tiles[:, 1] + tiles[:, 2]
    return MultiItemAttentionPlan(
        config=config,
        tiles=table.view(-1, TILE_INTS),
        item_start=starts_there,
        counter=counter[:2],
        heads_first=2 * int(is_item.sum()) < len(tiles),
        has_items=bool(is_item.any()),
        num_tokens=int(tiles[:, 1].sum()),
    )
