"""How a plan becomes device tensors and token ids.

Only what is common to every model may enter this file: it knows rows, blocks and lengths, but no
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.cache.pool import CachePool
from tiercel.engine.config import EngineConfig
from tiercel.engine.request import Request
from tiercel.engine.sampler import Sampled, Sampler, top_logprobs
from tiercel.engine.scheduler import ScheduledRow, SchedulerOutput
from tiercel.models.decoder import Decoder

# Rows of logits computed at once where prompt places are read: 50 MB each at 49,152 tokens of
# vocabulary.
LOGITS_SLICE = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """A step under way: whose rows it samples, and the logits they are drawn from."""

    sampling: tuple[Request, ...]
    logits: Tensor


class ModelRunner:
    """Runs plans on one device."""

    def __init__(
        self, model: Decoder, pool: CachePool, sampler: Sampler, config: EngineConfig
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.config = config
        self.pool = pool
        self._max_blocks = -(-config.max_model_len // config.block_size)
        self._block_tables = torch.zeros(
            (1, config.max_num_seqs, self._max_blocks), dtype=torch.int32, device=config.device
        )
        model.bind_cache(pool)

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> Launch:
        """Run the model over a plan, up to the logits that tokens are drawn from."""
        batch = self._prepare(plan.scheduled)
        hidden = self.model.forward(batch)
        place = 0
        for row in plan.scheduled:
            if row.request.reads_prompt:
                self._read_prompt(row, hidden, place)
            place += row.num_query
        sampling = tuple(row.request for row in plan.scheduled if row.samples)
        return Launch(sampling, self.model.logits(hidden, batch.logits_rows))

    @torch.inference_mode()
    def collect(self, launch: Launch) -> Sampled:
        """Draw the tokens of a launched step and bring them to the host."""
        if not launch.sampling:
            return Sampled([], [], [])
        return self.sampler(launch.logits, launch.sampling)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Write zeros over blocks."""
        ids = self._upload(block_ids, torch.int64)
        for planes in self.pool.layers:
            for plane in planes.values():
                plane.index_fill_(0, ids, 0)

    def _prepare(self, scheduled: Sequence[ScheduledRow]) -> Batch:
        """Build the step's tensors from the host's lists."""
        config = self.config
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        cu_seqlens = [0]
        for row in scheduled:
            request, stop = row.request, row.start + row.num_query
            ids += request.tokens(row.start, stop)
            places = range(row.start, stop)
            positions += places
            blocks, size = request.block_ids, config.block_size
            slots += [blocks[place // size] * size + place % size for place in places]
            cu_seqlens.append(len(ids))
            if row.samples:
                logits_rows.append(len(ids) - 1)
        self._write_tables(scheduled)
        seq_lens = tuple(row.start + row.num_query for row in scheduled)
        query_lens = tuple(row.num_query for row in scheduled)
        return Batch(
            input_ids=self._upload(ids),
            positions=self._upload(positions),
            cu_seqlens_q=self._upload(cu_seqlens),
            seq_lens=self._upload(seq_lens),
            rows=self._upload([row.request.row for row in scheduled]),
            logits_rows=self._upload(logits_rows),
            slot_mapping=self._upload(slots, torch.int64).unsqueeze(0),
            block_tables=self._block_tables,
            query_lens=query_lens,
            context_lens=seq_lens,
            num_tokens=len(ids),
            num_reqs=len(scheduled),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )

    def _write_tables(self, scheduled: Sequence[ScheduledRow]) -> None:
        """Bring the block tables of this step's rows up to date."""
        size = self.config.block_size
        for row in scheduled:
            first, stop = row.start // size, -(-(row.start + row.num_query) // size)
            if row.enters:
                first = 0  # blocks of the prefix cache lie before what is computed
            elif row.start % size and stop == first + 1:
                continue  # the step stays in a block that is in the table already
            ids = self._upload(row.request.block_ids[first:stop])
            self._block_tables[0, row.request.row, first:stop] = ids

    def _upload(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        if self.config.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.config.device, non_blocking=True)

    def _read_prompt(self, row: ScheduledRow, hidden: Tensor, place: int) -> None:
        """Keep logits or log-probabilities of the prompt places in this chunk."""
        request = row.request
        last = min(row.start + row.num_query, len(request.prompt_token_ids))
        for start in range(row.start, last, LOGITS_SLICE):
            stop = min(start + LOGITS_SLICE, last)
            rows = torch.arange(
                place + start - row.start,
                place + stop - row.start,
                device=hidden.device,
                dtype=torch.int32,
            )
            logits = self.model.logits(hidden, rows)
            if request.wants_logits:
                request.prompt_logits.append(logits.cpu())
                continue
            following = request.prompt_token_ids[start + 1 : stop + 1]  # none after the last place
            request.prompt_logprobs += top_logprobs(
                logits[: len(following)], following, request.params.prompt_logprobs or 0
            )
