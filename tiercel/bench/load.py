"""Load on a server: a number of concurrent requests (closed loop) or a rate (open loop).

A closed loop waits for a slow server; an open loop does not, and shows the effect of its queue. In
an open loop each request is due at its own time, independent of other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tiercel.bench.completions import Completion, CompletionServer, Sample


@dataclass(slots=True)
class Run:
    """Results of one level so far.

    Attributes:
        samples: samples of the requests that ended.
        num_sent: number of requests sent, also of those that did not end.
        duration_s: time from the first request to the last answer.
        client_s: processor time of the client in this time.
        is_interrupted: whether Ctrl-C ended the level.
    """

    samples: list[Sample] = field(default_factory=list)
    num_sent: int = 0
    duration_s: float = 0.0
    client_s: float = 0.0
    is_interrupted: bool = False


Progress = Callable[[int], None]  # requests done
_Work = Callable[[Run, float], Awaitable[None]]  # (results so far, the clock's zero)


async def run_closed(
    server: CompletionServer, requests: Sequence[Completion], concurrency: int, progress: Progress
) -> Run:
    """Keep `concurrency` requests running until all are done."""
    waiting = iter(enumerate(requests))

    async def work(run: Run, began_s: float) -> None:
        for index, request in waiting:
            run.num_sent += 1
            run.samples.append(await server.measure(request, index=index, began_s=began_s))
            progress(len(run.samples))

    return await _gather([work] * min(concurrency, len(requests)))


async def run_open(
    server: CompletionServer,
    requests: Sequence[Completion],
    due: Sequence[float],
    progress: Progress,
) -> Run:
    """Send each request at its due time."""

    async def send(run: Run, began_s: float, index: int) -> None:
        await asyncio.sleep(began_s + due[index] - perf_counter())
        run.num_sent += 1
        sample = await server.measure(
            requests[index], index=index, began_s=began_s, due_s=due[index]
        )
        run.samples.append(sample)
        progress(len(run.samples))

    def one(index: int) -> _Work:
        return lambda run, began_s: send(run, began_s, index)

    return await _gather([one(index) for index in range(len(requests))])


async def _gather(works: Sequence[_Work]) -> Run:
    """Run all works concurrently. A cancellation (Ctrl-C) ends them; results so far are kept."""
    run = Run()
    client_s = time.thread_time()
    began_s = perf_counter()
    try:
        await asyncio.gather(*(work(run, began_s) for work in works))
    except asyncio.CancelledError:
        run.is_interrupted = True
    run.duration_s = perf_counter() - began_s
    run.client_s = time.thread_time() - client_s
    return run
