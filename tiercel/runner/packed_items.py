"""Items to score as inputs of a step, between the tokens of rows and caches.

A request's part of the batch is its new tokens of the prompt, followed by its items. The tokens of
the prompt come from the device's rows (`prepare_step`); items come from the host, with slots of -1:

    prompt chunk of A | item of A | item of A | prompt chunk of B | token of C | item of D
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import PackedItems
from tiercel.ops.prepare_step import StepInputs
from tiercel.runner.row_state import to_device
from tiercel.scheduler.plan import ScheduledRow


class PackedStep(Struct, frozen=True):
    """The host's part of a step of R requests and T tokens, some of which belong to items.

    Attributes:
        cached_starts: (R + 1,) int32, as `cu_seqlens_q` would be without items.
        cached_index: (T',) int64, the indices in the step of the tokens that belong to no item.
        item_ids: (T,) int32, 0 outside of items.
        item_positions: (T,) int32, 0 outside of items.
        items: for attention.
    """

    cached_starts: npt.NDArray[np.int32]
    cached_index: npt.NDArray[np.int64]
    item_ids: npt.NDArray[np.int32]
    item_positions: npt.NDArray[np.int32]
    items: PackedItems

    def merged(self, cached: StepInputs) -> StepInputs:
        """Inputs of all T tokens, from those of the T' tokens that belong to no item."""
        device, count = cached.input_ids.device, len(self.item_ids)
        # One copy to the device: int64 first, for its alignment.
        host = np.concatenate(
            (self.cached_index.view(np.int32), self.item_ids, self.item_positions)
        )
        on_device = to_device(host, device)
        split = 2 * len(self.cached_index)
        index = on_device[:split].view(torch.int64)
        groups = cached.slot_mapping.shape[0]
        slots = torch.full((groups, count), -1, dtype=torch.int64, device=device)

        def put(whole: Tensor, part: Tensor) -> Tensor:
            # A copy: kernels are compiled anew for addresses of another alignment.
            return whole.clone().index_copy_(0, index, part)

        return StepInputs(
            put(on_device[split : split + count], cached.input_ids),
            put(on_device[split + count :], cached.positions),
            cached.seq_lens,
            slots.index_copy_(1, index, cached.slot_mapping),
        )


def pack_items(parts: Sequence[ScheduledRow]) -> PackedStep:
    """Lay out the items of a step; at least one part has some."""
    total = sum(part.num_tokens for part in parts)
    ids = np.zeros(total, np.int32)
    positions, starts = np.zeros(total, np.int32), np.zeros(total, np.int32)
    cached_index: list[npt.NDArray[np.int64]] = []
    prefixes: list[int] = []
    at = 0
    for part in parts:
        cached_index.append(np.arange(at, at + part.num_query))
        at += part.num_query
        prefix = part.start + part.num_query
        prefixes.append(prefix)
        if not part.items:
            continue
        assert part.request.score is not None, "only a task has items"
        items = part.request.score.items[part.items.start : part.items.stop]
        own = slice(at, at + part.num_item_tokens)
        at = own.stop
        lengths = np.fromiter(map(len, items), np.int32, len(items))
        ids[own] = np.fromiter(chain.from_iterable(items), np.int32, part.num_item_tokens)
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)  # the start of each token's item
        starts[own] = prefix + first
        positions[own] = prefix + np.arange(part.num_item_tokens) - first
    cached = np.cumsum([0, *(part.num_query for part in parts)]).astype(np.int32)
    packed = PackedItems(tuple(prefixes), torch.from_numpy(starts))
    return PackedStep(cached, np.concatenate(cached_index), ids, positions, packed)
