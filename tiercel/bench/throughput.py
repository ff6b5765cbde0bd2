"""Measurement of the engine without a server: the same requests, through `LLM.generate`.

A level of concurrency n is an engine that runs n requests at a time and gets all of them at the
start, so the wait in the queue is part of the time to the first token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from tiercel.bench.completions import Completion, Sample
from tiercel.bench.drafts import DraftFigures
from tiercel.bench.report import Level, Load
from tiercel.bench.statistics import Bounds, summarise
from tiercel.params import SamplingParams

if TYPE_CHECKING:
    from tiercel.llm import LLM
    from tiercel.request.output import RequestOutput

WARM_UP_TOKENS = 8  # of each answer of the warm-up


def measure_offline(
    llm: LLM,
    requests: Sequence[Completion],
    warm_up: Sequence[Completion],
    *,
    temperature: float,
    bounds: Bounds,
) -> Level:
    """Generate all answers together; the engine's limit of concurrent requests is the load.

    Args:
        llm: the model.
        requests: requests to measure.
        warm_up: requests to run before, not measured.
        temperature: sampling temperature; 0 is greedy.
        bounds: latency bounds for the goodput.

    Raises:
        TiercelError: a prompt does not fit, or the like; nothing was measured then.
    """
    if warm_up:
        short = [Completion(r.prompt, min(r.output_len, WARM_UP_TOKENS)) for r in warm_up]
        llm.generate([_prompt(r) for r in short], [_params(r, temperature) for r in short])
    prompts = [_prompt(request) for request in requests]
    params = [_params(request, temperature) for request in requests]
    before = _drafts(llm)
    began_s = perf_counter()
    outputs = llm.generate(prompts, params)
    duration_s = perf_counter() - began_s
    samples = [
        _sample(index, request, output)
        for index, (request, output) in enumerate(zip(requests, outputs, strict=True))
    ]
    load = Load(len(requests), concurrency=llm.config.max_num_seqs * llm.config.num_schedulers)
    drafts = _drafts(llm).since(before)
    return Level(load, summarise(samples, duration_s, bounds=bounds, drafts=drafts), samples)


def _drafts(llm: LLM) -> DraftFigures:
    counts = llm.draft_counts
    return DraftFigures(counts.num_drafts, counts.num_draft_tokens, counts.accepted_per_pos)


def model_sha256(path: Path, report: Callable[[str, int, int], None]) -> str | None:
    """The hash of a model file; None for a folder, whose files are many."""
    if not path.is_file():
        return None
    total = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            report(f"Hashing {path.name}", stream.tell(), total)
    return digest.hexdigest()


def _prompt(request: Completion) -> str | Mapping[str, Sequence[int]]:
    if isinstance(request.prompt, str):
        return request.prompt
    return {"prompt_token_ids": request.prompt}


def _params(request: Completion, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True)


def _sample(index: int, request: Completion, output: RequestOutput) -> Sample:
    answer, metrics = output.outputs[0], output.metrics
    is_error = answer.finish_reason == "error"
    return Sample(
        index=index,
        start_s=0.0,
        output_len=request.output_len,
        first_s=metrics.first_token_s,
        latency_s=metrics.finished_s,
        prompt_tokens=metrics.num_prompt_tokens,
        completion_tokens=metrics.num_output_tokens,
        cached_tokens=metrics.num_cached_tokens,
        finish_reason=answer.finish_reason,
        error=str(answer.stop_reason) if is_error else None,
    )
