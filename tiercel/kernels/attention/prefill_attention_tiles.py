"""The host's part of prefill attention: tiles of a step, planned from lengths it knows.

A request has a prefix of P tokens (a plain one: all its tokens) and may have items behind it. The
rows of a tile are some consecutive tokens of one request times the heads that share a key/value
head. Tiles are planned once per step, the longest first, and serve every layer.

    row of the table, int32: first row of q | tokens | index of the first token | request
                             | end of page keys | index of the first item key
                             | first page key | row of the result

A tile without item keys has the index behind its tokens in the sixth place. A tile's item keys run
from there to its last token, and its page keys to the smaller of their end, which is P, and that
token.

Few tiles leave processors idle while each walks a long prefix. Such a tile is cut into parts along
its page keys (`cut_tiles`): rows of the same form with other ends, whose results go to rows of
their own, and are merged by the weights that their sums say.
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
    from tiercel.kernels.attention.prefill_attention import PrefillAttentionConfig

ModelKey = tuple[torch.dtype, int, int, int]
TILE_INTS = 8
PART_KEYS = 128  # parts end at its multiples: the page step of the CUDA kernel
# A part costs about two steps beside its own, and the merge as much as two more: to be worth it,
# parts must save this many steps of the longest tile.
_LEAST_SAVED, _LEAST_STEPS = 5, 3


@dataclass(frozen=True, slots=True)
class PrefillAttentionPlan:
    """The tiles of one step on the device; serves all layers of one kind, on one stream.

    Attributes:
        config: see `select_prefill_attention`.
        model: it was made for: dtype, head_dim, query heads of a key/value head, block_size.
        tiles: (num_tiles, 8) int32, see above; of a buffer, as many as it holds.
        item_start: (T,) int32; read only where a tile has item keys.
        counter: (4,) int32: two zeros, the CUDA kernel's work counter, which leaves zeros; the
            number of tiles; 1 where neighbouring programs take the heads of one tile instead of the
            tiles of one head. Causal tokens want it (S 2048: 513 TFLOP/s against 402, H200).
        parts: (T, 2) int32, of each token the row of its first part and their number, where tiles
            were cut; else empty, and results are final.
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
    """Page steps of a part at most, so that all parts run at once; 0: whole tiles are best."""
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
    # Even parts: the last of three would else be short, and the others as long as before.
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
                f"prefill_attention: request {request} has a prefix of {prefix} and a length of "
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
            f"prefill_attention: token_pos_in_items of request {request} is {own[bad]} at "
            f"{bad}, max_item_len {longest}.",
            hint="Positions count 1, 2, .. within an item, up to max_item_len, with 0 between.",
        )


def _sizes(max_tiles: int, max_tokens: int, *, has_parts: bool) -> tuple[int, int, int, int]:
    """Numbers of tiles, counter, parts and item starts, as they lie one behind the other.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for other pointers.
    """
    return TILE_INTS * max_tiles, 4, 4 * -(-max_tokens // 2) * has_parts, max_tokens


@dataclass(frozen=True, slots=True)
class PlannedTiles:
    """The tiles of one step on the host.

    Attributes:
        config: see `select_prefill_attention`.
        model: see `PrefillAttentionPlan`.
        tiles: (num_tiles, 8) int32.
        item_start: (T,) int32, or empty: no token has items.
        parts: (T, 2) int32 of `cut_tiles`, or None.
        tokens_per_tile: at most.
        most_parts: number of tiles up to which some were cut.
    """

    config: PrefillAttentionConfig
    model: ModelKey
    tiles: npt.NDArray[np.int32]
    item_start: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32] | None
    tokens_per_tile: int
    most_parts: int = 0

    @property
    def kind(self) -> tuple[PrefillAttentionConfig, bool]:
        """What a graph is captured for: the kernel, and whether parts are merged."""
        return self.config, self.parts is not None

    @property
    def num_tokens(self) -> int:
        """T; each token is in one tile that begins with the first page key."""
        return int(self.tiles[self.tiles[:, 6] == 0, 1].sum())

    def upload(self, device: torch.device) -> PrefillAttentionPlan:
        """Copy them to the device, without waiting for it."""
        capacity = (len(self.tiles), max(self.num_tokens, len(self.item_start)))
        return self._read(self.host_table(*capacity).to(device, non_blocking=True), *capacity)

    def make_buffer(self, num_tokens: int, num_reqs: int, device: torch.device) -> PlanBuffer:
        """Room for any step of this kind with up to so many tokens and requests."""
        most = -(-num_tokens // self.tokens_per_tile) + num_reqs
        capacity = (most if self.parts is None else self.most_parts, num_tokens)
        total = sum(_sizes(*capacity, has_parts=self.parts is not None))
        data = torch.zeros(total, dtype=torch.int32, device=device)
        return PlanBuffer(data, *capacity, self._read(data, *capacity, has_items=True))

    def host_table(self, max_tiles: int, max_tokens: int) -> Tensor:
        """All of it in one pinned buffer, laid out for so many tiles and tokens."""
        tiles, parts = self.tiles, self.parts
        sizes = _sizes(max_tiles, max_tokens, has_parts=parts is not None)
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=torch.cuda.is_available())
        table, counter, places, starts = np.split(host.numpy(), np.cumsum(sizes[:-1]))
        table[: tiles.size] = tiles.ravel()
        heads_first = 2 * int(self._is_item.sum()) < len(tiles)
        counter[:] = (0, 0, len(tiles), heads_first)
        starts[: len(self.item_start)] = self.item_start
        if parts is not None:
            places[: parts.size] = parts.ravel()
        return host

    @property
    def _is_item(self) -> npt.NDArray[np.bool_]:
        tiles = self.tiles
        has_keys: npt.NDArray[np.bool_] = tiles[:, 5] < tiles[:, 1] + tiles[:, 2]
        return has_keys

    def _read(
        self, data: Tensor, max_tiles: int, max_tokens: int, *, has_items: bool | None = None
    ) -> PrefillAttentionPlan:
        has_parts = self.parts is not None
        sizes = _sizes(max_tiles, max_tokens, has_parts=has_parts)
        table, counter, parts, starts = data.split(sizes)
        return PrefillAttentionPlan(
            config=self.config,
            model=self.model,
            tiles=table.view(-1, TILE_INTS),
            item_start=starts,
            counter=counter,
            parts=parts.view(-1, 2),
            has_items=bool(self._is_item.any()) if has_items is None else has_items,
            num_tokens=max_tokens,
            num_part_rows=self.tokens_per_tile * max_tiles * has_parts,
            part_stride=self.tokens_per_tile,
        )


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """Device memory for plans of one kind; a graph that reads `plan` serves whatever is there.

    Attributes:
        data: int32.
        max_tiles: that it holds.
        max_tokens: that it holds.
        plan: what lies there.
    """

    data: Tensor
    max_tiles: int
    max_tokens: int
    plan: PrefillAttentionPlan

    def fill(self, planned: PlannedTiles) -> None:
        """Enqueue the copy of other tiles of the same kind."""
        self.data.copy_(planned.host_table(self.max_tiles, self.max_tokens), non_blocking=True)
