"""Speed of single steps with the definitions of llama-bench: pp, tg and batched decode.

    ppN       N random tokens in one sequence with an empty cache, up to its first token
    tgN @ dD  N steps of one sequence after D tokens, which are not timed
    bB        N steps of B sequences together, after prompts that are not timed

Tokens are uniform in the vocabulary. A step is one of the engine: planned, run, sampled (greedy)
and its token on the host. One run warms up; rates are means over repetitions. llama-bench leaves
sampling out, which only makes our figures smaller. Each rate is listed with its floor (`floor.py`),
and that of a sequence at some depth with its share of the rate at the first depth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from tiercel.bench.files import ModelReport
from tiercel.bench.floor import ModelCost, floor_seconds
from tiercel.models.deepseek_v4 import DeepseekV4Config
from tiercel.params import SamplingParams

if TYPE_CHECKING:
    from tiercel.engine.load import LoadedModel
    from tiercel.models.config import ModelConfig
    from tiercel.profiling.device_timing import Ceilings

FORMAT: Final = 1
SPARE_TOKENS: Final = 64  # of each sequence: the first ones decode while others are prefilled


class TrialDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured unless the options say otherwise: lists of counts as users write them.

    Attributes:
        prompt: prompt tokens.
        depth: tokens in the cache before the steps of one sequence.
        batch: sequences that decode together; 0 for none.
        batch_prompt: prompt tokens of each of them.
    """

    prompt: str = "512,1008,4096"
    depth: str = "0"
    batch: str = "0"
    batch_prompt: int = 512


# A model that compresses its context is made for long ones, and its experts for batches.
_COMPRESSED: Final = TrialDefaults(
    prompt="4096", depth="1024,32768,131072", batch="8,64", batch_prompt=1024
)


class Trial(msgspec.Struct, frozen=True):
    """A timed trial: the prompt, or the steps after it.

    Attributes:
        batch: number of sequences.
        prompt_tokens: tokens of each sequence; in a decode trial, tokens in the cache before.
        steps: number of decode steps; 0 for a trial of prompts.
    """

    batch: int
    prompt_tokens: int
    steps: int = 0

    @property
    def name(self) -> str:
        """The name of the trial in tables."""
        if not self.steps:
            return f"pp{self.prompt_tokens}"
        depth = f"tg{self.steps} @ d{self.prompt_tokens}"
        return depth if self.batch == 1 else f"{depth} b{self.batch}"

    @property
    def context(self) -> int:
        """Tokens of each sequence at its end; steps without a prompt begin with one token."""
        return max(1, self.prompt_tokens) + self.steps

    @property
    def num_tokens(self) -> int:
        """Number of timed tokens, of all sequences."""
        return self.batch * (self.steps or self.prompt_tokens)


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A trial and its rates, tokens per second of all its sequences.

    Attributes:
        rates: rates of the repetitions.
        mean, deviation: mean and standard deviation of the rates; 0 for a single one.
        floor: rate that the device would allow.
        ratio: mean divided by the floor.
    """

    trial: Trial
    rates: list[float]
    mean: float
    deviation: float
    floor: float
    ratio: float


class SpeedReport(ModelReport, frozen=True, kw_only=True):
    """A whole measurement, with the ceilings of the same run."""

    format: int = FORMAT
    kind: str = "speed"
    seed: int
    cost: ModelCost
    read_gbps: float
    tflops: float
    results: list[Speed]


def default_trials(config: ModelConfig, steps: int) -> TrialDefaults:
    """The defaults of a model: depths and prompts that its context has room for."""
    if not isinstance(config, DeepseekV4Config):
        return TrialDefaults()
    room = config.max_position - SPARE_TOKENS

    def fitting(text: str, steps: int) -> str:
        counts = [count for count in map(int, text.split(",")) if count + steps <= room]
        return ",".join(map(str, counts)) or "0"

    has_batches = _COMPRESSED.batch_prompt + steps <= room
    return TrialDefaults(
        prompt=fitting(_COMPRESSED.prompt, 0),
        depth=fitting(_COMPRESSED.depth, steps),
        batch=_COMPRESSED.batch if has_batches else "0",
        batch_prompt=_COMPRESSED.batch_prompt,
    )


def make_trials(
    prompts: Sequence[int],
    steps: int,
    depths: Sequence[int],
    batches: Sequence[int],
    batch_prompt: int,
) -> list[Trial]:
    """All trials in the order of the table; without steps, only prompts."""
    trials = [Trial(1, length) for length in prompts]
    if steps:
        trials += [Trial(1, depth, steps) for depth in depths]
        trials += [Trial(batch, batch_prompt, steps) for batch in batches]
    return trials


def context_of(trials: Sequence[Trial]) -> int:
    """Tokens that the longest sequence needs."""
    return max(trial.context for trial in trials) + SPARE_TOKENS


def measure_speed(
    loaded: LoadedModel,
    trials: Sequence[Trial],
    repetitions: int,
    seed: int,
    report: Callable[[str], None],
) -> Iterator[tuple[Trial, list[float]]]:
    """Run all trials and yield each with its rates when it is done.

    Args:
        loaded: model with room for the sequences of the largest trial, `context_of` long.
        trials: trials to run.
        repetitions: runs of each trial, after one that is not counted.
        seed: seed of the token ids.
        report: progress callback.

    Raises:
        TiercelError: a trial does not fit.
    """
    random = np.random.default_rng(seed)
    for trial in trials:
        report(f"Measuring {trial.name}")
        rates = [_run(loaded, trial, random) for _ in range(1 + repetitions)]
        yield trial, rates[1:]


def _run(loaded: LoadedModel, trial: Trial, random: np.random.Generator) -> float:
    """Tokens per second of one run."""
    engine, inputs = loaded.engine, loaded.inputs()
    params = SamplingParams(temperature=0, ignore_eos=True)
    shape = (trial.batch, max(1, trial.prompt_tokens))
    prompts = random.integers(0, loaded.source.config.vocab_size, shape).tolist()
    most = trial.steps + SPARE_TOKENS if trial.steps else 1
    requests = [inputs.request(ids, params, 0, max_tokens=most) for ids in prompts]
    began = perf_counter()
    for request in requests:
        engine.submit(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    ended = perf_counter()
    if trial.steps:
        began = ended
        for _ in range(trial.steps):
            engine.step()
        ended = perf_counter()
    for request in requests:
        if request.finish_reason is None:
            engine.abort(request)
    while engine.has_work:
        engine.step()
    return trial.num_tokens / (ended - began)


def compare_to_floor(
    trial: Trial, rates: list[float], cost: ModelCost, ceilings: Ceilings
) -> Speed:
    """Summarise the rates of a trial."""
    least = floor_seconds(cost, ceilings, trial.batch, trial.prompt_tokens, trial.steps)
    floor = trial.num_tokens / least
    mean = statistics.fmean(rates)
    return Speed(
        trial=trial,
        rates=rates,
        mean=mean,
        deviation=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        floor=floor,
        ratio=mean / floor,
    )


def speed_table(results: Sequence[Speed]) -> list[list[str]]:
    """The table with its head, one row for each trial; with several depths, a column of shares."""
    head = ["", "tokens/s", "deviation", "floor", "of floor"]
    rows = [
        [
            result.trial.name,
            f"{result.mean:,.1f}",
            f"{result.deviation:,.1f}",
            f"{result.floor:,.1f}",
            f"{result.ratio:.0%}",
        ]
        for result in results
    ]
    depths = [result for result in results if result.trial.steps and result.trial.batch == 1]
    if len(depths) < 2:
        return [head, *rows]
    first = depths[0]
    shares = [f"{r.mean / first.mean:.0%}" if r in depths else "" for r in results]
    rows = [[*row, share] for row, share in zip(rows, shares, strict=True)]
    return [[*head, f"of d{first.trial.prompt_tokens}"], *rows]
