"""Which operators of DeepSeek-V4 give a token other bits in a step of many tokens than in its own.

The tokens of a text are computed one by one, and what each operator gives is kept. Then they are
computed in larger steps: each operator's results are compared with those kept, and replaced by
them, so that the next operator has the inputs that it had before. So each operator is judged alone,
and a step shows all that differ. Groups of matrices count as one operator, however many launches
they take: steps of any size make the same calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tests.dsv4_engine import Steps
from tiercel.layers.linear_group import GroupedLinear
from tiercel.models.deepseek_v4_model import DeepseekV4

_WATCHED = {
    "mhc": ("mhc_mix_pre", "mhc_mix_step", "mhc_mix_post", "mhc_mix_collapse"),
    "compressed_attention": ("multiply_group", "latent_rope", "sparse_attention"),
    "latent_cache": ("latent_step_write", "latent_rope"),
    "indexer": ("indexer_topk",),
    "moe": ("multiply_group", "moe_route", "moe_route_hash", "moe_experts"),
}
_LONGEST = 8192  # of sequences in traced steps: one number for all, as in the engine's graphs


@dataclass(slots=True)
class _Trace:
    """Results of a step, and with `expected` the differences from them.

    Attributes:
        expected: of each token, the results of all calls; None: they are kept.
        kept: the results of all calls.
        differing: the first difference of each operator, in words.
        call: number of the next call.
    """

    expected: Sequence[Sequence[Tensor]] | None
    kept: list[Tensor] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    call: int = 0

    def take(self, name: str, result: object) -> None:
        """Keep or judge the tensors of a result; what is written to the cache is compared there."""
        if isinstance(result, list | tuple):
            for part in result:
                self.take(name, part)
        elif result is not None:
            part = result
            assert isinstance(part, Tensor)
            if self.expected is None:
                self.kept.append(part.clone())
            else:
                wanted = torch.cat([token[self.call] for token in self.expected])
                self._judge(name, part, wanted)
                part.copy_(wanted)
            self.call += 1

    def _judge(self, name: str, found: Tensor, wanted: Tensor) -> None:
        assert found.shape == wanted.shape
        if torch.equal(found, wanted) or name in self.differing:
            return
        error = (found.double() - wanted.double()).abs().flatten(1).amax(1)
        rows = error.nonzero().flatten().tolist()
        self.differing[name] = f"call {self.call}, rows {rows[:16]}: {float(error.max()):.1e}"


@contextmanager
def _watched(model: DeepseekV4, trace: _Trace) -> Iterator[None]:
    def watch(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            trace.take(name, result)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place, names in _WATCHED.items():
            module = importlib.import_module(f"tiercel.layers.{place}")
            for name in set(names) & vars(module).keys():  # some are parts of others by now
                patch.setattr(module, name, watch(f"{place}.{name}", getattr(module, name)))
        patch.setattr(GroupedLinear, "__call__", watch("wo_a", GroupedLinear.__call__))
        head = model.draft_head
        for name in () if head is None else ("_embed_proj", "_hidden_proj"):
            patch.setattr(head, name, watch(f"mtp.{name}", getattr(head, name)))
        yield


class TracedText:
    """The tokens of one text after a prompt, computed one by one and then in larger steps."""

    def __init__(
        self, model: DeepseekV4, ids: Sequence[int], num_prompt: int, device: str | torch.device
    ) -> None:
        self._model, self._count = model, len(ids) - num_prompt
        # Prompt kernels multiply what they mask by 0, so unwritten cache is finite.
        self._steps = Steps(model, [ids], device=device, unwritten=0)
        self._steps.step({0: num_prompt})
        self._start = num_prompt
        self._saved = [plane.clone() for _, plane in self._planes()]
        self._expected = [self._step(1, None).kept for _ in range(self._count)]
        self._cache = [plane.view(torch.uint8).clone() for _, plane in self._planes()]

    def differences(self, size: int) -> dict[str, str]:
        """Operators and planes of the cache whose bits differ in steps of `size` tokens."""
        for (_, plane), saved in zip(self._planes(), self._saved, strict=True):
            plane.copy_(saved)
        self._steps.computed[0] = self._start
        found: dict[str, str] = {}
        for first in range(0, self._count, size):
            tokens = self._expected[first : first + size]
            found = self._step(len(tokens), tokens).differing | found
        for (name, plane), other in zip(self._planes(), self._cache, strict=True):
            if not torch.equal(plane.view(torch.uint8), other):
                places = (plane.view(torch.uint8) != other).flatten(2).any(2).nonzero()
                found[name] = f"{len(places)} entries, the first {places[0].tolist()}"
        return found

    @torch.inference_mode()
    def _step(self, count: int, expected: Sequence[Sequence[Tensor]] | None) -> _Trace:
        model, trace = self._model, _Trace(expected)
        with _watched(model, trace):
            batch, hidden = self._steps.step({0: count}, longest=_LONGEST)
            trace.take("streams", hidden)
            trace.take("logits", model.logits(hidden))
            head = model.draft_head
            if head is not None:
                following = replace(batch, input_ids=torch.full_like(batch.input_ids, 7))
                drafted = head.forward(following, hidden)
                trace.take("mtp.streams", drafted)
                trace.take("mtp.logits", head.logits(drafted))
        return trace

    def _planes(self) -> list[tuple[str, Tensor]]:
        return [
            (f"group {group}, layer {layer}, {name}", plane)
            for group, pool in enumerate(self._steps.pools)
            for layer, planes in pool.layers.items()
            for name, plane in planes.items()
        ]
