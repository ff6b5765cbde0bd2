"""Prompts, steps and batches: the work that runs, and the tokens that are counted."""

from dataclasses import replace

import msgspec
import pytest

from tests.dsv4_files import TINY as TINY_V4
from tests.tiny_llm import DATA, LLAMA
from tiercel.bench import speed
from tiercel.bench.floor import Entries, ModelCost, model_cost
from tiercel.bench.speed import (
    Trial,
    TrialDefaults,
    compare_to_floor,
    context_of,
    default_trials,
    make_trials,
    measure_speed,
    speed_table,
)
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.errors import ContextLengthError
from tiercel.models.source import open_source
from tiercel.profiling.device_timing import Ceilings


def load(trials):
    options = LoadOptions(
        device="cpu",
        dtype="float32",
        max_model_len=context_of(trials),
        max_num_seqs=max(trial.batch for trial in trials),
    )
    return load_model(LLAMA, options, None)


class Clock:
    """A clock whose readings are one second apart."""

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
    assert context_of([Trial(1, 0, 4)]) == 1 + 4 + speed.SPARE_TOKENS  # after a token
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
    assert [rates for _, rates in results] == [[40.0] * 2, [6.0] * 2, [15.0] * 2]
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


COST = ModelCost(
    weight_bytes=1000,
    layer_weights=100,
    head_weights=10,
    key_bytes=6,
    attention_width=5,
    windows={0: 2, 3: 1},
)
READS = Ceilings(read_gbps=1e-9, tflops=1e9)  # a byte a second; operations for nothing
COMPUTES = Ceilings(read_gbps=1e9, tflops=1e-12)


@pytest.mark.parametrize(
    ("trial", "num_bytes", "flops"),
    [
        # Keys seen at lengths 1 to 4: 10 in each of two layers, 1 + 2 + 3 + 3 in the third.
        (Trial(1, 4), 1000, 2 * (4 * 100 + 10) + 4 * 5 * (2 * 10 + 9)),
        (Trial(3, 0, 4), 4 * 1000 + 3 * 6 * 29, 12 * 2 * 110 + 3 * 4 * 5 * 29),
        (Trial(1, 7, 1), 1000 + 6 * (2 * 8 + 3), 2 * 110 + 4 * 5 * (2 * 8 + 3)),
    ],
    ids=["prompt", "batch", "depth"],
)
def test_the_floor_is_bytes_or_operations(trial, num_bytes, flops):
    assert compare_to_floor(trial, [1.0], COST, READS).floor == trial.num_tokens / num_bytes
    assert compare_to_floor(trial, [1.0], COST, COMPUTES).floor == trial.num_tokens / flops


def test_deepseek_v4_costs_experts_and_compressed_entries():
    source = open_source(TINY_V4)
    cost = model_cost(source, 2)
    stored = source.stored
    experts = sum(w.nbytes for n, w in stored.items() if "layers." in n and ".experts." in n)
    main = [w for n, w in stored.items() if n.startswith("layers.") and not w.limit]
    all_bytes = sum(weight.nbytes for weight in main)
    assert cost.weight_bytes == 131 * 160 * 2 + all_bytes - experts
    assert (cost.expert_bytes, cost.expert_share) == (experts, 2 / 6)
    assert cost.head_weights == 131 * 160
    assert cost.windows == {12: 4}
    assert cost.key_bytes == 64 + 2 * 32 + 8  # one scale, in a group of 8 bytes
    csa, hca = cost.entries
    config = source.config
    assert (csa.layers, csa.ratio, csa.most) == (2, 4, 7)
    assert csa.index_width == config.index_num_heads * config.index_head_dim
    assert csa.index_bytes == config.index_head_dim * 17 // 32
    assert (hca.layers, hca.ratio, hca.most, hca.index_bytes) == (2, 128, 0, 0)


def test_the_floor_counts_entries_index_keys_and_chosen_experts():
    entries = (
        Entries(layers=2, ratio=4, most=3, index_bytes=7, index_width=11),
        Entries(layers=1, ratio=8),
    )
    cost = msgspec.structs.replace(
        COST, windows={3: 3}, entries=entries, expert_bytes=900, expert_share=1 / 3
    )
    # Steps at lengths 33 and 34: windows of 3, at most 3 of 8 entries in two layers, all 4 in one.
    seen = 3 * 3 + 2 * 3 + 4
    for batch, chosen in ((1, 300.0), (2, 500.0)):
        trial = Trial(batch, 32, 2)
        num_bytes = 1000 + chosen + batch * (seen * 6 + 2 * 8 * 7)
        flops = batch * (2 * 110 + 4 * 5 * seen + 2 * 2 * 8 * 11)
        for ceilings, expected in ((READS, num_bytes), (COMPUTES, flops)):
            floor = compare_to_floor(trial, [1.0], cost, ceilings).floor
            assert floor == pytest.approx(batch / expected)


def test_defaults_of_deepseek_v4_fit_its_context():
    config = open_source(TINY_V4).config
    long = replace(config, max_position=1 << 20)
    assert default_trials(long, 128) == TrialDefaults(
        prompt="4096", depth="1024,32768,131072", batch="8,64", batch_prompt=1024
    )
    short = default_trials(replace(config, max_position=2048), 128)
    assert (short.prompt, short.depth, short.batch) == ("0", "1024", "8,64")
    shorter = default_trials(replace(config, max_position=1024 + 64 + 100), 128)
    assert (shorter.prompt, shorter.depth, shorter.batch) == ("0", "0", "0")
    least = default_trials(replace(config, max_position=256), 128)
    assert (least.prompt, least.depth, least.batch) == ("0", "0", "0")
    dense = open_source(DATA / "gemma3-tiny.gguf").config
    assert default_trials(dense, 128) == TrialDefaults()


def test_a_model_costs_what_its_file_holds():
    source = open_source(DATA / "gemma3-tiny.gguf")
    cost = model_cost(source, 2)
    config, size = source.config, {n: i.nbytes for n, i in source.tensors.items()}
    assert cost.weight_bytes == sum(size.values()) - size["output_norm.weight"]  # tied
    width, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * width + 2 * keys + 3 * config.intermediate_size)
    assert cost.layer_weights == 2 * layer
    assert cost.head_weights == config.vocab_size * config.hidden_size
    assert (cost.key_bytes, cost.attention_width) == (4 * keys, width)
    assert cost.windows == {6: 1, 0: 1}


def test_the_table_has_means_deviations_and_floors():
    trials = [(Trial(1, 4), [1000.0, 2000.0]), (Trial(1, 0, 4), [7.0])]
    table = speed_table([compare_to_floor(*trial, COST, READS) for trial in trials])
    assert table[1] == ["pp4", "1,500.0", "707.1", "0.0", "37500000%"]
    assert table[2][:3] == ["tg4 @ d0", "7.0", "0.0"]
    assert len(table[0]) == 5


def test_the_table_has_the_share_that_depth_leaves():
    trials = [(Trial(1, 9), 5.0), (Trial(1, 2, 4), 8.0), (Trial(1, 6, 4), 7.0), (Trial(2, 6, 4), 9)]
    table = speed_table([compare_to_floor(t, [rate], COST, READS) for t, rate in trials])
    assert [row[5] for row in table] == ["of d2", "", "100%", "88%", ""]
