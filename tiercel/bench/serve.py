"""Measurement of a server: query it, warm it up, run each load, gather a report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tiercel.bench import workload as workloads
from tiercel.bench.completions import Completion, CompletionServer, Sample
from tiercel.bench.drafts import DraftFigures, read_metrics
from tiercel.bench.http_client import Exchange, ExchangeError, HttpClient
from tiercel.bench.load import Run, run_closed, run_open
from tiercel.bench.report import Level, Load
from tiercel.bench.statistics import Bounds, summarise
from tiercel.bench.workload import WordScale, Workload
from tiercel.errors import BenchError

Note = Callable[[str], None]  # a line for the user
Show = Callable[[str, int, int], None]  # (what, done, total)

PROBE_LEN: Final = 24  # tokens of the first prompt
OPEN_WARM_UP: Final = 8  # concurrent requests before an open loop
_SCALE_WORDS: Final = (20, 220)  # two lengths define a line
_REFUSED: Final = ("http_400", "http_404", "http_422", "http_500", "http_501")


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement.

    Attributes:
        model: the server's name of the model; None for its first.
        workload: workload of every level.
        requests: prompts from a file; None samples them.
        concurrency, rates: loads of the levels.
        num_requests: number of requests of each level; None for enough of them.
        num_warm_up: number of requests before each level; None for the concurrency.
        has_words: whether prompts are words, not token ids.
        bounds: latency bounds for the goodput.
    """

    model: str | None
    workload: Workload
    requests: Sequence[Completion] | None
    concurrency: Sequence[int]
    rates: Sequence[float]
    num_requests: int | None
    num_warm_up: int | None
    has_words: bool
    bounds: Bounds

    def loads(self) -> list[Load]:
        """The levels in order."""
        closed = [
            Load(self.num_requests or workloads.enough_at_once(n), concurrency=n)
            for n in self.concurrency
        ]
        opened = [
            Load(self.num_requests or workloads.enough_of_rate(rate), rate=rate)
            for rate in self.rates
        ]
        return closed + opened


@dataclass(slots=True)
class Measured:
    """Results of a server.

    Attributes:
        model: the requested model name.
        target: facts that the server reports about itself.
        workload: the workload, with words instead of ids where the server takes no ids.
        levels: completed levels; the last may be cut short.
        is_partial: whether Ctrl-C ended the measurement.
    """

    model: str
    target: dict[str, str]
    workload: Workload
    levels: list[Level]
    is_partial: bool = False


async def measure_server(client: HttpClient, plan: Plan, note: Note, show: Show) -> Measured:
    """Run the plan.

    Raises:
        BenchError: the server does not answer, or refuses a request that every level would send.
    """
    show(f"Asking {client.address.url}", 0, 0)
    model, target = await _ask_models(client, plan.model)
    target |= await _ask_version(client)
    server = CompletionServer(client, model, temperature=plan.workload.temperature)
    words, workload = await _choose_prompts(server, plan, note)
    measured = Measured(model, target, workload, [])
    for load in plan.loads():
        try:
            await _warm_up(server, plan, load, words, show)
        except asyncio.CancelledError:
            if not measured.levels:
                raise
            measured.is_partial = True
            break
        before = await _ask_drafts(client)
        run = await _run(server, plan, load, words, show)
        after = None if before is None else await _ask_drafts(client)
        drafts = None if before is None or after is None else after.since(before)
        measured.levels.append(_level(load, run, plan.bounds, drafts))
        if run.is_interrupted:
            measured.is_partial = True
            break
    return measured


async def _ask_models(client: HttpClient, wanted: str | None) -> tuple[str, dict[str, str]]:
    """The model name for requests and the known facts about the model."""
    exchange = await _get(client, "/v1/models")
    if exchange.status != 200:
        raise BenchError(
            f"{client.address.url}/v1/models: the server answered HTTP {exchange.status}.",
            hint="Give the URL of an OpenAI-compatible server, and --api-key if it wants one.",
        )
    try:
        listed: Any = msgspec.json.decode(bytes(exchange.body))["data"]
        names = [str(entry["id"]) for entry in listed]
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
        raise BenchError(
            f"{client.address.url}/v1/models: the answer is not a list of models.",
            hint="Give the URL of an OpenAI-compatible server.",
        ) from None
    if not names or (wanted is not None and wanted not in names):
        raise BenchError(
            f"{client.address.url}: the server has no model {wanted or 'at all'!r:.80}.",
            hint=f"It has {', '.join(names)[:200]}." if names else "Load one.",
        )
    name = wanted or names[0]
    facts = listed[names.index(name)]
    target = {"url": client.address.url}
    for key in ("owned_by", "max_model_len"):
        if isinstance(facts.get(key), str | int):
            target[key] = str(facts[key])
    if "server" in exchange.headers:
        target["server"] = exchange.headers["server"]
    return name, target


async def _ask_version(client: HttpClient) -> dict[str, str]:
    """The server's version if it reports one; servers need not."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        exchange = await _get(client, path)
        if exchange.status == 200:
            try:
                value: Any = msgspec.json.decode(bytes(exchange.body))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get(key), str):
                return {"version": value[key][:80]}
    return {}


async def _ask_drafts(client: HttpClient) -> DraftFigures | None:
    """Totals of draft tokens if the server has metrics; servers need not."""
    exchange = Exchange()
    try:
        await client.run("GET", "/metrics", exchange)
    except ExchangeError:
        return None
    if exchange.status != 200:
        return None
    return read_metrics(bytes(exchange.body).decode("utf-8", "replace"))


async def _get(client: HttpClient, path: str) -> Exchange:
    exchange = Exchange()
    try:
        await client.run("GET", path, exchange)
    except ExchangeError as error:
        raise BenchError(
            f"{client.address.url}{path}: {error.kind}: {error}.",
            hint="Check that the server runs and the URL is right.",
        ) from error
    return exchange


async def _choose_prompts(
    server: CompletionServer, plan: Plan, note: Note
) -> tuple[WordScale | None, Workload]:
    """Find by a request whether prompts are ids or words; check that usage is sent."""
    if plan.requests is not None:
        await _probe(server, plan.requests[0].prompt)
        return None, plan.workload
    if not plan.has_words:
        request = workloads.make_requests(_of_length(plan.workload, PROBE_LEN), 1, level="probe")[0]
        sample = await server.measure(Completion(request.prompt, 1), index=0, began_s=0.0)
        if sample.error is None:
            if sample.prompt_tokens != PROBE_LEN:
                note(
                    f"The server counts {sample.prompt_tokens} tokens for a prompt of {PROBE_LEN}."
                )
            return None, plan.workload
        if sample.error not in _REFUSED:
            raise _failed(sample)
        note(f"The server takes no token ids ({sample.detail!r:.120}): prompts are words instead.")
    counts = []
    for num_words in _SCALE_WORDS:
        text = " ".join(workloads.WORDS[i % len(workloads.WORDS)] for i in range(num_words))
        counts.append((await _probe(server, text)).prompt_tokens)
    per_word = (counts[1] - counts[0]) / (_SCALE_WORDS[1] - _SCALE_WORDS[0])
    if per_word <= 0:
        raise BenchError(
            f"the server counts {counts[0]} and {counts[1]} tokens for {_SCALE_WORDS[0]} and "
            f"{_SCALE_WORDS[1]} words.",
            hint="Its usage cannot be trusted.",
        )
    scale = WordScale(counts[0] - per_word * _SCALE_WORDS[0], per_word)
    return scale, msgspec.structs.replace(plan.workload, token_ids=None)


def _of_length(workload: Workload, length: int) -> Workload:
    return msgspec.structs.replace(workload, input_len=workloads.Lengths(length, length))


async def _probe(server: CompletionServer, prompt: str | list[int]) -> Sample:
    """Request one token; a failure ends the measurement."""
    sample = await server.measure(Completion(prompt, 1), index=0, began_s=0.0)
    if sample.error is not None:
        raise _failed(sample)
    return sample


def _failed(sample: Sample) -> BenchError:
    return BenchError(
        f"the first request failed: {sample.error}: {sample.detail}.",
        hint="Check the server's log; every further request would fail in the same way.",
    )


async def _warm_up(
    server: CompletionServer, plan: Plan, load: Load, words: WordScale | None, show: Show
) -> None:
    count = plan.num_warm_up
    if count is None:
        count = load.concurrency or OPEN_WARM_UP
    if count == 0:
        return
    requests = _requests(plan, count, f"{load.name}, warm-up", words)
    what = f"Warming up for {load.name}"
    run = await run_closed(
        server, requests, load.concurrency or count, lambda done: show(what, done, count)
    )
    if run.is_interrupted:
        raise asyncio.CancelledError
    if all(sample.error is not None for sample in run.samples):
        raise _failed(run.samples[0])


async def _run(
    server: CompletionServer, plan: Plan, load: Load, words: WordScale | None, show: Show
) -> Run:
    requests = _requests(plan, load.requests, load.name, words)
    what = f"Measuring {load.name}"

    def progress(done: int) -> None:
        show(what, done, load.requests)

    if load.rate is not None:
        due = workloads.arrival_times(load.rate, load.requests, plan.workload.seed)
        return await run_open(server, requests, due, progress)
    assert load.concurrency is not None
    return await run_closed(server, requests, load.concurrency, progress)


def _requests(plan: Plan, count: int, level: str, words: WordScale | None) -> list[Completion]:
    if plan.requests is not None:
        return workloads.taken(plan.requests, count)
    return workloads.make_requests(plan.workload, count, level=level, words=words)


def _level(load: Load, run: Run, bounds: Bounds, drafts: DraftFigures | None) -> Level:
    samples = sorted(run.samples, key=lambda sample: sample.index)
    summary = summarise(
        samples,
        run.duration_s,
        bounds=bounds,
        unfinished=run.num_sent - len(samples),
        client_s=run.client_s,
        drafts=drafts,
    )
    return Level(load, summary, samples)
