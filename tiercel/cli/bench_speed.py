"""`tiercel bench` and `bench speed`: prompts, decode steps and batches as in llama-bench."""

from __future__ import annotations

from dataclasses import dataclass
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


@Parameter(name="*", group=TRIAL_GROUP)
@dataclass(frozen=True, slots=True)
class TrialOptions:
    """What is measured; None stands for the model's default."""

    prompt: Annotated[str | None, Parameter(help="Prompt tokens; 0 for none [512,1008,4096].")] = (
        None
    )
    generate: Annotated[int, Parameter(help="Decode steps; 0 for none.")] = 128
    depth: Annotated[str | None, Parameter(help="Tokens in the cache before them: 0,8192 [0].")] = (
        None
    )
    batch: Annotated[str | None, Parameter(help="Sequences per step: 8,16,64; 0 for none [0].")] = (
        None
    )
    batch_prompt: Annotated[int | None, Parameter(help="Prompt tokens of each sequence [512].")] = (
        None
    )
    repetitions: Annotated[
        int, Parameter(name=("--repetitions", "--repeat"), help="Runs per trial.")
    ] = 5
    seed: Annotated[int, Parameter(help="Seed of the token ids.")] = 0


def bench_speed(
    *,
    trial: TrialOptions = TrialOptions(),
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

    _trials(trial, TrialDefaults())  # what is wrong for any model is refused at once
    repetitions, seed = trial.repetitions, trial.seed
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions {repetitions} is out of range.", hint="Use 1 to 1000.")
    check_output(json, plot)
    done: list[Speed] = []
    is_partial = False
    with ProgressReporter(is_quiet=common.quiet) as report:
        from tiercel.bench.floor import model_cost
        from tiercel.bench.speed import SpeedReport, compare_to_floor, context_of, measure_speed

        source = open_for_bench(model, engine, report)
        trials = _trials(trial, default_trials(source.config, trial.generate))
        loaded = load_for_bench(
            source,
            engine,
            report,
            max_model_len=context_of(trials),
            max_num_seqs=max(one.batch for one in trials),
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


def _trials(options: TrialOptions, defaults: TrialDefaults) -> list[Trial]:
    """The trials of the options."""
    from tiercel.bench.speed import make_trials

    def counts(option: str, given: str | None, default: str) -> list[int]:
        return parse_counts(option, default if given is None else given)

    steps, batch_prompt = options.generate, options.batch_prompt
    batch_prompt = defaults.batch_prompt if batch_prompt is None else batch_prompt
    if steps < 0 or batch_prompt < 1:
        raise UsageError(
            f"--generate {steps} or --batch-prompt {batch_prompt} is out of range.",
            hint="Use counts.",
        )
    prompts = [count for count in counts("--prompt", options.prompt, defaults.prompt) if count]
    batches = [count for count in counts("--batch", options.batch, defaults.batch) if count]
    depths = counts("--depth", options.depth, defaults.depth)
    trials = make_trials(prompts, steps, depths, batches, batch_prompt)
    if not trials:
        raise UsageError("there is nothing to measure.", hint="Give --prompt or --generate.")
    return trials
