"""The results of a rank's own requests as bytes, for ranks whose schedulers plan for all.

What a step has sampled, what it has read of prompts and items, and what the masks of forms have
shown: all that a loop reads of a step's results. Requests are named by their place in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from tiercel.request.request import Request
from tiercel.runner.prompt_readback import PromptReadback
from tiercel.runner.sampler_output import SampledTokens, TopLogprobs
from tiercel.runner.score_readback import ItemTokensReadback, ScoreReadback

Readback = PromptReadback | ScoreReadback | ItemTokensReadback


class _Array(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the host."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Values(msgspec.Struct, frozen=True, array_like=True):
    """A readback.

    Attributes:
        number: of its request.
        kind: ``prompt``, ``score`` or ``items``.
        first: see `ScoreReadback` and `ItemTokensReadback`.
        arrays: its tensors.
    """

    number: int
    kind: str
    first: int
    arrays: tuple[_Array, ...]


class _Form(msgspec.Struct, frozen=True, array_like=True):
    """What masks have shown of the form that a request's answer must have; see `GrammarMatcher`."""

    number: int
    error: str | None
    is_late: bool


class _Results(msgspec.Struct, frozen=True, array_like=True):
    sampled: dict[int, SampledTokens] = {}
    values: list[_Values] = []
    forms: list[_Form] = []


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Results)


def pack_results(
    requests: Sequence[Request],
    rank: int,
    sampled: Mapping[Request, SampledTokens],
    readbacks: Iterable[Readback],
) -> bytes:
    """The results of a rank.

    Args:
        requests: of the step, on all ranks.
        rank: this one.
        sampled: its tokens.
        readbacks: of its requests, on the host.
    """
    numbers = {request: i for i, request in enumerate(requests) if request.rank == rank}
    forms = [
        _Form(number, request.matcher.error, request.matcher.is_late)
        for request, number in numbers.items()
        if request.matcher is not None
    ]
    values = [_pack(readback, numbers[readback.request]) for readback in readbacks]
    # Not those of scratch.
    tokens = {numbers[request]: found for request, found in sampled.items() if request in numbers}
    return _ENCODER.encode(_Results(tokens, values, forms))


def take_results(requests: Sequence[Request], data: bytes) -> dict[Request, SampledTokens]:
    """The tokens of another rank; its other values go to their requests."""
    results = _DECODER.decode(data)
    for values in results.values:
        _unpack(values, requests[values.number]).deliver()
    for form in results.forms:
        matcher = requests[form.number].matcher
        assert matcher is not None, "every rank has a matcher of every form"
        matcher.error, matcher.is_late = form.error, form.is_late
    return {requests[number]: found for number, found in results.sampled.items()}


def _pack(readback: Readback, number: int) -> _Values:
    if isinstance(readback, ScoreReadback):
        return _Values(number, "score", readback.first, (_array(readback.values),))
    if isinstance(readback, ItemTokensReadback):
        tensors = readback.problems, *readback.tokens.tensors
        return _Values(number, "items", readback.first, tuple(map(_array, tensors)))
    values = readback.values
    tensors = (values,) if isinstance(values, Tensor) else values.tensors
    return _Values(number, "prompt", 0, tuple(map(_array, tensors)))


def _unpack(values: _Values, request: Request) -> Readback:
    first, *others = map(_tensor, values.arrays)
    if values.kind == "score":
        return ScoreReadback(request, values.first, first)
    if values.kind == "items":
        return ItemTokensReadback(request, values.first, first, TopLogprobs(*others))
    return PromptReadback(request, TopLogprobs(first, *others) if others else first)


def _array(tensor: Tensor) -> _Array:
    values = tensor.numpy()
    return _Array(values.dtype.str, values.shape, values.tobytes())


def _tensor(array: _Array) -> Tensor:
    values = np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
    return torch.from_numpy(values.copy())
