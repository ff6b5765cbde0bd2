"""The plan of a prefill attention step on the host: its lengths, and the tiles to copy to a device.

`read_lengths` checks the lengths and item starts of a step. `PlannedTiles` lays out the tiles that
`prefill_attention_tiles.py` cuts from it in one buffer, which one copy brings to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.attention.prefill_attention_tiles import (
    TILE_INTS,
    ModelKey,
    PrefillAttentionConfig,
)
from tiercel.kernels.attention.prefill_attention_tiles import (
    PrefillAttentionPlan as PrefillAttentionPlan,  # layers keep one
)


class ScoreRule(Struct, frozen=True):
    """How the product of a query and a key becomes a score.

    Attributes:
        scale: factor of the product.
        window: 0 for none.
        softcap: 0 for none.
    """

    scale: float
    window: int
    softcap: float


class StepLengths(Struct, frozen=True):
    """Lengths of a step, as the host knows them.

    Attributes:
        query: new tokens of each request.
        context: length of each request with its new tokens.
        prefix: P of each request, at most its length.
        item_start: (T,) int32, None without items.
    """

    query: tuple[int, ...]
    context: tuple[int, ...]
    prefix: tuple[int, ...]
    item_start: npt.NDArray[np.int32] | None

    @property
    def has_items(self) -> bool:
        return self.item_start is not None


def read_lengths(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix_len: Sequence[int] | None,
    item_start: Tensor | None,
    *,
    are_items_checked: bool = False,
) -> StepLengths:
    """Check lengths and item starts among each other.

    Raises:
        ArgumentError: they disagree, or an item begins outside of its step.
    """
    query, context = tuple(query_lens), tuple(context_lens)
    pairs = zip(query, context, strict=False)
    if len(query) != len(context) or not all(0 < new <= length for new, length in pairs):
        raise ArgumentError(
            f"prefill_attention: query_lens {query} do not fit context_lens {context}.",
            hint="Give each request 1 or more new tokens, at most its length.",
        )
    if prefix_len is None and item_start is None:
        return StepLengths(query, context, context, None)
    if prefix_len is None or item_start is None or item_start.is_cuda:
        raise ArgumentError(
            "prefill_attention: prefix_len and item_start are not both on the host.",
            hint="Pass both, a sequence and a CPU tensor, or neither.",
        )
    prefix = tuple(min(p, length) for p, length in zip(prefix_len, context, strict=False))
    starts = item_start.numpy()
    if (
        len(prefix_len) != len(query)
        or min(prefix_len, default=0) < 0
        or starts.shape != (sum(query),)
        or starts.dtype != np.int32
    ):
        raise ArgumentError(
            f"prefill_attention: prefix_len {tuple(prefix_len)} and item_start "
            f"{starts.shape} {starts.dtype} do not fit {len(query)} requests, {sum(query)} tokens.",
            hint="Pass a prefix_len >= 0 per request and an int32 item_start per token.",
        )
    if not are_items_checked:
        _check_items(query, context, prefix, starts)
    return StepLengths(query, context, prefix, starts if prefix != context else None)


def _check_items(
    query: tuple[int, ...],
    context: tuple[int, ...],
    prefix: tuple[int, ...],
    starts: npt.NDArray[np.int32],
) -> None:
    """Item starts must rise, and be in this step after the prefix."""
    at = 0
    for request, (new, length) in enumerate(zip(query, context, strict=True)):
        if prefix[request] >= length:
            at += new
            continue
        first = length - new
        least = max(first, prefix[request])
        own = starts[at + least - first : at + new]
        at += new
        is_sound = (own >= least) & (own <= np.arange(least, length) + 1)
        is_sound[1:] &= own[1:] >= own[:-1]
        if not is_sound.all():
            bad = int(np.argmin(is_sound))
            raise ArgumentError(
                f"prefill_attention: item_start of request {request} at index {least + bad} "
                f"is {int(own[bad])}.",
                hint=f"From index {least} on (prefix and cached tokens end there) it must rise, "
                f"from {least} or more to at most a token's own index + 1.",
            )


def _sizes(max_tiles: int, max_tokens: int, *, has_parts: bool) -> tuple[int, int, int, int]:
    """Numbers of tiles, counter, parts and item starts, in their order in a buffer.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for other pointers.
    """
    return TILE_INTS * max_tiles, 4, 4 * -(-max_tokens // 2) * has_parts, max_tokens


class PlannedTiles(Struct, frozen=True):
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
        """The key of a captured graph: the kernel, and whether parts are merged."""
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


class PlanBuffer(Struct, frozen=True):
    """Device memory for plans of one kind; a graph that reads `plan` serves all that fill it.

    Attributes:
        data: int32.
        max_tiles: that it holds.
        max_tokens: that it holds.
        plan: view of the data as a plan.
    """

    data: Tensor
    max_tiles: int
    max_tokens: int
    plan: PrefillAttentionPlan

    def fill(self, planned: PlannedTiles) -> None:
        """Enqueue the copy of other tiles of the same kind."""
        self.data.copy_(planned.host_table(self.max_tiles, self.max_tokens), non_blocking=True)
