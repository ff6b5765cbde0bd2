"""The model of `bench speed` and `bench kernels`: loaded in this process, and its facts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group

from tiercel.cli.bench_options import write_table
from tiercel.cli.options import EngineOptions
from tiercel.cli.terminal import ProgressReporter, UsageError

if TYPE_CHECKING:
    import msgspec

    from tiercel.bench.tables import Table
    from tiercel.engine.load import LoadedModel
    from tiercel.models.source import ModelSource

TRIAL_GROUP = Group("Trials", sort_key=1)


def open_for_bench(
    model: str | None, engine: EngineOptions, report: ProgressReporter
) -> ModelSource:
    """Find and open the model whose single steps or kernels are measured.

    Args:
        model: model name as on the command line.
        engine: engine options.
        report: progress callback.

    Raises:
        UsageError: drafts were requested.
        TiercelError: see `resolve` and `open_source`.
    """
    from tiercel.loader.hub import resolve
    from tiercel.models.source import open_source

    if engine.spec != "off":
        raise UsageError(
            f"--spec {engine.spec}: single steps are measured without draft tokens.",
            hint="Use bench throughput or bench serve.",
        )
    return open_source(resolve(model, offline=engine.offline, report=report))


def load_for_bench(
    source: ModelSource,
    engine: EngineOptions,
    report: ProgressReporter,
    *,
    max_model_len: int,
    max_num_seqs: int,
    seed: int = 0,
) -> LoadedModel:
    """Load a model with room for what is measured.

    Args:
        source: of `open_for_bench`.
        engine: engine options; its `max_model_len`, if given, takes precedence.
        report: progress callback.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: number of concurrent sequences.
        seed: seed of the engine.

    Raises:
        UsageError: more context than the model has was requested.
        TiercelError: see `load_ranks`.
    """
    from tiercel import env

    longest = source.config.max_position
    if engine.max_model_len is None and max_model_len > longest:
        raise UsageError(
            f"the longest trial takes a context of {max_model_len} tokens but "
            f"{source.path.name} has {longest}.",
            hint="Measure shorter ones.",
        )
    report("Loading PyTorch")
    env.shorten_openmp_spins()
    from tiercel.config import LoadOptions
    from tiercel.ipc.load import load_ranks

    options = LoadOptions(
        device=engine.device,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        numerics=engine.numerics,
        max_model_len=engine.max_model_len or max_model_len,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        threads=engine.threads,
        seed=seed,
        offline=engine.offline,
        tensor_parallel_size=engine.tensor_parallel_size,
        expert_parallel=engine.expert_parallel,
        data_parallel_attention=engine.data_parallel_attention,
    )
    return load_ranks(source, options, report)


def facts(loaded: LoadedModel, label: str | None) -> dict[str, Any]:
    """Facts in every result: command, time, versions, hardware, switches, model."""
    from tiercel import env
    from tiercel.bench import environment
    from tiercel.version import __version__

    return {
        "command": environment.command_line(sys.argv),
        "utc": environment.utc_now(),
        "label": label or f"tiercel {__version__}",
        "versions": environment.versions("torch", "triton"),
        "hardware": environment.hardware(),
        "switches": env.switches(),
        "model": loaded.source.path.name,
        "dtype": str(loaded.config.dtype).removeprefix("torch."),
    }


def show(
    told: dict[str, Any],
    report: msgspec.Struct,
    table: Table,
    json: Path | None,
    plot: Path | None,
    bars: tuple[list[str], list[float], str],
) -> None:
    """Write the table, and the requested files.

    Args:
        told: facts from `facts`.
        report: the report for `json`.
        table: the table for standard output.
        json: path of the JSON file, or None.
        plot: path of the figure, or None.
        bars: names, values and the unit of the values, for the figure.
    """
    from tiercel.bench.files import save

    if json is not None:
        save(report, json)
    title = f"{told['label']}: {told['model']}"
    write_table(title, table)
    if plot is not None:
        from tiercel.bench.bars import draw_bars
        from tiercel.bench.environment import machine_name

        draw_bars(*bars, f"{title}; {machine_name(told['hardware'])}", plot)
