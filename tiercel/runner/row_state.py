"""The persistent state of running requests on the device: one row each, and one for scratch.

All columns are views of one int32 arena. The host stages small differences and `apply` brings them
to the device in one copy and one scatter, whatever they are: tokens of a new prompt, blocks,
sampling parameters.
Staging buffers are fresh pinned memory, so the host may run ahead of the device with no barrier;
the allocator gives a buffer out again only after the copy that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.ops.sample_tokens import SampleRows
from tiercel.ops.verify_accept import DraftRows
from tiercel.request.request import Request
from tiercel.spec.drafter_state import DrafterState
from tiercel.spec.policy import INITIAL_ACCEPTANCE

_DRAFT_COLUMNS = (
    "draft_limit", "num_wanted", "acceptance", "num_idle", "num_prompt", "max_new",
)  # fmt: skip
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def lists_to_device(
    lists: Sequence[Sequence[int] | npt.NDArray[np.integer]], device: torch.device
) -> tuple[Tensor, ...]:
    """Lists as int32 tensors, in one copy.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for other pointers.
    """
    offsets = [0]
    for values in lists:
        offsets.append(offsets[-1] + -(-len(values) // 4) * 4)
    host = np.zeros(offsets[-1], np.int32)
    for start, values in zip(offsets, lists, strict=False):
        host[start : start + len(values)] = values
    joined = to_device(host, device)
    pairs = zip(offsets, lists, strict=False)
    return tuple(joined[start : start + len(values)] for start, values in pairs)


class Rows:
    """Columns of `num_rows` requests and, as the last row, scratch.

    Attributes:
        token_ids: (S, max_model_len + 1 + K) int32, prompt and output.
        num_tokens: (S,) int32, number of tokens that are known.
        num_computed: (S,) int32, number of tokens that are in the cache or on their way there.
        block_tables: (G, S, max_blocks) int32.
        top_k: (S,) int32; the vocabulary's size for all tokens.
        values: (S,) float32 each: temperature, top_p, min_p; presence, frequency, repetition.
        key: (S,) int64, keys of the noise.
        drafts: columns of drafting; K = 0 without it, and then they are not used. Column 0 of
            `draft_ids` is the number of drafts in the columns after it.
        num_prompt: (S,) int32, tokens of the prompt.
        max_new: (S,) int32, tokens of the answer at most.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        num_groups: int,
        max_blocks: int,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        size = num_rows + 1
        self.device = device
        self.scratch = num_rows
        floats = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
        shapes: dict[str, tuple[int, ...]] = {
            "key": (size, 2),  # first: 8 bytes each
            "token_ids": (size, max_model_len + 1 + max_drafts),  # a full prompt is sampled too
            "block_tables": (num_groups, size, max_blocks),
            **dict.fromkeys(("num_tokens", "num_computed", "top_k", *floats), (size,)),
            "draft_ids": (size, 1 + max_drafts),
            **dict.fromkeys(_DRAFT_COLUMNS, (size,)),
        }
        total = sum(prod(shape) for shape in shapes.values())
        self._arena = torch.zeros(total, dtype=torch.int32, device=device)
        flat = torch.split_with_sizes(self._arena, [prod(shape) for shape in shapes.values()])
        columns = {
            name: column.view(shape)
            for (name, shape), column in zip(shapes.items(), flat, strict=True)
        }
        self.key = columns["key"].view(torch.int64).squeeze(1)
        self.token_ids, self.block_tables = columns["token_ids"], columns["block_tables"]
        self.num_tokens, self.num_computed = columns["num_tokens"], columns["num_computed"]
        self.top_k = columns["top_k"]
        self.values = {name: columns[name].view(torch.float32) for name in floats}
        self.drafts = DraftRows(
            columns["draft_ids"],
            self.num_computed,
            columns["draft_limit"],
            columns["num_wanted"],
            columns["acceptance"].view(torch.float32),
            columns["num_idle"],
        )
        self.num_prompt, self.max_new = columns["num_prompt"], columns["max_new"]
        self._staged: list[tuple[int, npt.NDArray[np.int32]]] = []

    @property
    def sampling(self) -> SampleRows:
        """The columns that sampling reads and extends."""
        return SampleRows(self.token_ids, self.num_tokens, self.values["temperature"], self.key)

    @property
    def drafter_state(self) -> DrafterState:
        """The columns that proposers read and write."""
        return DrafterState(self.sampling, self.num_prompt, self.max_new, self.drafts)

    def enter_drafts(self, request: Request) -> None:
        """Stage the drafting columns of a request that got its row."""
        drafts, row = self.drafts, (request.row,)
        values: tuple[tuple[Tensor, float], ...] = (
            (drafts.draft_limit, request.draft_limit),
            (drafts.num_wanted, request.draft_limit),
            (drafts.acceptance, INITIAL_ACCEPTANCE),
            (drafts.num_idle, 0),
            (self.num_prompt, len(request.prompt_token_ids)),
            (self.max_new, request.max_tokens),
        )
        for column, value in values:
            self.stage(column, row, [value])
        self.stage(drafts.draft_ids, (request.row, 0), [0])

    def stage(self, column: Tensor, index: tuple[int, ...], values: Sequence[float]) -> None:
        """Stage values for `column[index]` and the elements after it; none twice before `apply`.

        Args:
            column: a column of this object.
            index: an index for each dimension.
            values: values in the column's dtype.
        """
        words = column.element_size() // 4
        offset = sum(i * step for i, step in zip(index, column.stride(), strict=True))
        start = int(column.storage_offset() + offset) * words
        self._staged.append((start, np.asarray(values, _NUMPY[column.dtype]).view(np.int32)))

    def apply(self) -> None:
        """Enqueue all staged writes: one copy, one scatter."""
        if not self._staged:
            return
        offsets = [np.arange(start, start + len(data)) for start, data in self._staged]
        # Offsets and values in one buffer: a copy to the device costs the same for both.
        buffer = np.concatenate(
            (np.concatenate(offsets).view(np.int32), *(data for _, data in self._staged))
        )
        on_device = to_device(buffer, self.device)
        count = buffer.size // 3
        index = on_device[: 2 * count].view(torch.int64)
        self._arena.scatter_(0, index, on_device[2 * count :])
        self._staged.clear()

    def forget_staged(self) -> None:
        """Drop staged writes; rows whose writes are lost must enter anew."""
        self._staged.clear()
