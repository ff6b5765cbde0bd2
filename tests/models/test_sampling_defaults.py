"""Sampling defaults of a model's publisher: generation_config.json and `general.sampling.*`."""

import asyncio
import json
import logging
import math

import gguf
import pytest

from tests.gguf_files import tiny_model
from tests.models.test_hf import make_checkpoint
from tiercel.async_llm import AsyncLLM
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.ipc.startup import describe
from tiercel.llm import LLM
from tiercel.models.sampling_defaults import GGUF_KEYS, HF_KEYS, read_sampling_defaults
from tiercel.models.source import open_source
from tiercel.params import SamplingDefaults, SamplingParams

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
)
IN_GGUF = {
    "general.sampling.temp": 0.6,
    "general.sampling.top_p": 0.95,
    "general.sampling.top_k": 20,
    "general.sampling.min_p": 0.05,
    "general.sampling.penalty_repeat": 1.1,
}
WRONG = {
    "temperature": [-1, 2.5, "hot", True, [0.7], math.nan],
    "top_p": [0, 1.5, {}],
    "top_k": [-2, 0.5],
    "min_p": [2],
    "repetition_penalty": [0, 11],
}


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_gguf_file_holds_them_as_metadata(tmp_path, caplog):
    source = open_source(tiny_model(tmp_path / "m.gguf", metadata=IN_GGUF))
    assert source.sampling_defaults == DEFAULTS  # 0.6, not the float32 0.6000000238
    assert open_source(tiny_model(tmp_path / "n.gguf")).sampling_defaults == SamplingDefaults()
    assert not warnings(caplog)


def test_the_keys_are_those_of_the_gguf_format():
    general = gguf.Keys.General
    assert list(GGUF_KEYS) == [
        general.SAMPLING_TEMP,
        general.SAMPLING_TOP_P,
        general.SAMPLING_TOP_K,
        general.SAMPLING_MIN_P,
        general.SAMPLING_PENALTY_REPEAT,
    ]


def test_a_folder_holds_them_in_its_generation_config(tmp_path, caplog):
    make_checkpoint(tmp_path, "gemma3")
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    values |= {"repetition_penalty": 1.1, "eos_token_id": [1, 2]}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(values))
    assert open_source(tmp_path).sampling_defaults == DEFAULTS
    path.write_text(json.dumps({"temperature": 0.6, "top_p": None, "do_sample": False}))
    assert open_source(tmp_path).sampling_defaults == SamplingDefaults(temperature=0.6)
    path.write_text(json.dumps({"temperature": "hot", "top_k": 20}))
    assert open_source(tmp_path).sampling_defaults == SamplingDefaults(top_k=20)
    path.unlink()
    assert open_source(tmp_path).sampling_defaults == SamplingDefaults()
    (warning,) = warnings(caplog)
    assert f"{tmp_path.name}/generation_config.json" in warning


@pytest.mark.parametrize("name", HF_KEYS)
def test_a_wrong_value_is_left_out(name):
    for value in WRONG[name]:
        found = read_sampling_defaults({"top_p": 0.9, name: value}, HF_KEYS, "g.json")
        assert getattr(found, name) is None
        assert name == "top_p" or found.top_p == 0.9


def test_one_warning_names_every_wrong_value(caplog):
    values = {"temperature": "hot", "top_p": 7, "top_k": 20}
    read_sampling_defaults(values, HF_KEYS, "m/generation_config.json")
    assert warnings(caplog) == [
        "m/generation_config.json: sampling defaults are ignored: temperature is 'hot'; Use 0.0"
        " (greedy) to 2.0. top_p is 7; Use above 0.0, up to 1.0."
    ]


def test_a_value_wins_over_those_below_it():
    over = SamplingDefaults(temperature=0.0, top_k=3).over(SamplingDefaults(0.5, 0.9))
    assert over == SamplingDefaults(temperature=0.0, top_p=0.9, top_k=3)


def test_the_python_api_gives_them_as_parameters(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", metadata=IN_GGUF)
    with LLM(path, device="cpu") as llm:
        params = llm.default_sampling_params()
    assert params == SamplingParams(**DEFAULTS.given())

    async def ask():
        async with AsyncLLM(path, device="cpu") as llm:
            return await llm.default_sampling_params()

    assert asyncio.run(ask()) == params


def test_the_engine_tells_them_to_the_server(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", metadata=IN_GGUF)
    loaded = load_model(path, LoadOptions(device="cpu"), None)
    assert describe(loaded, 0.0).sampling_defaults == DEFAULTS
