"""How a plan becomes device tensors and token ids.

Only what is common to every model may enter this file: it knows rows, blocks and lengths, but no
layer. `launch` enqueues a whole step and returns: staged writes, inputs, the model, sampling, and
copies of the results to pinned memory. `collect` waits for those copies alone.

A step of prompts and of rows with drafts runs the model twice. The lengths of rows with drafts are
known on the device alone, while tiles of prompts are planned on the host from exact lengths; and
the pass over rows with drafts replays a graph of fixed addresses, which one pass over both would
give up. A step of prompts and single tokens is one pass: there the host knows all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.cache.pool import CachePool
from tiercel.engine_config import EngineConfig
from tiercel.faults import Faults
from tiercel.models.model import Model
from tiercel.request.request import Request
from tiercel.runner.decode_graphs import (
    LARGEST_BUCKET,
    LARGEST_VERIFY_BUCKET,
    DecodeSteps,
    VerifiedStep,
)
from tiercel.runner.graph_capture import GRAPH_BYTES
from tiercel.runner.host_copies import HostCopies
from tiercel.runner.joint_step import StepShape
from tiercel.runner.packed_items import pack_items
from tiercel.runner.prompt_graphs import PromptSteps
from tiercel.runner.prompt_readback import PromptReadback, read_prompt
from tiercel.runner.row_state import Rows, lists_to_device, to_device
from tiercel.runner.sampler import Sampler, is_plain
from tiercel.runner.sampler_output import SampledTokens, SamplerOutput, read_sampler_output
from tiercel.runner.score_readback import (
    ItemTokensReadback,
    ScoreReadback,
    read_item_tokens,
    read_scores,
)
from tiercel.runner.step_inputs import BatchBuilder
from tiercel.scheduler.plan import ScheduledRow, SchedulerOutput
from tiercel.spec.drafter_state import ForwardOutput, Proposer

Readback = PromptReadback | ScoreReadback | ItemTokensReadback


class SampledRequests(Struct, frozen=True):
    """Results of requests that were sampled together, on the device or on their way to the host.

    Attributes:
        requests: whose tokens were sampled.
        output: the results.
        widths: logits rows of each request; none: one each.
    """

    requests: tuple[Request, ...]
    output: SamplerOutput
    widths: tuple[int, ...] = ()

    def to_host(self, copies: HostCopies) -> SampledRequests:
        """The same values on the host, once `copies` have been waited for."""
        return SampledRequests(self.requests, self.output.to_host(copies), self.widths)


class Launch(Struct, frozen=True):
    """A step under way, with its results on their way to the host."""

    sampled: tuple[SampledRequests, ...]
    readbacks: tuple[Readback, ...]
    copies: HostCopies


class ModelRunner:
    """Runs plans on one device."""

    def __init__(
        self,
        model: Model,
        rows: Rows,
        sampler: Sampler,
        config: EngineConfig,
        batches: BatchBuilder,
        proposer: Proposer | None = None,
    ) -> None:
        self.model = model
        self.proposer = proposer
        self.faults = Faults()  # none; tests of what the engine survives set others
        self.pools: Sequence[CachePool] = ()
        self.rows = rows
        self.sampler = sampler
        self.config = config
        self._batches = batches
        self.decode_steps = DecodeSteps(model, rows, self._batches, config, sampler, proposer)
        self.prompt_steps = PromptSteps(model, rows, config)
        is_cuda = config.device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(config.device) if is_cuda else None

    def watch(self, pulse: Callable[[], None]) -> None:
        """Let steps call `pulse` when they have advanced, on a CPU, where a launch computes.

        A GPU computes its layers after the host has gone on; there `collect` returns.
        """
        if self.config.device.type == "cpu":
            self.model.pulse = pulse

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Launch:
        """Enqueue a step."""
        parts = plan.scheduled
        drafts = any(part.request.draft_limit for part in parts)
        return self._launch(plan, parts, StepShape(drafts, not all(p.is_answer for p in parts)))

    def _launch(
        self, plan: SchedulerOutput, parts: Sequence[ScheduledRow], shape: StepShape
    ) -> Launch:
        """Enqueue the passes of a step over `parts`, those of the plan, and rows of scratch."""
        self._enter_device()
        self._write_rows(plan)
        self.faults.slow_down(plan.step_id, plan.num_tokens, self.model.pulse)
        readbacks: list[Readback] = []
        run = self._run_drafting if shape.drafts else self._run_plain
        sampled = run(plan.step_id, parts, shape, readbacks)
        copies = HostCopies(self._copy_stream)
        tokens = tuple(entry.to_host(copies) for entry in sampled)
        values = tuple(readback.to_host(copies) for readback in readbacks)
        copies.finish()
        return Launch(tokens, values, copies)

    def collect(self, launch: Launch) -> dict[Request, SampledTokens]:
        """Wait for a launched step; returns the sampled tokens of each request.

        Values read from prompts go to their requests.
        """
        launch.copies.wait()
        for readback in launch.readbacks:
            readback.deliver()
        return {
            request: tokens
            for sampled in launch.sampled
            for request, tokens in zip(
                sampled.requests,
                read_sampler_output(sampled.output, sampled.requests, sampled.widths),
                strict=True,
            )
        }

    def bind_pools(self, pools: Sequence[CachePool]) -> None:
        """Take the memory of the cache; before, only scratch rows may run."""
        self.pools = pools
        self.model.bind_cache(pools)

    @torch.inference_mode()
    def run_scratch(self, query_lens: Sequence[int]) -> None:
        """Launch a step of scratch rows, which reads the null block and writes nothing.

        query_lens: new tokens of each row.
        """
        self._enter_device()
        self._batches.shares = None
        ends = np.cumsum([0, *query_lens])
        scratch = [self.rows.scratch] * len(query_lens)
        rows, starts, last = lists_to_device((scratch, ends, ends[1:] - 1), self.config.device)
        batch = self._batches.build(rows, starts, last, query_lens, query_lens)
        logits = self.model.logits(self.model.forward_sample(batch), batch.logits_rows)
        self.sampler(logits, (), rows)

    def measure_steps(self) -> int:
        """Launch the largest steps; returns the bytes that they need beside weights and cache.

        Returns 0 on a CPU. This also compiles their kernels, so that nothing compiles at the first
        request.
        """
        config = self.config
        if config.device.type != "cuda":
            return 0
        longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
        chunks = [longest] * (config.max_num_batched_tokens // longest)
        graphed = [[1] * min(config.max_num_seqs, LARGEST_BUCKET)]
        if config.spec.max_drafts:
            width = 1 + config.spec.max_drafts
            graphed.append([width] * min(config.max_num_seqs, LARGEST_VERIFY_BUCKET))
        num_whole, rest = divmod(self.prompt_steps.largest, longest)
        graphed.append([longest] * num_whole + [rest] * (rest > 0))
        peaks = []
        for query_lens in (*graphed, [min(64, longest)], chunks):
            before = torch.cuda.memory_allocated(config.device)
            torch.cuda.reset_peak_memory_stats(config.device)
            self.run_scratch(query_lens)
            peaks.append(torch.cuda.max_memory_allocated(config.device) - before)
        torch.cuda.empty_cache()
        if not config.cuda_graphs:
            return max(peaks)
        # Graphs keep memory of their own; eager steps share the remaining memory.
        num_graphs = self.decode_steps.num_graphs + self.prompt_steps.num_graphs
        return max(peaks) + max(peaks[: len(graphed)]) + GRAPH_BYTES * num_graphs

    def _enter_device(self) -> None:
        """Make the device that of this thread, as Triton launches need; models take turns in it."""
        if self._copy_stream is not None:
            torch.cuda.set_device(self.config.device)

    def _write_rows(self, plan: SchedulerOutput) -> None:
        """Apply the plan's changes to the device's rows and block tables."""
        rows = self.rows
        for part in plan.scheduled:
            if part.enters:
                request = part.request
                known = request.num_tokens
                rows.stage(rows.token_ids, (part.row, 0), request.tokens(0, known))
                rows.stage(rows.num_tokens, (part.row,), [known])
                rows.stage(rows.num_computed, (part.row,), [part.start])
                if self.proposer is not None:
                    rows.enter_drafts(request)
                self.sampler.enter(request)
        for row, write in plan.new_blocks:
            place = (write.group, row, write.start)
            rows.stage(rows.block_tables, place, write.block_ids)
        rows.apply()
        if self.proposer is not None:
            entering = [part for part in plan.scheduled if part.enters]
            longest = max((part.request.num_tokens for part in entering), default=0)
            self.proposer.enter([part.row for part in entering], longest)
        for pool, block_ids in zip(self.pools, plan.unsound_blocks, strict=True):
            if block_ids:
                self._clear(pool, block_ids)

    def _clear(self, pool: CachePool, block_ids: Sequence[int]) -> None:
        ids = to_device(np.array(block_ids, np.int64), self.config.device)
        for planes in pool.layers.values():
            for plane in planes.values():
                plane.index_fill_(0, ids, 0)

    def _run_plain(
        self,
        step_id: int,
        parts: Sequence[ScheduledRow],
        shape: StepShape,
        readbacks: list[Readback],
    ) -> list[SampledRequests]:
        """Run a step of which no row drafts."""
        self._batches.shares = shape.answers
        sampling = tuple(part.request for part in parts if part.samples)
        output = None
        if not shape.is_mixed:
            lengths = [part.start + 1 for part in parts]
            rows, logits = self.decode_steps([part.row for part in parts], lengths)
        else:
            rows, logits, output = self._run_mixed(parts, readbacks, self.decode_steps.padded)
        self.faults.on_logits(step_id, logits, [request.row for request in sampling])
        sampled = []
        if sampling:
            sampled.append(SampledRequests(sampling, self.sampler(logits, sampling, rows)))
        if output is not None and self.proposer is not None and self.proposer.reads_output:
            # A later request that finds these blocks in the prefix cache may draft.
            self.proposer.update_cache(output)
        return sampled

    def _run_drafting(
        self,
        step_id: int,
        parts: Sequence[ScheduledRow],
        shape: StepShape,
        readbacks: list[Readback],
    ) -> list[SampledRequests]:
        """Run a step with rows that draft: answers, then chunks of prompts (see the module)."""
        assert self.proposer is not None, "rows draft only with a proposer"
        answers = [part for part in parts if part.is_answer]
        chunks = [part for part in parts if not part.is_answer]
        sampled = []
        if answers:
            self._batches.shares = shape.answers
            requests = tuple(part.request for part in answers)
            step = self.decode_steps.verify(
                [part.row for part in answers],
                [part.num_drafts for part in answers],
                is_whole=all(map(is_plain, requests)) and not self.faults.faults,
            )
            sampled.append(self._sample(step_id, requests, step))
        if chunks:
            self._batches.shares = shape.chunks
            requests = tuple(part.request for part in chunks if part.samples)
            rows, logits, output = self._run_mixed(chunks, readbacks, lambda count: count)
            seen = output if self.proposer.reads_output else None
            if requests:
                layout = self.decode_steps.single_layout(len(requests))
                propose = partial(self.proposer.propose, rows, seen)
                step = VerifiedStep(rows, logits, layout, propose)
                sampled.append(self._sample(step_id, requests, step))
            elif seen is not None:
                self.proposer.update_cache(seen)
        return sampled

    def _sample(
        self, step_id: int, requests: tuple[Request, ...], step: VerifiedStep
    ) -> SampledRequests:
        """Sample, and draft the tokens that may follow, unless the step has done so."""
        widths = step.layout.widths
        if step.results is not None:
            # A tensor of its own: the next replay may begin before the copy to the host is done.
            output = SamplerOutput(table=torch.cat(step.results, 1))
            return SampledRequests(requests, output, widths)
        engine_rows = [r.row for r, w in zip(requests, widths, strict=True) for _ in range(w)]
        self.faults.on_logits(step_id, step.logits, engine_rows)
        output = self.sampler(step.logits, requests, step.rows, step.layout)
        assert output.table is not None, "there is a layout"
        step.propose()
        made = self.rows.drafts.draft_ids.index_select(0, step.rows)
        joined = torch.cat((output.table, made), 1)
        return SampledRequests(requests, replace(output, table=joined), widths)

    def _run_mixed(
        self, parts: Sequence[ScheduledRow], readbacks: list[Readback], padded: Callable[[int], int]
    ) -> tuple[Tensor, Tensor, ForwardOutput]:
        """Run chunks and single tokens together.

        Args:
            parts: of the step.
            readbacks: takes what is read of prompts and items.
            padded: the number of logits rows to make for a number of rows that sample; those of
                scratch follow.

        Returns:
            Rows and logits of the parts that sample, and the model's output.
        """
        lengths = [part.num_tokens for part in parts]
        ends = np.cumsum([0, *lengths])
        rows = [part.row for part in parts]
        sampling = [i for i, part in enumerate(parts) if part.samples]
        missing = padded(len(sampling)) - len(sampling) if sampling else 0
        logits_rows = [*(ends[i + 1] - 1 for i in sampling), *[0] * missing]
        sampling_rows = [*(rows[i] for i in sampling), *[self.rows.scratch] * missing]
        rows_there, starts, logits_there, sampling_there = lists_to_device(
            (rows, ends, logits_rows, sampling_rows), self.config.device
        )
        context_lens = [part.start + part.num_tokens for part in parts]
        packed = pack_items(parts) if any(part.items for part in parts) else None
        batch = self._batches.build(
            rows_there, starts, logits_there, lengths, context_lens, packed=packed
        )
        hidden = self.prompt_steps(batch)[: batch.num_tokens]  # without the padding
        for part, place in zip(parts, ends[:-1].tolist(), strict=True):
            if part.request.reads_prompt:
                readbacks += read_prompt(self.model, part, hidden, place)
            if part.has_scores:
                readbacks += self._read_items(part, hidden, place)
        output = ForwardOutput(batch, hidden, None, tuple(sampling))
        return sampling_there, self.model.logits(hidden, batch.logits_rows), output

    def _read_items(self, part: ScheduledRow, hidden: Tensor, place: int) -> Sequence[Readback]:
        """Read the scores, or the sampled items, of a part of a step."""
        task = part.request.score
        if task is not None and task.sample_keys is not None:
            return read_item_tokens(self.model, part, hidden, place, self.sampler)
        return read_scores(self.model, part, hidden, place, self.sampler.is_banned)
