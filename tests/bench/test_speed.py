"""Prompts, steps and batches: what is run, and what is counted."""

import pytest

from tests.tiny_llm import LLAMA
from tiercel.bench import speed
from tiercel.bench.speed import Speed, Trial, context_of, make_trials, measure_speed, speed_table
from tiercel.engine.build import load_model
from tiercel.engine.messages import LoadOptions
from tiercel.errors import ContextLengthError


def load(trials):
    options = LoadOptions(
        device="cpu",
        dtype="float32",
        max_model_len=context_of(trials),
        max_num_seqs=max(trial.batch for trial in trials),
    )
    return load_model(LLAMA, options, None)


class Clock:
    """Each reading is a second after the one before."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_trials_are_those_of_the_options():
    trials = make_trials([512, 4096], 128, [0, 8192], [8], 500)
    names = ["pp512", "pp4096", "tg128 @ d0", "tg128 @ d8192", "tg128 @ d500 b8"]
    assert [trial.name for trial in trials] == names
    assert context_of(trials) == 8192 + 128 + speed.SPARE_TOKENS
    assert make_trials([512], 0, [0, 8192], [8], 500) == [Trial(1, 512)]


def test_rates_count_what_is_named(monkeypatch):
    trials = [Trial(1, 40), Trial(1, 0, 6), Trial(3, 20, 5)]
    loaded, heard, steps = load(trials), [], []
    step = loaded.engine.step
    monkeypatch.setattr(speed, "perf_counter", Clock())
    monkeypatch.setattr(loaded.engine, "step", lambda: steps.append(step()) or steps[-1])
    results = list(measure_speed(loaded, trials, 2, 0, heard.append))
    assert heard == [f"Measuring {trial.name}" for trial in trials]
    # A second by that clock: the rate is the number of tokens.
    assert [result.rates for result in results] == [[40.0] * 2, [6.0] * 2, [15.0] * 2]
    assert not loaded.engine.has_work
    full = [updates for updates in steps if len(updates) == 3]
    assert len(full) >= 3 * 5  # every timed step of the batch has a token of each


def test_every_run_has_tokens_of_its_own(monkeypatch):
    trials = [Trial(1, 30)]
    loaded, seen = load(trials), []
    submit = loaded.engine.submit
    monkeypatch.setattr(
        loaded.engine,
        "submit",
        lambda request: seen.append(request.prompt_token_ids) or submit(request),
    )
    for seed in (0, 1):
        list(measure_speed(loaded, trials, 2, seed, lambda text: None))
    assert len({tuple(ids) for ids in seen}) == 6
    assert max(map(max, seen)) < loaded.source.config.vocab_size


def test_a_trial_that_does_not_fit_is_refused():
    loaded = load([Trial(1, 10)])
    with pytest.raises(ContextLengthError):
        list(measure_speed(loaded, [Trial(1, 500)], 1, 0, lambda text: None))


def test_the_table_has_means_and_deviations():
    table = speed_table([Speed(Trial(1, 512), [1000.0, 2000.0]), Speed(Trial(1, 0, 4), [7.0])])
    assert table[1] == ["pp512", "1,500.0", "707.1"]
    assert table[2] == ["tg4 @ d0", "7.0", "0.0"]
