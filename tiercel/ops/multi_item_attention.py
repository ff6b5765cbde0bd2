"""Prefill attention of packed items under the four arguments of FlashInfer, an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops.prefill_attention import prefill_attention


def multi_item_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    *,
    prefix_len_ptr: Tensor,
    token_pos_in_items_ptr: Tensor,
    token_pos_in_items_len: int,
    max_item_len_ptr: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    lse: Tensor | None = None,
) -> Tensor:
    """`prefill_attention` under the four arguments of FlashInfer, which are read on the host.

    Args:
        q: as in `prefill_attention`.
        k_cache: as in `prefill_attention`.
        v_cache: as in `prefill_attention`.
        block_tables: as in `prefill_attention`.
        query_lens: as in `prefill_attention`.
        context_lens: as in `prefill_attention`.
        scale: as in `prefill_attention`.
        prefix_len_ptr: (R,) uint32, P of each request.
        token_pos_in_items_ptr: (R * stride,) uint16: of the tokens from P on, 1 to L within an item
            and 0 for a delimiter, which may be left out; entries beyond a request's length
            are not read.
        token_pos_in_items_len: stride.
        max_item_len_ptr: (R,) uint16, the longest item of each request. Only checked: tiles are
            skipped exactly without it.
        k_new: as in `prefill_attention`.
        v_new: as in `prefill_attention`.
        window: as in `prefill_attention`.
        softcap: as in `prefill_attention`.
        lse: as in `prefill_attention`.

    Raises:
        ArgumentError: as in `prefill_attention`; or an argument does not fit, with its value.

    Source: FlashInfer pull request 1015.
    """
    named = {
        "prefix_len_ptr": (prefix_len_ptr, torch.uint32, len(query_lens)),
        "token_pos_in_items_ptr": (
            token_pos_in_items_ptr,
            torch.uint16,
            len(query_lens) * token_pos_in_items_len,
        ),
        "max_item_len_ptr": (max_item_len_ptr, torch.uint16, len(query_lens)),
    }
    for name, (tensor, dtype, count) in named.items():
        if tensor.dtype != dtype or tensor.shape != (count,):
            raise ArgumentError(
                f"prefill_attention: {name} is {tensor.dtype} {tuple(tensor.shape)}.",
                hint=f"Pass {dtype} ({count},) for {len(query_lens)} requests.",
            )
    prefixes, places, longest = (x.cpu().numpy().astype(np.int64) for x, *_ in named.values())
    starts = read_positions(query_lens, context_lens, prefixes, places, longest)
    return prefill_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_lens,
        context_lens,
        scale,
        window=window,
        softcap=softcap,
        prefix_len=prefixes.tolist(),
        item_start=torch.from_numpy(starts),
        k_new=k_new,
        v_new=v_new,
        lse=lse,
    )


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
                hint="The prefix is within the length, and the tokens after it fit one row.",
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
