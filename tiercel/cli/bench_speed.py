"""`tiercel bench speed`: prompts, decoding and batches with the definitions of llama-bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tiercel.cli.bench_options import parse_counts, write_table
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName
from tiercel.cli.terminal import ProgressReporter, UsageError

if TYPE_CHECKING:
    from tiercel.bench.speed import Speed, Trial
    from tiercel.engine.build import LoadedModel

TRIAL_GROUP = Group("Trials", sort_key=1)
MAX_REPETITIONS = 1000


def bench_speed(
    *,
    prompt: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Prompt tokens: 512,1008; 0 for none.")
    ] = "512,1008,4096",
    generate: Annotated[int, Parameter(group=TRIAL_GROUP, help="Steps; 0 for none.")] = 128,
    depth: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Tokens in the cache before them: 0,8192.")
    ] = "0",
    batch: Annotated[
        str, Parameter(group=TRIAL_GROUP, help="Sequences together: 8,16,64; 0 for none.")
    ] = "0",
    batch_prompt: Annotated[
        int, Parameter(group=TRIAL_GROUP, help="Prompt tokens of each of them.")
    ] = 512,
    repetitions: Annotated[int, Parameter(group=TRIAL_GROUP, help="Of each trial.")] = 5,
    seed: Annotated[int, Parameter(group=TRIAL_GROUP, help="Of the token ids.")] = 0,
    json: Annotated[Path | None, Parameter(group=TRIAL_GROUP, help="Write everything.")] = None,
    label: Annotated[str | None, Parameter(group=TRIAL_GROUP, help="Name in the table.")] = None,
    model: ModelName = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure prompts, decode steps and batches, as llama-bench does."""
    trials = _trials(prompt, generate, depth, batch, batch_prompt)
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions {repetitions} is out of range.", hint="Use 1 to 1000.")
    done: list[Speed] = []
    is_partial = False
    with ProgressReporter(is_quiet=common.quiet) as report:
        loaded = _load(model, trials, seed, engine, report)
        from tiercel.bench.speed import measure_speed

        try:
            done.extend(measure_speed(loaded, trials, repetitions, seed, report))
        except KeyboardInterrupt:
            if not done:
                raise
            is_partial = True
    _show(loaded, done, seed, label, json)
    return 130 if is_partial else 0


def _trials(prompt: str, steps: int, depth: str, batch: str, batch_prompt: int) -> list[Trial]:
    from tiercel.bench.speed import make_trials

    if steps < 0 or batch_prompt < 1:
        raise UsageError(
            f"--generate {steps} or --batch-prompt {batch_prompt} is out of range.",
            hint="Use counts.",
        )
    prompts, batches = (
        [count for count in parse_counts(name, text) if count]
        for name, text in (("--prompt", prompt), ("--batch", batch))
    )
    trials = make_trials(prompts, steps, parse_counts("--depth", depth), batches, batch_prompt)
    if not trials:
        raise UsageError("there is nothing to measure.", hint="Give --prompt or --generate.")
    return trials


def _load(
    model: str | None,
    trials: list[Trial],
    seed: int,
    engine: EngineOptions,
    report: ProgressReporter,
) -> LoadedModel:
    """The model, with room for the largest trial."""
    from tiercel import env
    from tiercel.bench.speed import context_of
    from tiercel.loader.hub import resolve

    path = resolve(model, offline=engine.offline, report=report)
    report("Loading PyTorch")
    env.shorten_openmp_spins()
    from tiercel.engine.build import load_model
    from tiercel.engine.messages import LoadOptions

    options = LoadOptions(
        device=engine.device,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len or context_of(trials),
        max_num_seqs=max(trial.batch for trial in trials),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        seed=seed,
        offline=engine.offline,
    )
    return load_model(path, options, report)


def _show(
    loaded: LoadedModel, done: list[Speed], seed: int, label: str | None, json: Path | None
) -> None:
    import tiercel
    from tiercel import env
    from tiercel.bench import environment
    from tiercel.bench.speed import SpeedReport, save_speed, speed_table

    label = label or f"tiercel {tiercel.__version__}"
    name = loaded.source.path.name
    if json is not None:
        report = SpeedReport(
            command=environment.command_line(sys.argv),
            utc=environment.utc_now(),
            label=label,
            versions=environment.versions("torch", "triton"),
            hardware=environment.hardware(),
            switches=env.switches(),
            model=name,
            dtype=str(loaded.config.dtype).removeprefix("torch."),
            seed=seed,
            results=done,
        )
        save_speed(report, json)
    write_table(f"{label}: {name}", speed_table(done))
