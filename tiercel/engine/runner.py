"""How a plan becomes device tensors and token ids.

Only what is common to every model may enter this file: it knows rows, blocks and lengths, but no
layer. `launch` enqueues a whole step and returns: staged writes, inputs, the model, the draw, and
copies of the results to pinned memory. `collect` waits for those copies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.cache.pool import CachePool
from tiercel.engine.config import EngineConfig
from tiercel.engine.copies import HostCopies
from tiercel.engine.faults import Faults
from tiercel.engine.graphs import LARGEST_BUCKET, DecodeSteps
from tiercel.engine.packed_items import PackedStep, pack_items
from tiercel.engine.prompt_graphs import PromptSteps
from tiercel.engine.prompt_reads import PromptPiece, read_prompt
from tiercel.engine.request import Request
from tiercel.engine.rows import Rows, lists_to_device, to_device
from tiercel.engine.sampler import DeviceSample, Sampled, Sampler, host_result
from tiercel.engine.scheduler import ScheduledRow, SchedulerOutput
from tiercel.engine.score_reads import ScorePiece, read_scores
from tiercel.models.decoder import Decoder
from tiercel.ops.prepare_step import prepare_step

Piece = PromptPiece | ScorePiece


@dataclass(frozen=True, slots=True)
class Launch:
    """A step under way: whose rows it samples, and its results on their way to the host."""

    sampling: tuple[Request, ...]
    sample: DeviceSample | None
    pieces: tuple[Piece, ...]
    copies: HostCopies


class ModelRunner:
    """Runs plans on one device."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        sampler: Sampler,
        config: EngineConfig,
    ) -> None:
        self.model = model
        self.faults = Faults()  # none; whoever tests what the engine survives sets others
        self.pools: Sequence[CachePool] = ()
        self.rows = rows
        self.sampler = sampler
        self.config = config
        self.decode_steps = DecodeSteps(model, rows, config)
        self.prompt_steps = PromptSteps(model, rows, config)
        is_cuda = config.device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(config.device) if is_cuda else None

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Launch:
        """Enqueue a step."""
        self._write_rows(plan)
        parts = plan.scheduled
        sampling = tuple(part.request for part in parts if part.samples)
        pieces: list[Piece] = []
        if all(_is_decode(part) for part in parts):
            lengths = [part.start + 1 for part in parts]
            rows, logits = self.decode_steps([part.row for part in parts], lengths)
        else:
            rows, logits = self._run_mixed(parts, pieces)
        self.faults.on_logits(plan.step_id, logits, [part.row for part in parts if part.samples])
        sample = self.sampler(logits, sampling, rows) if sampling else None
        return self._bring_home(sampling, sample, pieces)

    def collect(self, launch: Launch) -> Sampled:
        """Wait for the results of a launched step; prompt places go to their requests."""
        launch.copies.wait()
        for piece in launch.pieces:
            piece.deliver()
        return host_result(launch.sample, launch.sampling)

    def bind_pools(self, pools: Sequence[CachePool]) -> None:
        """Take the memory of the cache; before, only scratch rows may run."""
        self.pools = pools
        self.model.bind_cache(pools)

    @torch.inference_mode()
    def run_scratch(self, query_lens: Sequence[int]) -> None:
        """Run a step of scratch rows, which reads the null block and writes nothing.

        query_lens: new tokens of each.
        """
        ends = np.cumsum([0, *query_lens])
        scratch = [self.rows.scratch] * len(query_lens)
        rows, starts, drawn = lists_to_device((scratch, ends, ends[1:] - 1), self.config.device)
        batch = self._batch(query_lens, query_lens, rows, starts, drawn)
        logits = self.model.logits(self.model.forward(batch), batch.logits_rows)
        self.sampler(logits, (), rows)

    def measure_steps(self) -> int:
        """Run the largest steps once; bytes that they need beside weights and cache, 0 on a CPU.

        This also compiles what they need, so that nothing compiles at the first request.
        """
        config = self.config
        if config.device.type != "cuda":
            return 0
        longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
        chunks = [longest] * (config.max_num_batched_tokens // longest)
        captured = [[1] * min(config.max_num_seqs, LARGEST_BUCKET)]
        captured += [[size] for size in self.prompt_steps.sizes[-1:]]
        peaks = []
        for query_lens in (*captured, [min(64, longest)], chunks):
            before = torch.cuda.memory_allocated(config.device)
            torch.cuda.reset_peak_memory_stats(config.device)
            self.run_scratch(query_lens)
            peaks.append(torch.cuda.max_memory_allocated(config.device) - before)
        torch.cuda.empty_cache()
        # Graphs keep memory of their own; eager steps share the rest.
        return max(peaks) + (sum(peaks[: len(captured)]) if config.cuda_graphs else 0)

    def _write_rows(self, plan: SchedulerOutput) -> None:
        """Bring the rows up to date with what the host decided."""
        rows = self.rows
        for part in plan.scheduled:
            if part.enters:
                request = part.request
                known = request.num_tokens
                rows.stage(rows.token_ids, (part.row, 0), request.tokens(0, known))
                rows.stage(rows.num_tokens, (part.row,), [known])
                rows.stage(rows.num_computed, (part.row,), [part.start])
                self.sampler.enter(request)
        for row, write in plan.new_blocks:
            place = (write.group, row, write.start)
            rows.stage(rows.block_tables, place, write.block_ids)
        rows.apply()
        for pool, block_ids in zip(self.pools, plan.unsound_blocks, strict=True):
            if block_ids:
                self._clear(pool, block_ids)

    def _clear(self, pool: CachePool, block_ids: Sequence[int]) -> None:
        ids = to_device(np.array(block_ids, np.int64), self.config.device)
        for planes in pool.layers.values():
            for plane in planes.values():
                plane.index_fill_(0, ids, 0)

    def _run_mixed(
        self, parts: Sequence[ScheduledRow], pieces: list[Piece]
    ) -> tuple[Tensor, Tensor]:
        """Run chunks and single tokens together; rows and logits of those that sample."""
        lengths = [part.num_tokens for part in parts]
        ends = np.cumsum([0, *lengths])
        rows = [part.row for part in parts]
        drawn = [i for i, part in enumerate(parts) if part.samples]
        lines = [ends[i + 1] - 1 for i in drawn]
        there, starts, lines_there, drawn_there = lists_to_device(
            (rows, ends, lines, [rows[i] for i in drawn]), self.config.device
        )
        context_lens = [part.start + part.num_tokens for part in parts]
        hidden = None
        packed = pack_items(parts) if any(part.items for part in parts) else None
        if packed is None:
            hidden = self.prompt_steps(rows, lengths, context_lens)
        if hidden is None:
            batch = self._batch(lengths, context_lens, there, starts, lines_there, packed)
            hidden = self.model.forward(batch)
        for part, place in zip(parts, ends[:-1].tolist(), strict=True):
            if part.request.reads_prompt:
                pieces += read_prompt(self.model, part, hidden, place)
            if part.has_scores:
                pieces += read_scores(self.model, part, hidden, place, self.sampler.is_banned)
        return drawn_there, self.model.logits(hidden, lines_there)

    def _batch(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        rows: Tensor,
        starts: Tensor,
        logits_rows: Tensor,
        packed: PackedStep | None = None,
    ) -> Batch:
        state, device = self.rows, self.config.device
        inputs = prepare_step(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            rows,
            starts if packed is None else to_device(packed.cached_starts, device),
            sum(query_lens) if packed is None else int(packed.cached_starts[-1]),
            self.config.block_size,
        )
        if packed is not None:
            inputs = packed.merged(inputs)
        return Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            cu_seqlens_q=starts,
            seq_lens=inputs.seq_lens,
            rows=rows,
            logits_rows=logits_rows,
            slot_mapping=inputs.slot_mapping,
            block_tables=state.block_tables,
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            num_tokens=sum(query_lens),
            num_reqs=len(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(context_lens),
            items=None if packed is None else packed.items,
        )

    def _bring_home(
        self,
        sampling: tuple[Request, ...],
        sample: DeviceSample | None,
        pieces: Sequence[Piece],
    ) -> Launch:
        copies = HostCopies(self._copy_stream)
        if sample is not None:
            sample = sample.copied(copies)
        arriving = tuple(piece.copied(copies) for piece in pieces)
        copies.finish()
        return Launch(sampling, sample, arriving, copies)


def _is_decode(part: ScheduledRow) -> bool:
    """Whether a part is one token of an answer, or of a prompt that nobody reads."""
    return part.num_query == 1 and part.samples and not _reads(part)


def _reads(part: ScheduledRow) -> bool:
    return part.request.reads_prompt and part.start < len(part.request.prompt_token_ids)
