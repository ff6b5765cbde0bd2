"""`tiercel bench kernels`: a model's matrix products and attention compared with the roofline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tiercel.cli.bench_model import TRIAL_GROUP, facts, load_for_bench, open_for_bench, show
from tiercel.cli.bench_options import check_output, parse_counts
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName
from tiercel.cli.terminal import ProgressReporter, UsageError

if TYPE_CHECKING:
    from tiercel.bench.kernels import KernelRow

MOST_TOKENS = 65_536
_CASE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,6})", re.ASCII)


def bench_kernels(
    *,
    tokens: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Rows of the products: 1,8,512; 0 for none.")
    ] = "1,8,64,512",
    decode: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Requests x context of one new token: 1x4096; 0.")
    ] = "1x4096,8x1024",
    prompt: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Tokens of prompts, for attention; 0 for none.")
    ] = "512",
    seconds: Annotated[float, Parameter(group=TRIAL_GROUP, help="Length of a measurement.")] = 0.2,
    json: Annotated[Path | None, Parameter(group=TRIAL_GROUP, help="Write everything.")] = None,
    plot: Annotated[Path | None, Parameter(group=TRIAL_GROUP, help="Plot it.")] = None,
    label: Annotated[str | None, Parameter(group=TRIAL_GROUP, help="Name in the table.")] = None,
    model: ModelName = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model's kernels and the device's ceilings (roofline) in the same run."""
    rows = [count for count in parse_counts("--tokens", tokens, high=MOST_TOKENS) if count]
    shapes = _parse_cases(decode)
    prompts = [count for count in parse_counts("--prompt", prompt, high=MOST_TOKENS) if count]
    if not (rows or shapes or prompts):
        raise UsageError("there is nothing to measure.", hint="Give --tokens or --decode.")
    if not 1e-3 <= seconds <= 1e3:
        raise UsageError(f"--seconds {seconds} is out of range.", hint="Use 0.001 to 1000.")
    if engine.tensor_parallel_size > 1:
        raise UsageError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: this measures one GPU.",
            hint="Use bench speed, bench throughput or bench serve.",
        )
    check_output(json, plot)
    contexts = [context for _, context in shapes] + prompts
    done: list[KernelRow] = []
    is_partial = False
    with ProgressReporter(is_quiet=common.quiet) as report:
        loaded = load_for_bench(
            open_for_bench(model, engine, report),
            engine,
            report,
            max_model_len=max(contexts, default=512) + 1,
            max_num_seqs=max((requests for requests, _ in shapes), default=1),
        )
        from tiercel.bench.kernels import KernelReport, KernelRow, kernel_table
        from tiercel.profiling.device_timing import measure_ceilings
        from tiercel.profiling.kernel_times import AttentionCase, measure_kernels

        report("Measuring the device")
        ceilings = measure_ceilings(loaded.config.device, loaded.config.dtype)
        cases = [AttentionCase(requests, 1, context) for requests, context in shapes]
        cases += [AttentionCase(1, count, count) for count in prompts]
        try:
            done.extend(
                KernelRow(
                    name=found.name,
                    size=found.size,
                    num_bytes=found.num_bytes,
                    flops=found.flops,
                    us=found.us,
                    of_ceiling=found.of_ceiling(ceilings),
                    is_cold=found.is_cold,
                )
                for found in measure_kernels(loaded, rows, cases, seconds, report)
            )
        except KeyboardInterrupt:
            if not done:
                raise
            is_partial = True
    told = facts(loaded, label)
    result = KernelReport(
        **told, read_gbps=ceilings.read_gbps, tflops=ceilings.tflops, results=done
    )
    names = [f"{row.name}, {row.size}" for row in done]
    bars = (names, [100 * row.of_ceiling for row in done], "percent of the ceiling")
    show(told, result, kernel_table(done), json, plot, bars)
    return 130 if is_partial else 0


def _parse_cases(text: str) -> list[tuple[int, int]]:
    """Read `1x4096,8x1024`; `0` stands for no case."""
    if text == "0":
        return []
    found = [_CASE.fullmatch(part) for part in text.split(",")]
    cases = [(int(match[1]), int(match[2])) for match in found if match is not None]
    if len(cases) < len(found):
        raise UsageError(
            f"--decode {text!r:.60} is not a list of requests x context.",
            hint="Write it like 1x4096,8x1024.",
        )
    return cases
