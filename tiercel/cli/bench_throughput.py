"""`tiercel bench throughput`: the requests of `bench serve` on the engine in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tiercel.cli.bench_options import (
    LOAD_GROUP,
    OutputOptions,
    WorkloadOptions,
    check_output,
    make_workload,
    parse_bounds,
    parse_levels,
    show_comparison,
    show_report,
)
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName
from tiercel.cli.terminal import ProgressReporter, UsageError

if TYPE_CHECKING:
    from tiercel.bench.completions import Completion
    from tiercel.bench.report import Level
    from tiercel.bench.statistics import Bounds
    from tiercel.bench.workload import Workload
    from tiercel.models.source import ModelSource


def bench_throughput(
    *,
    concurrency: Annotated[
        str | None, Parameter(group=LOAD_GROUP, help="Concurrent requests: 1,2,4 [the engine's].")
    ] = None,
    model: ModelName = None,
    workload: WorkloadOptions = WorkloadOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure the engine offline, on the requests of bench serve."""
    check_output(output.json, output.plot)
    if output.compare is not None:
        show_comparison(*output.compare, output)
        return 0
    shape, requests = make_workload(workload)
    bounds = parse_bounds(output.goodput)
    levels: Sequence[int | None] = parse_levels(concurrency) if concurrency is not None else [None]
    from tiercel.loader.hub import resolve
    from tiercel.models.source import open_source

    done: list[Level] = []
    is_partial = False
    with ProgressReporter(is_quiet=common.quiet) as report:
        path = resolve(model, offline=engine.offline, report=report)
        source = open_source(path)
        _check_ids(shape, source)
        digest = _hash(source, report) if output.json is not None else None
        try:
            done.extend(
                _measure(source, level, shape, requests, workload, bounds, engine, report)
                for level in levels
            )
        except KeyboardInterrupt:
            if not done:
                raise
            is_partial = True
    _show(source, digest, shape, bounds, done, is_partial, output)
    return 130 if is_partial else 0


def _check_ids(shape: Workload, source: ModelSource) -> None:
    """Refuse ids that the model does not have; ids of a file are checked by the engine."""
    vocab_size = source.config.vocab_size
    if shape.token_ids is not None and shape.token_ids.high >= vocab_size:
        raise UsageError(
            f"--token-ids {shape.token_ids.low}:{shape.token_ids.high}: "
            f"the model has {vocab_size} tokens.",
            hint=f"Use ids up to {vocab_size - 1}, for instance --token-ids 0:{vocab_size - 1}.",
        )


def _measure(
    source: ModelSource,
    concurrency: int | None,
    shape: Workload,
    requests: Sequence[Completion] | None,
    options: WorkloadOptions,
    bounds: Bounds,
    engine: EngineOptions,
    report: ProgressReporter,
) -> Level:
    """Load the model for the concurrency of the workload and measure it."""
    from tiercel import env
    from tiercel.bench import workload

    report("Loading PyTorch")
    env.shorten_openmp_spins()
    from tiercel.bench.throughput import measure_offline
    from tiercel.llm import LLM

    with LLM(
        source,
        device=engine.device,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        numerics=engine.numerics,
        max_model_len=engine.max_model_len,
        max_num_seqs=concurrency,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        spec=engine.spec,
        num_spec_tokens=engine.num_spec_tokens,
        threads=engine.threads,
        tensor_parallel_size=engine.tensor_parallel_size,
        expert_parallel=engine.expert_parallel,
        data_parallel_attention=engine.data_parallel_attention,
        seed=options.seed,
        progress=report,
    ) as llm:
        at_once = llm.config.max_num_seqs
        count = options.requests or workload.enough_at_once(at_once)
        num_warm_up = options.warm_up if options.warm_up is not None else at_once
        name = f"{at_once} at once"
        if requests is not None:
            wanted = workload.taken(requests, count)
            warm_up = workload.taken(requests, num_warm_up)
        else:
            wanted = workload.make_requests(shape, count, level=name)
            warm_up = workload.make_requests(shape, num_warm_up, level=f"{name}, warm-up")
        report(f"Measuring {name}: {count} requests")
        return measure_offline(llm, wanted, warm_up, temperature=options.temperature, bounds=bounds)


def _hash(source: ModelSource, report: ProgressReporter) -> str | None:
    from tiercel.bench.throughput import model_sha256

    return model_sha256(source.path, report)


def _show(
    source: ModelSource,
    digest: str | None,
    shape: Workload,
    bounds: Bounds,
    levels: list[Level],
    is_partial: bool,
    output: OutputOptions,
) -> None:
    from tiercel.bench import environment
    from tiercel.bench.report import Report
    from tiercel.version import __version__

    report = Report(
        kind="throughput",
        command=environment.command_line(sys.argv),
        utc=environment.utc_now(),
        label=output.label or f"tiercel {__version__} offline",
        versions=environment.versions("torch", "triton"),
        hardware=environment.hardware(),
        target={},
        model=source.path.name,
        model_sha256=digest,
        workload=shape,
        bounds=bounds,
        is_partial=is_partial,
        levels=levels,
    )
    show_report(report, output)
