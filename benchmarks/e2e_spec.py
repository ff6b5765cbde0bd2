"""Speculative decoding end to end: tokens per second with and without drafts.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_spec qwen3-8b.gguf --given --out e2e_spec.json
    python -m benchmarks.e2e_spec smollm2 --out e2e_spec.json

A model with synthetic weights cannot copy text. With --given the next token is therefore not the
model's but that of a prepared continuation: the logits are computed as usual, and one of them
is raised before sampling. Everything else is as for users. Without it the model's own text is used.

For each kind of text and batch size: the rate of steady decoding, of requests whose prompts are
done, until the first of them ends; and the acceptance by position. Plain decoding is that of
requests with drafts switched off, by the kernels that serve it without speculative decoding. With
--trace 1 8: for these batch sizes, the share of the GPU's time in a step that drafting and
acceptance take, and the waits of the host. With --limits 1 2 3: each case again for requests
that lower the number of drafts.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.spec_texts import KINDS, make_jobs, prompt_texts
from tiercel import LLM, SamplingParams
from tiercel.engine import engine as engine_module
from tiercel.ops.verify_accept import Verified
from tiercel.request.request import Request, Status
from tiercel.runner.runner import Launch
from tiercel.runner.sampler import Sampler
from tiercel.scheduler.plan import SchedulerOutput

BATCHES = (1, 8, 16, 64)
ANSWER_TOKENS = 240
RAISED = 1e4  # above any logit
DRAFT_KERNELS = ("best_of_slot", "accept_kernel", "ngram_index")
LAUNCH = "tiercel_launch"  # a range in the trace
# Calls that wait for the device. Only `collect` may, for the results of an earlier step.
WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "aten::_local_scalar_dense",
    "aten::nonzero",
)


class GivenSampler(Sampler):
    """Sampler of given continuations; its change of the logits is part of captured steps too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape = self._rows.token_ids.shape
        self._given = torch.zeros(shape, dtype=torch.int64, device=self._rows.device)
        self.answers: dict[str, list[int]] = {}  # by request id

    def enter(self, request: Request) -> None:
        answer = self.answers.get(request.request_id)
        if answer is not None:
            start = len(request.prompt_token_ids)
            ids = torch.tensor(answer, dtype=torch.int64).pin_memory()
            own = self._given[request.row, start : start + len(answer)]
            own.copy_(ids, non_blocking=True)
        super().enter(request)

    def __call__(self, logits: Tensor, requests: Any, rows: Tensor, layout: Any = None) -> Any:
        if layout is None:
            self._raise_given(logits, rows)
        return super().__call__(logits, requests, rows, layout)

    def accept(self, logits: Tensor, rows: Tensor, *others: Any) -> Verified:
        self._raise_given(logits, rows)
        return super().accept(logits, rows, *others)

    def _raise_given(self, logits: Tensor, rows: Tensor) -> None:
        lines = len(logits) // len(rows)
        place = self._rows.num_tokens.index_select(0, rows).unsqueeze(1)
        place = place + torch.arange(lines, device=rows.device)
        tokens = self._given.index_select(0, rows).gather(1, place.long())
        logits.scatter_(1, tokens.flatten().unsqueeze(1), RAISED)


@dataclass(frozen=True)
class Work:
    """A batch of requests of one kind of text, tokens of each answer, and number of runs."""

    kind: str
    batch: int
    length: int = ANSWER_TOKENS
    repeats: int = 2


def make_requests(
    llm: LLM, work: Work, given: GivenSampler | None, drafts: int | None
) -> list[Request]:
    """A batch of one kind of text, with up to `drafts` draft tokens a step."""
    kind, batch = work.kind, work.batch
    params = SamplingParams(
        temperature=0, max_tokens=work.length, ignore_eos=True, num_spec_tokens=drafts
    )
    if given is None:
        messages = [[{"role": "user", "content": text}] for text in prompt_texts(kind, batch)]
        return [llm._inputs.request(llm.encode_chat(m), params, 0) for m in messages]
    jobs = make_jobs(kind, batch, work.length, llm.source.config.vocab_size)
    requests = [llm._inputs.request(job.prompt, params, 0) for job in jobs]
    for request, job in zip(requests, jobs, strict=True):
        given.answers[request.request_id] = job.answer
    return requests


def decode(llm: LLM, requests: list[Request]) -> tuple[float, int]:
    """Tokens per second of steady decoding, and the number of steps."""
    engine = llm._engine
    for request in requests:
        engine.submit(request)
    while not all(len(request.output_token_ids) >= 4 for request in requests):
        engine.step()
    before = sum(len(request.output_token_ids) for request in requests)
    start, steps = time.perf_counter(), 0
    while all(request.status is not Status.FINISHED for request in requests):
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    count = sum(len(request.output_token_ids) for request in requests) - before
    while engine.has_work:
        engine.step()
    return count / seconds, steps


def measure(
    llm: LLM, work: Work, given: GivenSampler | None, limits: list[int | None]
) -> list[dict[str, Any]]:
    """The rate of plain decoding and those with drafts, each the best of several runs."""
    rates = (decode(llm, make_requests(llm, work, given, 0))[0] for _ in range(work.repeats))
    plain = max(rates)
    return [measure_drafts(llm, work, given, plain, limit) for limit in limits]


def measure_drafts(
    llm: LLM, work: Work, given: GivenSampler | None, plain: float, limit: int | None
) -> dict[str, Any]:
    """The rate with drafts, the plain rate, and the acceptance."""
    drafted = 0.0
    for _ in range(work.repeats):
        before = llm.draft_counts
        rate, steps = decode(llm, make_requests(llm, work, given, limit))
        drafted = max(drafted, rate)
    counts = llm.draft_counts
    places = before.accepted_per_pos + [0] * len(counts.accepted_per_pos)
    verified = max(1, counts.num_drafts - before.num_drafts)
    return {
        "name": "text",
        "kind": work.kind,
        "batch": work.batch,
        "drafts": limit,
        "plain_tokens_per_second": round(plain, 1),
        "tokens_per_second": round(drafted, 1),
        "ratio": round(drafted / plain, 3),
        "steps": steps,
        "tokens_per_row_step": round(
            1
            + (counts.num_accepted_tokens - before.num_accepted_tokens)
            / max(1, counts.num_steps - before.num_steps),
            2,
        ),
        "draft_tokens": counts.num_draft_tokens - before.num_draft_tokens,
        "right_share": {
            str(place): round((now - then) / verified, 3)
            for place, (now, then) in enumerate(
                zip(counts.accepted_per_pos, places, strict=False), 1
            )
        },
    }


def trace(llm: LLM, batch: int, given: GivenSampler | None) -> dict[str, Any]:
    """Profile steps that verify: shares of GPU time, waits of the host."""
    engine = llm._engine
    requests = make_requests(llm, Work("edit", batch), given, None)
    for request in requests:
        engine.submit(request)
    while not all(len(request.output_token_ids) >= 8 for request in requests):
        engine.step()
    steps, launch = 16, engine.runner.launch

    def watched(plan: SchedulerOutput) -> Launch:
        with record_function(LAUNCH):
            return launch(plan)

    engine.runner.launch = watched
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            engine.step()
    engine.runner.launch = launch
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    on_gpu = torch.autograd.DeviceType.CUDA  # the profiler shows host ranges on it too
    ranges = [e.time_range for e in found.events() if e.name == LAUNCH and e.device_type != on_gpu]
    inside = [e for e in found.events() if e.name in WAITS and _is_inside(e, ranges)]
    kernels = [e for e in found.events() if e.device_type == on_gpu and e.name != LAUNCH]
    own = sum(
        e.time_range.elapsed_us() for e in kernels if any(name in e.name for name in DRAFT_KERNELS)
    )
    first = min(e.time_range.start for e in kernels)
    last = max(e.time_range.end for e in kernels)
    busy, end = 0.0, first  # kernels overlap where one waits for another within itself
    for e in sorted(kernels, key=lambda e: e.time_range.start):
        busy += max(0.0, e.time_range.end - max(end, e.time_range.start))
        end = max(end, e.time_range.end)
    for name, count in Counter(event.name for event in inside).items():
        print(f"{count} times {name} within launches of {batch} requests", flush=True)
    return {
        "name": "trace",
        "batch": batch,
        "steps": steps,
        "step_us": round((last - first) / steps, 1),
        "busy_share": round(busy / (last - first), 3),
        "draft_and_accept_us": round(own / steps, 1),
        "draft_and_accept_share": round(own / (last - first), 4),
        "waits_in_launches": len(inside),
    }


def _is_inside(event: Any, ranges: list[Any]) -> bool:
    """Whether a host event begins within one of the ranges."""
    start = event.time_range.start
    return any(r.start <= start < r.end for r in ranges)


def main() -> None:
    """Measure one model; ends with status 1 if the host waited within a step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--given", action="store_true", help="continuations are given")
    parser.add_argument("--spec", default="ngram")
    parser.add_argument("--num-spec-tokens", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--limits", type=int, nargs="*", help="drafts of a request; all without")
    parser.add_argument("--length", type=int, default=ANSWER_TOKENS, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=2, help="runs of a case; the best counts")
    parser.add_argument("--trace", type=int, nargs="*", default=(), help="batches to profile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.given:
        engine_module.Sampler = GivenSampler
    start = time.perf_counter()
    llm = LLM(
        options.model,
        device=options.device,
        max_model_len=4096,
        max_num_seqs=max([*options.batches, *options.trace]),
        spec=options.spec,
        num_spec_tokens=options.num_spec_tokens,
    )
    head = environment(llm.config.device)
    engine = {
        "name": "engine",
        "model": llm.source.path.name,
        "load_s": round(time.perf_counter() - start, 2),
        "spec": options.spec,
        "num_spec_tokens": llm.config.spec.max_drafts,
        "answers": "given continuations, not the model's" if options.given else "the model's own",
    }
    rows: list[dict[str, Any]] = [engine]
    rows += [
        {"name": "cost of verifying", "batch": batch, "extra_time_share": round(cost, 3)}
        for batch, cost in llm._engine.scheduler.policy.costs
    ]
    print(*rows, sep="\n", flush=True)
    sampler = llm._engine.runner.sampler
    given = sampler if isinstance(sampler, GivenSampler) else None
    waits = 0
    for batch in options.trace:
        rows.append(trace(llm, batch, given))
        waits += rows[-1]["waits_in_launches"]
        print(rows[-1], flush=True)
    for kind in options.kinds:
        for batch in options.batches:
            work = Work(kind, batch, options.length, options.repeats)
            found = measure(llm, work, given, options.limits or [None])
            rows += found
            print(*found, sep="\n", flush=True)
            save(options.out, head, rows)  # finished rows are kept if a later case fails
    if waits:
        raise SystemExit("the host waited for the device within a step")


if __name__ == "__main__":
    main()
