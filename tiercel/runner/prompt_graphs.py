"""Steps with prompts or items, padded to sizes and replayed from CUDA graphs.

Launching some 11 kernels per layer costs the host more than a small step costs the device: 13 ms
for a prompt of 300 tokens that takes 1.6 ms (0.6 B parameters, H200). A graph runs all layers for a
padded number of tokens, whatever its requests, prefixes and items are. The tokens that each token
attends to are in the model's plan, a table in device memory that is written before each replay
beside ids, positions and slots. Padding belongs to a request without a prefix, whose tokens see
nothing and write nothing.

Graphs are captured before the first request, largest first, two for a size at most: with the keys
of long prefixes cut into parts, and without. Without graphs (TIERCEL_CUDA_GRAPH=0) the same padded
steps run eagerly, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch, PackedItems
from tiercel.engine_config import EngineConfig
from tiercel.models.model import AttentionPlan, Model, PlanBuffer
from tiercel.runner.graph_capture import GraphRecorder
from tiercel.runner.row_state import Rows
from tiercel.runner.step_inputs import (
    MAX_PADDED_REQS,
    PaddedInputs,
    max_padded_reqs,
    padded_lengths,
)

# Products of a layer (tokens x weights) from which a step keeps the device busy for longer than the
# host takes to launch it: 1,424 tokens of 8 B parameters.
_BUSY = 2**38
LARGEST = 4096  # tokens, however few the weights are
_LONG_PREFIX = 1024  # keys, from which on tiles may be cut


def padded_size(num_tokens: int) -> int:
    """Tokens that a step is padded to: 16, 32, by 64 to 512, by 128 to 2048, by 256 above."""
    if num_tokens <= 32:
        return 16 if num_tokens <= 16 else 32
    step = 64 if num_tokens <= 512 else 128 if num_tokens <= 2048 else 256
    return -(-num_tokens // step) * step


def padded_sizes(weights_per_layer: int, max_num_batched_tokens: int) -> list[int]:
    """All sizes that steps of a model are padded to, rising; one alone where steps are smaller."""
    most = min(LARGEST, max(512, _BUSY // weights_per_layer), max_num_batched_tokens)
    sizes = [min(padded_size(1), most)]
    while sizes[-1] < most:
        sizes.append(padded_size(sizes[-1] + 1))
    return sizes


def sizes_for(model: Model, config: EngineConfig) -> list[int]:
    """All sizes that an engine pads steps to, rising.

    None on a CPU, which pads nothing; nor where ranks have prompts of different lengths.
    """
    if config.device.type == "cpu" or config.data_parallel_attention:
        return []
    return padded_sizes(model.weights_per_layer, config.max_num_batched_tokens)


# A size, and the kind of each of the model's plans.
_Key = tuple[int, tuple[Hashable, ...]]


class _Padded(Struct, frozen=True):
    """A size of steps.

    Attributes:
        batch: a step with bounds of any step; the true lengths are in `plans`, or on the device.
        plans: the model's attention metadata.
        graph: runs it, if there are graphs.
    """

    batch: Batch
    plans: Mapping[Hashable, PlanBuffer]
    graph: torch.cuda.CUDAGraph | None


class PromptSteps:
    """Passes steps of any lengths through all layers.

    Attributes:
        largest: tokens of the largest size; 0 on a CPU, which pads nothing.
    """

    def __init__(self, model: Model, rows: Rows, config: EngineConfig) -> None:
        self._model = model
        self._padded: dict[_Key, _Padded] = {}
        self._sizes = sizes_for(model, config)
        self.largest = max(self._sizes, default=0)
        longest = config.max_model_len + config.spec.max_drafts
        self._inputs = PaddedInputs(rows, self.largest, longest)
        # States that graphs leave, in memory of their own: graphs share all other memory.
        self._hidden = torch.empty(
            (self.largest, model.state_width), dtype=model.state_dtype, device=config.device
        )
        self._max_model_len = config.max_model_len

    def __call__(self, batch: Batch) -> Tensor:
        """Enqueue a step.

        Returns:
            (T' >= T, state_width) states, of which those from T on are undefined. They hold until
            the next step is enqueued.
        """
        if batch.num_tokens > self.largest or batch.num_reqs >= MAX_PADDED_REQS:
            return self._model.forward(batch)
        size = min(padded_size(batch.num_tokens), self.largest)
        plans = self._plan(batch.query_lens, batch.context_lens, batch.items, size)
        padded = self._padded.get(_key(size, plans))
        if padded is None:
            return self._model.forward(batch)  # of a kind that `capture` did not see
        self._inputs.write(batch, size)
        if not plans:
            self._inputs.write_lengths(batch, size)
        for key, plan in plans.items():
            padded.plans[key].fill(plan)
        if padded.graph is None:
            self._run(padded.batch, self._model.forward)
        else:
            padded.graph.replay()
        return self._hidden[:size]

    @property
    def num_graphs(self) -> int:
        """The number of graphs that `capture` records."""
        return len(self._possible_plans())

    def capture(
        self,
        recorder: GraphRecorder | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make every size ready, largest first; None: without graphs.

        progress: called with (done, total).
        """
        device, wanted = self._hidden.device, self._possible_plans()
        for done, (key, plans) in enumerate(wanted.items()):
            if progress is not None:
                progress(done, len(wanted))
            size = key[0]
            buffers = {
                name: plan.make_buffer(size, max_padded_reqs(size), device)
                for name, plan in plans.items()
            }
            for name, plan in plans.items():
                buffers[name].fill(plan)
            if not plans:
                self._inputs.clear_lengths(size)
            kept = {name: buffer.plan for name, buffer in buffers.items()}
            step = self._inputs.batch(size, kept)
            self._padded[key] = _Padded(step, buffers, self._record(step, recorder))
        if progress is not None and wanted:  # on a CPU there is none
            progress(len(wanted), len(wanted))

    def _record(self, step: Batch, recorder: GraphRecorder | None) -> torch.cuda.CUDAGraph | None:
        load = partial(self._run, step, self._model.forward_sample)
        if recorder is None:
            load()
            return None
        graph, _ = recorder.record(partial(self._run, step, self._model.forward), load)
        return graph

    def _run(self, step: Batch, forward: Callable[[Batch], Tensor]) -> None:
        self._hidden[: step.num_tokens].copy_(forward(step))

    def _possible_plans(self) -> dict[_Key, Mapping[Hashable, AttentionPlan]]:
        """Plans of requests that fill a size, alone and after prefixes; the largest size first."""
        wanted = {}
        for size in reversed(self._sizes):
            longest = max(size, self._max_model_len)
            for context in (size, min(size + _LONG_PREFIX, longest), longest):
                plans = self._plan((size,), (context,), None, size)
                wanted[_key(size, plans)] = plans
        return wanted

    def _plan(
        self,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        items: PackedItems | None,
        size: int,
    ) -> Mapping[Hashable, AttentionPlan]:
        return self._model.plan(padded_lengths(query_lens, context_lens, items, size))


def _key(size: int, plans: Mapping[Hashable, AttentionPlan]) -> _Key:
    return size, tuple(plan.kind for plan in plans.values())
