"""The loop: admit, schedule, launch, collect, emit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch

from tiercel.cache.allocator import BlockAllocator
from tiercel.cache.pool import CachePool
from tiercel.cache.prefix import PrefixCache
from tiercel.engine.config import EngineConfig
from tiercel.engine.memory import available_bytes, cache_blocks, check_weights_fit
from tiercel.engine.request import Request, Status
from tiercel.engine.runner import ModelRunner
from tiercel.engine.sampler import Sampled, Sampler
from tiercel.engine.scheduler import Scheduler, SchedulerOutput
from tiercel.errors import OutOfMemoryError
from tiercel.loader.mapped import TensorInfo
from tiercel.models import registry
from tiercel.models.source import ModelSource
from tiercel.models.weights import WeightReader
from tiercel.ops.linear import select_form
from tiercel.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step did for one request: its new tokens; the request knows whether it finished."""

    request: Request
    new_token_ids: tuple[int, ...]


class Engine:
    """Runs requests together over one model and one cache."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, config: EngineConfig) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.config = config

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OutOfMemoryError: it could never fit the cache.
        """
        allocator = self.scheduler.allocator
        limit = (allocator.num_blocks - 1) * self.config.block_size
        needed = len(request.prompt_token_ids) + request.max_tokens
        if needed > limit:
            raise OutOfMemoryError(
                f"prompt and answer need {needed} tokens of cache but it holds {limit}.",
                hint="Lower max_tokens or shorten the prompt.",
            )
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request in any state; nothing happens if it has finished."""
        self.scheduler.finish(request, "abort")

    def step(self) -> list[RequestUpdate]:
        """Run one step and return what it did."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.has_work, "submit admits only what fits an empty cache"
            return []
        return self._commit(plan, self.runner.collect(self.runner.launch(plan)))

    def _commit(self, plan: SchedulerOutput, sampled: Sampled) -> list[RequestUpdate]:
        requests = [row.request for row in plan.scheduled if row.samples]
        pairs = zip(requests, sampled.problems, strict=True)
        unsound = {request.row for request, problem in pairs if problem is not None}
        for row in plan.scheduled:
            self.scheduler.commit(row, is_sound=row.request.row not in unsound)
        updates = []
        results = zip(requests, sampled.token_ids, sampled.problems, sampled.logprobs, strict=True)
        for request, token_id, problem, logprobs in results:
            problem = problem or _prompt_problem(request)
            if problem is not None:
                # NaN in a block would reach its next owner: unseen slots are multiplied by 0.
                self.runner.clear_blocks(self.scheduler.discard(request))
                self.scheduler.finish(request, "error", problem)
                updates.append(RequestUpdate(request, ()))
                continue
            if request.max_tokens == 0:  # only its prompt was asked for
                self.scheduler.finish(request, "length")
                updates.append(RequestUpdate(request, ()))
                continue
            request.output_token_ids.append(token_id)
            if logprobs is not None:
                request.logprobs.append(logprobs)
            if token_id in request.stop_ids:
                self.scheduler.finish(request, "stop", token_id)
            elif len(request.output_token_ids) >= request.max_tokens:
                self.scheduler.finish(request, "length")
            updates.append(RequestUpdate(request, (token_id,)))
        return updates

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request whose text reached a stop string."""
        if request.status is Status.FINISHED:
            # Its last token also ended it; the string decides, because the text is cut there.
            request.finish_reason, request.stop_reason = "stop", stop_reason
            return
        self.scheduler.finish(request, "stop", stop_reason)


def _prompt_problem(request: Request) -> str | None:
    """What is wrong with the log-probabilities of the prompt, once, when all of them are there."""
    if request.output_token_ids or all(isfinite(e.logprob) for e in request.prompt_logprobs):
        return None
    return "nonfinite_logits"


def weight_bytes(source: ModelSource, dtype: torch.dtype, device: torch.device) -> int:
    """What the weights take on a device, in the forms that `prepare_linear` gives them."""

    def tensor_bytes(info: TensorInfo) -> int:
        form = select_form(info.qtype.name, info.shape[0], dtype, device.type)
        return info.nbytes if form != "dense" else info.shape[0] * info.shape[1] * dtype.itemsize

    return sum(tensor_bytes(info) for info in source.tensors.values())


def packed_share(source: ModelSource) -> float:
    """Of all weights, the share that a CPU keeps as 4-bit planes when products are bfloat16."""
    packed = total = 0
    for info in source.tensors.values():
        size = info.shape[0] * info.shape[1]
        total += size
        if select_form(info.qtype.name, info.shape[0], torch.bfloat16, "cpu") != "dense":
            packed += size
    return packed / total


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load a model and make room for its cache.

    Raises:
        OutOfMemoryError: weights or cache do not fit; the message says what was needed and what to
            lower.
    """
    device = config.device
    needed = weight_bytes(source, config.dtype, device)
    check_weights_fit(needed, device, config.gpu_memory_utilization)
    try:
        model = registry.model_class(source.family)(
            source.config,
            WeightReader(source, device, progress),
            config.dtype,
            config.max_model_len,
        )
        specs = model.cache_specs()
        num_blocks = cache_blocks(
            bytes_per_block=sum(spec.bytes_per_block(config.block_size) for spec in specs),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            available=available_bytes(device, config.gpu_memory_utilization),
        )
        pool = CachePool(specs, num_blocks, config.block_size, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{device} ran out of memory while loading: {str(error).splitlines()[0]}",
            hint="Use a smaller model, or lower max_model_len.",
        ) from error
    banned = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, source.config.vocab_size)]
    sampler = Sampler(
        banned, device, lambda word: [tokenizer.encode(word), tokenizer.encode(" " + word)]
    )
    allocator = BlockAllocator(num_blocks)
    scheduler = Scheduler(
        allocator,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        PrefixCache(allocator, config.block_size) if config.prefix_cache else None,
    )
    return Engine(scheduler, ModelRunner(model, pool, sampler, config), config)
