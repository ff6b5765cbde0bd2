"""Which fused kernels run a model: from a file's header, at load, and in the log."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.gguf_files import tiny_model
from tests.large_models import sparse_model
from tests.tiny_llm import open_tiny
from tiercel.kernels.fused.fused_refusal import Refusal
from tiercel.models.fused_paths import (
    FUSED_PATHS,
    decoder_shape,
    log_fused_paths,
    refuse_model,
    step_copy_bytes,
    switched_off,
    unsupported_part,
)
from tiercel.models.sharding import Sharding
from tiercel.models.source import open_source

CPU = "the device is cpu, not a GPU"


@pytest.mark.parametrize(
    ("name", "types", "step", "tail"),
    [
        ("qwen3-8b", {}, None, None),
        (
            "qwen3-0.6b",
            {},
            None,
            "hidden_size is 1024; below 2048 and from 8192 on single kernels are as fast",
        ),
        (
            "qwen3-8b",
            {"Q6_K": "Q5_K"},
            None,
            "down: Q5_K; the kernel reads Q4_K and Q6_K (after the attention of layer 0)",
        ),
        (
            "qwen3-8b",
            {"Q4_K": "F16"},
            "q of layer 0 is F16; the kernel reads Q4_K, Q6_K, Q5_K, Q4_0, Q8_0, IQ4_XS, Q5_0 and "
            "IQ4_NL",
            "o: F16; the kernel reads Q4_K and Q6_K (after the attention of layer 0)",
        ),
        ("qwen3-1.7b", {}, None, None),
        (
            "qwen3-8b",
            {"Q6_K": "Q4_0"},
            "not timed on a GPU with matrices in Q4_0; TIERCEL_MEGAKERNEL=1 uses it",
            "down: Q4_0; the kernel reads Q4_K and Q6_K (after the attention of layer 0)",
        ),
    ],
    ids=str,
)
def test_published_files(tmp_path, name, types, step, tail):
    source = open_source(sparse_model(tmp_path / "m.gguf", name, **types))
    expected = (None if reason is None else Refusal(reason) for reason in (step, tail))
    assert refuse_model(source) == dict(zip(FUSED_PATHS, expected, strict=True))


def test_ranks_have_parts_of_the_copy(tmp_path, monkeypatch):
    """Also where fewer key/value heads than ranks are there, and parts are unequal."""
    source = open_source(sparse_model(tmp_path / "m.gguf", "qwen3-8b"))
    whole, ranks = step_copy_bytes(source), [Sharding(rank, 8) for rank in range(8)]
    assert step_copy_bytes(source, ranks[0]) == 0
    monkeypatch.setenv("TIERCEL_MEGAKERNEL", "1")
    assert sum(step_copy_bytes(source, rank) for rank in ranks) == whole
    monkeypatch.setenv("TIERCEL_ONE_COPY", "1")
    assert step_copy_bytes(source) == 0
    assert step_copy_bytes(source, ranks[0]) == whole / 8
    wide = replace(source.config, num_kv_heads=2, intermediate_size=13 * 256)
    shapes = [decoder_shape(wide, 100, rank) for rank in ranks]
    assert {(s.num_heads, s.num_kv_heads, s.ranks) for s in shapes} == {(4, 1, 8)}
    assert sorted(s.intermediate_size for s in shapes) == [256] * 3 + [512] * 5


@pytest.mark.parametrize(
    ("arch", "part"),
    [
        ("llama", ""),
        ("qwen2", "q, k and v have biases"),
        ("gemma3", "the activation is gelu_tanh, not silu"),
    ],
)
def test_a_part_that_no_tail_has_is_named(tmp_path, arch, part):
    source = open_source(tiny_model(tmp_path / "m.gguf", arch))
    assert unsupported_part(source.config) == part
    found = refuse_model(source)["fused_layer_tail"].reason
    assert found == part or (not part and found.startswith("hidden_size is"))


@pytest.mark.parametrize(
    ("values", "step", "tail"),
    [
        ({}, None, None),
        ({"MEGAKERNEL": "0"}, "TIERCEL_MEGAKERNEL=0", None),
        ({"DECODE_CHAIN": "0"}, None, "TIERCEL_DECODE_CHAIN=0"),
        ({"INT8_ACTIVATIONS": "0"}, "TIERCEL_INT8_ACTIVATIONS=0", None),
        ({"EXACT": "1"}, "TIERCEL_EXACT=1", "TIERCEL_EXACT=1"),
    ],
    ids=str,
)
def test_a_switch_is_named(monkeypatch, values, step, tail):
    for name in ("MEGAKERNEL", "DECODE_CHAIN", "INT8_ACTIVATIONS", "EXACT"):
        monkeypatch.delenv(f"TIERCEL_{name}", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(f"TIERCEL_{name}", value)
    named = zip(FUSED_PATHS, (step, tail), strict=True)
    expected = {name: Refusal(f"switched off by {switch}") for name, switch in named if switch}
    assert switched_off() == expected


def test_a_loaded_model_knows_its_paths():
    with open_tiny() as llm:
        paths = llm._engine.runner.model.fused_paths
    assert tuple(paths) == FUSED_PATHS
    assert paths["fused_decode_step"].startswith("hidden_size is")


def test_a_switch_is_why_a_loaded_model_has_no_path(monkeypatch):
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    with open_tiny() as llm:
        model = llm._engine.runner.model
    assert model.fused_paths == dict.fromkeys(FUSED_PATHS, "switched off by TIERCEL_EXACT=1")
    assert model.fused_decode_step is None
    assert model.fused_layer_tail is None


@pytest.mark.parametrize(("is_gpu", "level"), [(True, logging.INFO), (False, logging.DEBUG)])
def test_paths_are_logged_once_each(caplog, is_gpu, level):
    caplog.set_level(logging.DEBUG, "tiercel")
    log_fused_paths({"fused_decode_step": "used", "fused_layer_tail": CPU}, is_gpu=is_gpu)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, "fused_decode_step: used"),
        (level, f"fused_layer_tail: not used: {CPU}"),
    ]
