"""`tiercel bench serve`: measure a server that speaks the OpenAI protocol, ours or another."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tiercel.cli.bench_options import (
    LOAD_GROUP,
    OutputOptions,
    WorkloadOptions,
    check_output,
    make_workload,
    parse_bounds,
    parse_levels,
    parse_rates,
    show_comparison,
    show_report,
)
from tiercel.cli.options import CommonOptions
from tiercel.cli.terminal import ProgressReporter, UsageError, note

if TYPE_CHECKING:
    from tiercel.bench.http_client import HttpClient
    from tiercel.bench.serve import Measured, Plan

_SERVER_GROUP = Group("Server", sort_key=0)


def bench_serve(
    url: Annotated[
        str | None, Parameter(group=_SERVER_GROUP, help="Such as http://127.0.0.1:8000.")
    ] = None,
    /,
    *,
    served_model_name: Annotated[
        str | None, Parameter(group=_SERVER_GROUP, help="Model name in requests [its first].")
    ] = None,
    api_key: Annotated[str | None, Parameter(group=_SERVER_GROUP, help="Bearer token.")] = None,
    timeout: Annotated[
        float, Parameter(group=_SERVER_GROUP, help="Longest time without data, seconds.")
    ] = 600.0,
    concurrency: Annotated[
        str | None, Parameter(group=LOAD_GROUP, help="Concurrent requests: 1,2,4 [1].")
    ] = None,
    rate: Annotated[
        str | None, Parameter(group=LOAD_GROUP, help="Requests per second, Poisson: 0.5,1,2.")
    ] = None,
    words: Annotated[
        bool, Parameter(group=LOAD_GROUP, help="Prompts of words, not of token ids.")
    ] = False,
    workload: WorkloadOptions = WorkloadOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure an OpenAI-compatible server under load."""
    check_output(output.json, output.plot)
    if output.compare is not None:
        show_comparison(*output.compare, output)
        return 0
    if url is None:
        raise UsageError("URL: none was given.", hint="Give one, or --compare with two files.")
    if not 0 < timeout < 1e6:
        raise UsageError(f"--timeout {timeout} is out of range.", hint="Use seconds above 0.")
    shape, requests = make_workload(workload)
    levels = concurrency if concurrency is not None or rate is not None else "1"
    from tiercel.bench.http_client import HttpClient, parse_address
    from tiercel.bench.serve import Plan

    plan = Plan(
        model=served_model_name,
        workload=shape,
        requests=requests,
        concurrency=parse_levels(levels) if levels is not None else [],
        rates=parse_rates(rate) if rate is not None else [],
        num_requests=workload.requests,
        num_warm_up=workload.warm_up,
        has_words=words,
        bounds=parse_bounds(output.goodput),
    )
    client = HttpClient(parse_address(url), api_key=api_key, timeout_s=timeout)
    with ProgressReporter(is_quiet=common.quiet) as report:
        measured = _measure(client, plan, report)
    _show(plan, measured, output)
    return 130 if measured.is_partial else 0


def _measure(client: HttpClient, plan: Plan, report: ProgressReporter) -> Measured:
    """Run the plan on its own event loop; uvloop, where installed, costs half as much."""
    from tiercel.bench.serve import measure_server

    async def run() -> Measured:
        try:
            return await measure_server(client, plan, note, report)
        finally:
            client.close()

    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run())


def _show(plan: Plan, measured: Measured, output: OutputOptions) -> None:
    from tiercel.bench import environment
    from tiercel.bench.report import Report

    target = measured.target
    engine = target.get("owned_by") or target.get("server") or target["url"]
    label = output.label or f"{engine} {target.get('version', '')}".strip()
    report = Report(
        kind="serve",
        command=environment.command_line(sys.argv),
        utc=environment.utc_now(),
        label=label,
        versions=environment.versions("uvloop", "httptools"),
        hardware=environment.hardware(),
        target=target,
        model=measured.model,
        model_sha256=None,
        workload=measured.workload,
        bounds=plan.bounds,
        is_partial=measured.is_partial,
        levels=measured.levels,
    )
    show_report(report, output)
