"""`tiercel bench` and `bench speed`: prompts, decode steps and batches as in llama-bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tiercel.cli.bench_model import TRIAL_GROUP, facts, load_for_bench, open_for_bench, show
from tiercel.cli.bench_options import check_output, parse_counts
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName
from tiercel.cli.terminal import ProgressReporter, UsageError

if TYPE_CHECKING:
    from tiercel.bench.speed import Speed, Trial, TrialDefaults

MAX_REPETITIONS = 1000


def bench_speed(
    *,
    prompt: Annotated[
        str | None,
        Parameter(group=TRIAL_GROUP, help="Prompt tokens; 0 for none [512,1008,4096]."),
    ] = None,
    generate: Annotated[int, Parameter(group=TRIAL_GROUP, help="Decode steps; 0 for none.")] = 128,
    depth: Annotated[
        str | None,
        Parameter(group=TRIAL_GROUP, help="Tokens in the cache before them: 0,8192 [0]."),
    ] = None,
    batch: Annotated[
        str | None,
        Parameter(group=TRIAL_GROUP, help="Sequences per step: 8,16,64; 0 for none [0]."),
    ] = None,
    batch_prompt: Annotated[
        int | None, Parameter(group=TRIAL_GROUP, help="Prompt tokens of each sequence [512].")
    ] = None,
    repetitions: Annotated[
        int,
        Parameter(name=("--repetitions", "--repeat"), group=TRIAL_GROUP, help="Runs per trial."),
    ] = 5,
    seed: Annotated[int, Parameter(group=TRIAL_GROUP, help="Seed of the token ids.")] = 0,
    json: Annotated[Path | None, Parameter(group=TRIAL_GROUP, help="Write everything.")] = None,
    plot: Annotated[Path | None, Parameter(group=TRIAL_GROUP, help="Plot it.")] = None,
    label: Annotated[str | None, Parameter(group=TRIAL_GROUP, help="Name in the table.")] = None,
    model: ModelName = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure prompts, decode steps and batches, as llama-bench does.

    DeepSeek-V4 has other defaults: prompt 4096, depth 1024,32768,131072, batch 8,64 after 1024.
    """
    from tiercel.bench.speed import TrialDefaults, default_trials

    given = prompt, depth, batch, batch_prompt
    _trials(given, generate, TrialDefaults())  # what is wrong in any model is refused at once
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions {repetitions} is out of range.", hint="Use 1 to 1000.")
    check_output(json, plot)
    done: list[Speed] = []
    is_partial = False
    with ProgressReporter(is_quiet=common.quiet) as report:
        from tiercel.bench.floor import model_cost
        from tiercel.bench.speed import SpeedReport, compare_to_floor, context_of, measure_speed

        source = open_for_bench(model, engine, report)
        trials = _trials(given, generate, default_trials(source.config, generate))
        loaded = load_for_bench(
            source,
            engine,
            report,
            max_model_len=context_of(trials),
            max_num_seqs=max(trial.batch for trial in trials),
            seed=seed,
        )
        from tiercel.profiling.device_timing import Ceilings, measure_ceilings

        report("Measuring the device")
        cost = model_cost(loaded.source, loaded.config.dtype.itemsize)
        ceilings = measure_ceilings(loaded.config.device, loaded.config.dtype, cost.weight_bytes)
        count = engine.tensor_parallel_size  # together GPUs read and multiply so much faster
        together = Ceilings(count * ceilings.read_gbps, count * ceilings.tflops)
        try:
            done.extend(
                compare_to_floor(trial, rates, cost, together)
                for trial, rates in measure_speed(loaded, trials, repetitions, seed, report)
            )
        except KeyboardInterrupt:
            if not done:
                raise
            is_partial = True
        finally:
            loaded.peers.close()
    from tiercel.bench.speed import speed_table

    told = facts(loaded, label)
    names = [speed.trial.name for speed in done]
    bars = (names, [speed.mean for speed in done], "tokens per second")
    result = SpeedReport(
        **told,
        seed=seed,
        cost=cost,
        read_gbps=ceilings.read_gbps,
        tflops=ceilings.tflops,
        results=done,
    )
    show(told, result, speed_table(done), json, plot, bars)
    return 130 if is_partial else 0


def _trials(
    given: tuple[str | None, str | None, str | None, int | None],
    steps: int,
    defaults: TrialDefaults,
) -> list[Trial]:
    """The trials of the options `prompt`, `depth`, `batch` and `batch_prompt`."""
    from tiercel.bench.speed import make_trials

    prompt, depth, batch, batch_prompt = given
    batch_prompt = defaults.batch_prompt if batch_prompt is None else batch_prompt
    if steps < 0 or batch_prompt < 1:
        raise UsageError(
            f"--generate {steps} or --batch-prompt {batch_prompt} is out of range.",
            hint="Use counts.",
        )
    prompts, batches = (
        [count for count in parse_counts(name, text) if count]
        for name, text in (
            ("--prompt", defaults.prompt if prompt is None else prompt),
            ("--batch", defaults.batch if batch is None else batch),
        )
    )
    depths = parse_counts("--depth", defaults.depth if depth is None else depth)
    trials = make_trials(prompts, steps, depths, batches, batch_prompt)
    if not trials:
        raise UsageError("there is nothing to measure.", hint="Give --prompt or --generate.")
    return trials
