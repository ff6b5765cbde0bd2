"""Decode steps: one new token a row, or one with drafts to verify, replayed from CUDA graphs.

A step is padded with the scratch row to the next bucket of rows. It runs from the rows' lengths on
the device to their logits: `prepare_step`, all layers, the head. Its addresses are fixed, so a
replay is preceded only by a copy of the row numbers, where they have changed. Sampling follows
eagerly, because its stages depend on what the requests ask. Without graphs (TIERCEL_CUDA_GRAPH=0)
the same padded step runs eagerly, with the same bits.

With a proposer there is a second graph of each size, of whole steps: it goes on to sample, accept,
append and draft anew. It serves rows whose requests ask for nothing but sampled tokens.

A step that verifies drafts gives each row 1 + K positions. Positions after a row's drafts are
padding: their slots are -1, and their results are unused. A CPU, where each position takes time,
pads none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.engine_config import EngineConfig
from tiercel.models.model import Model
from tiercel.ops.prepare_step import StepDrafts
from tiercel.runner.graph_capture import GraphRecorder
from tiercel.runner.row_state import Rows, to_device
from tiercel.runner.sampler import LogitsLayout, Sampler
from tiercel.runner.step_inputs import BatchBuilder
from tiercel.spec.drafter_state import ForwardOutput, Proposer

LARGEST_BUCKET = 256  # rows; larger steps run unpadded and eagerly
# Rows of a step that verifies: with more, products are bound by arithmetic, and drafts gain
# nothing.
LARGEST_VERIFY_BUCKET = 64
_REPLAYS = 4  # of each graph, to time it


class _Captured(Struct, frozen=True):
    """A captured graph with its inputs and results.

    Attributes:
        graph: to replay.
        inputs: (2, B) int32: rows, and the drafts that each may take.
        given: what `inputs` hold, on the host.
        num_drafts: (B,) int32, the drafts that each row takes.
        logits: (B * width, vocab_size) float32, written by each replay.
        output: of the model, if the proposer reads it and the step is not whole.
        results: of a whole step, see `VerifiedStep.results`.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    given: npt.NDArray[np.int32]
    num_drafts: Tensor
    logits: Tensor
    output: ForwardOutput | None
    results: tuple[Tensor, Tensor] | None


class VerifiedStep(Struct, frozen=True):
    """A step of rows that draft; it holds until the next one is enqueued.

    Attributes:
        rows: (B,) int32.
        logits: (L, vocab_size) float32.
        layout: the engine rows of these logits rows.
        propose: makes drafts for `rows`, once their tokens are sampled.
        results: of a whole step, which has sampled and drafted: `Verified.table`, and the `rows`
            of `Rows.drafts`.
    """

    rows: Tensor
    logits: Tensor
    layout: LogitsLayout
    propose: Callable[[], None]
    results: tuple[Tensor, Tensor] | None = None


def buckets(max_num_seqs: int, largest: int = LARGEST_BUCKET) -> list[int]:
    """Sizes that decode steps are padded to: 1, 2, 4, 8, then by 8 to 64, then by 16 to 256."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, LARGEST_BUCKET + 1, 16)]
    last = min(max_num_seqs, largest)
    return [size for size in sizes if size < last] + [last]


class DecodeSteps:
    """Runs one token each of some rows, with drafts or without, up to their logits or further."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        batches: BatchBuilder,
        config: EngineConfig,
        sampler: Sampler,
        proposer: Proposer | None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._proposer = proposer
        self._rows = rows
        self._config = config
        self._batches = batches
        # By rows, positions of each, and whether they are whole steps.
        self._graphs: dict[tuple[int, int, bool], _Captured] = {}
        self._buckets: dict[int, list[int]] = {}
        if config.device.type == "cuda":
            self._buckets[1] = buckets(config.max_num_seqs)
            if config.spec.max_drafts:
                width = 1 + config.spec.max_drafts
                self._buckets[width] = buckets(config.max_num_seqs, LARGEST_VERIFY_BUCKET)
        most = config.max_num_seqs * (1 + config.spec.max_drafts)
        self._indices = torch.arange(most + 1, dtype=torch.int32, device=config.device)
        self._starts = self._indices * (1 + config.spec.max_drafts)  # of rows with drafts
        self._logits = torch.empty(0)  # of the graph that ran last; made by capture

    def __call__(self, rows: Sequence[int], context_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Enqueue a step of single tokens.

        Args:
            rows: engine rows, R.
            context_lens: of each, this token included.

        Returns:
            (B,) int32 rows and (B, vocab_size) float32 logits, B >= R; the first R logits rows
            are those of `rows`, in this order. They hold until the next step is enqueued.
        """
        if not self._buckets:
            return self._run_eager(rows, context_lens)
        size = self.padded(self._batches.most_rows(len(rows)), 1)
        step = self._replay(rows, [0] * len(rows), (size, 1, False), context_lens)
        return step.rows, step.logits

    def _run_eager(self, rows: Sequence[int], context_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A step of single tokens on a CPU, which pads nothing."""
        taken = to_device(np.array(rows, np.int32), self._config.device)
        starts, widths = self._starts_of(len(rows), 1), (1,) * len(rows)
        logits, _ = self._forward(
            taken, starts, None, widths, tuple(context_lens), self._model.forward
        )
        return taken, logits

    def verify(
        self, rows: Sequence[int], most_drafts: Sequence[int], *, is_whole: bool
    ) -> VerifiedStep:
        """Enqueue a step of rows with drafts, whose lengths may be known on the device alone.

        Args:
            rows: engine rows, R.
            most_drafts: the most drafts that each row may take; all 0: single tokens.
            is_whole: whether the step may sample from its logits as they are; it does if it has a
                graph.
        """
        width = 1 + self._config.spec.max_drafts if any(most_drafts) else 1
        if self._config.device.type == "cpu":
            return self._verify_ragged(rows, most_drafts)
        if self._batches.shares is not None:
            width = self._batches.shares.width
        size = self.padded(self._batches.most_rows(len(rows)), width)
        longest = [self._config.max_model_len] * len(rows)
        return self._replay(rows, most_drafts, (size, width, is_whole), longest)

    def single_layout(self, count: int) -> LogitsLayout:
        """The layout of rows with one logits row each and no drafts."""
        starts = self._indices[: count + 1]
        return LogitsLayout(starts, torch.zeros_like(starts[1:]), (1,) * count, (0,) * count)

    @property
    def num_graphs(self) -> int:
        """The number of graphs that `capture` records."""
        return len(self._keys())

    def capture(
        self, recorder: GraphRecorder, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Load what every bucket launches, and record it, largest first.

        progress: called with (done, total).
        """
        keys = self._keys()
        keys.sort(key=lambda key: key[0] * key[1], reverse=True)
        # Shared: logits of their own would be 1.5 GB together at 151,936 tokens of vocabulary.
        shape = (keys[0][0] * keys[0][1], self._model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=self._config.device)
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys))
            self._graphs[key] = self._capture(*key, recorder)
        if progress is not None:
            progress(len(keys), len(keys))

    def verify_costs(self) -> list[tuple[int, float]]:
        """(rows, c) for sizes of steps, by replays: verifying takes longer by the share c."""
        width = 1 + self._config.spec.max_drafts
        sizes = self._buckets.get(width, ()) if self._graphs and width > 1 else ()
        took = {
            (size, each): _replay_ms(self._graphs[size, each, True].graph)
            for size in sizes
            for each in (1, width)
        }
        return [(size, took[size, width] / took[size, 1] - 1.0) for size in sizes]

    def _keys(self) -> list[tuple[int, int, bool]]:
        """The key of each graph: rows, positions of each, and whether it is a whole step."""
        kinds = (False,) if self._proposer is None else (False, True)
        return [
            (size, width, is_whole)
            for width, sizes in self._buckets.items()
            for size in sizes
            for is_whole in kinds
        ]

    def _capture(self, size: int, width: int, is_whole: bool, recorder: GraphRecorder) -> _Captured:
        device = self._config.device
        inputs = torch.zeros((2, size), dtype=torch.int32, device=device)
        inputs[0] = self._rows.scratch
        num_drafts = torch.zeros(size, dtype=torch.int32, device=device)
        lengths = (1,) * size
        logits = self._logits[: size * width]

        def run(
            forward: Callable[[Batch], Tensor] = self._model.forward,
        ) -> tuple[ForwardOutput, tuple[Tensor, Tensor] | None]:
            _, output = self._run(inputs, num_drafts, width, lengths, forward, logits)
            if is_whole:
                return output, self._finish(inputs[0], logits, num_drafts, width, output)
            return output, None

        graph, (output, results) = recorder.record(run, partial(run, self._model.forward_sample))
        # Results that are not kept give their memory to the graphs captured next.
        keeps_output = self._proposer is not None and self._proposer.reads_output and not is_whole
        kept = output if keeps_output else None
        given = np.zeros((2, size), np.int32)
        given[0] = self._rows.scratch
        return _Captured(graph, inputs, given, num_drafts, logits, kept, results)

    def _finish(
        self, rows: Tensor, logits: Tensor, num_drafts: Tensor, width: int, output: ForwardOutput
    ) -> tuple[Tensor, Tensor]:
        """Sample, accept, append and draft anew; see `VerifiedStep.results`."""
        starts = self._starts_of(rows.shape[0], width)
        verified = self._sampler.accept(logits, rows, starts, num_drafts)
        self._propose(rows, output)
        return verified.table, self._rows.drafts.draft_ids.index_select(0, rows)

    def _starts_of(self, size: int, width: int) -> Tensor:
        """The first logits row of each of some rows with equally many positions."""
        return (self._indices if width == 1 else self._starts)[: size + 1]

    def _propose(self, rows: Tensor, output: ForwardOutput | None) -> None:
        assert self._proposer is not None, "rows draft only with a proposer"
        self._proposer.propose(rows, output if self._proposer.reads_output else None)

    def joint_size(self, most_rows: int, has_drafts: bool) -> tuple[int, int] | None:
        """Rows, and positions of each, of a pass of up to `most_rows` on every rank.

        None on a CPU, which pads nothing.
        """
        if not self._buckets:
            return None
        width = 1 + self._config.spec.max_drafts if has_drafts else 1
        return self.padded(most_rows, width), width

    def padded(self, count: int, width: int = 1) -> int:
        """Rows of a step of `count` with `width` positions each: as many, or the next bucket."""
        return next((size for size in self._buckets.get(width, ()) if size >= count), count)

    def _replay(
        self,
        rows: Sequence[int],
        most_drafts: Sequence[int],
        key: tuple[int, int, bool],
        context_lens: Sequence[int],
    ) -> VerifiedStep:
        """Enqueue a step of `key`: rows, positions of each, and whether a graph runs it whole."""
        size, width, _ = key
        starts = self._starts_of(size, width)
        widths, planned = (width,) * len(rows), tuple(most_drafts)
        padding = size - len(rows)
        host = np.zeros((2, size), np.int32)
        host[0] = [*rows, *[self._rows.scratch] * padding]
        host[1, : len(rows)] = most_drafts
        captured = self._graphs.get(key)
        if captured is None:
            inputs = to_device(host, self._config.device)
            num_drafts = torch.zeros(size, dtype=torch.int32, device=inputs.device)
            lengths = (*context_lens, *(1,) * padding)
            forward = self._model.forward
            logits, output = self._run(inputs, num_drafts, width, lengths, forward)
            return VerifiedStep(
                inputs[0],
                logits,
                LogitsLayout(starts, num_drafts, widths, planned),
                partial(self._propose, inputs[0], output),
            )
        # Usually these are the rows of the step before: a copy takes 8 us of the device's time.
        if not np.array_equal(host, captured.given):
            captured.inputs.copy_(to_device(host, self._config.device))
            captured.given[:] = host
        captured.graph.replay()
        return VerifiedStep(
            captured.inputs[0],
            captured.logits,
            LogitsLayout(starts, captured.num_drafts, widths, planned),
            partial(self._propose, captured.inputs[0], captured.output),
            captured.results,
        )

    def _verify_ragged(self, rows: Sequence[int], most_drafts: Sequence[int]) -> VerifiedStep:
        """The step on a CPU: lengths can be read, and no position is padding."""
        on_device = torch.tensor(rows, dtype=torch.int32)
        made = self._rows.drafts.draft_ids[:, 0].index_select(0, on_device)
        num_drafts = made.minimum(torch.tensor(most_drafts, dtype=torch.int32))
        widths = tuple((num_drafts + 1).tolist())
        starts = torch.tensor([0, *widths]).cumsum(0).int()
        drafts = StepDrafts(self._rows.drafts.draft_ids, num_drafts)
        forward = self._model.forward
        logits, output = self._forward(on_device, starts, drafts, widths, None, forward)
        layout = LogitsLayout(starts, num_drafts, widths, tuple(most_drafts))
        return VerifiedStep(on_device, logits, layout, partial(self._propose, on_device, output))

    def _run(
        self,
        inputs: Tensor,
        num_drafts: Tensor,
        width: int,
        context_lens: tuple[int, ...],
        forward: Callable[[Batch], Tensor],
        logits: Tensor | None = None,
    ) -> tuple[Tensor, ForwardOutput]:
        """Logits of all positions of a step whose rows have equally many.

        num_drafts: set if the step has drafts; `logits`: where they go; None for a new tensor.
        """
        rows, count = inputs[0], inputs.shape[1]
        if width == 1:
            starts = self._starts_of(count, width)
            return self._forward(rows, starts, None, (1,) * count, context_lens, forward, logits)
        drafts = self._rows.drafts.draft_ids
        torch.minimum(drafts[:, 0].index_select(0, rows), inputs[1], out=num_drafts)
        taken = StepDrafts(drafts, num_drafts)
        starts = self._starts_of(count, width)
        widths = (width,) * count
        return self._forward(rows, starts, taken, widths, context_lens, forward, logits)

    def _forward(
        self,
        rows: Tensor,
        starts: Tensor,
        drafts: StepDrafts | None,
        widths: tuple[int, ...],
        context_lens: tuple[int, ...] | None,
        forward: Callable[[Batch], Tensor],
        logits: Tensor | None = None,
    ) -> tuple[Tensor, ForwardOutput]:
        config = self._config
        is_cpu = config.device.type == "cpu"
        batch = self._batches.build(
            rows,
            starts,
            self._indices[: sum(widths)],
            widths,
            context_lens,
            drafts=drafts,
            # A graph serves every length; the attention kernel's result does not depend on the
            # bound.
            max_seq_len=None if is_cpu else config.max_model_len + max(widths) - 1,
        )
        hidden = forward(batch)
        output = ForwardOutput(batch, hidden, widths[0] if len(set(widths)) == 1 else None)
        return self._model.logits(hidden, out=logits), output


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of the fastest of some replays, without the launch of the first."""
    times: list[float] = []
    for _ in range(_REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return min(times)
