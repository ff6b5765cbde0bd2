"""One layer of each kind stands for all: for loading kernels and for measuring memory."""

import numpy as np
import pytest
import torch

from tests.gguf_files import quantised, tiny_model
from tests.tiny_llm import open_tiny
from tiercel.layers.decoder_layer import DecoderLayer


def sampled(llm, monkeypatch):
    """Places of the layers that `forward_sample` takes, for a prompt of 5 tokens."""
    model, seen = llm._engine.runner.model, []
    real = DecoderLayer.__call__

    def watched(self, *arguments):
        seen.append(model.layers.index(self))
        return real(self, *arguments)

    monkeypatch.setattr(DecoderLayer, "__call__", watched)
    whole, sample = model.forward, model.forward_sample
    results = []
    monkeypatch.setattr(model, "forward_sample", lambda b: results.append(sample(b)) or whole(b))
    llm._engine.runner.run_scratch([5])
    assert results[0].shape == (5, 64)
    assert torch.isfinite(results[0]).all()
    num = len(model.layers)
    assert seen[-num:] == list(range(num))
    return seen[:-num]


@pytest.mark.usefixtures("without_native")
def test_types_of_matrices_make_kinds(tmp_path, monkeypatch):
    matrix = quantised(np.random.default_rng(0).normal(size=(64, 128)) / 8, "Q4_0")
    other = {"blk.2.ffn_down.weight": matrix, "blk.4.ffn_down.weight": matrix}
    path = tiny_model(tmp_path / "m.gguf", layers=5, tensors=other)
    with open_tiny(path) as llm:
        assert sampled(llm, monkeypatch) == [0, 1, 2]


@pytest.mark.usefixtures("without_native")
def test_windows_make_kinds(tmp_path, monkeypatch):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", layers=4)
    with open_tiny(path) as llm:
        kinds = llm.source.config.layer_types
        assert kinds[0] != kinds[1] != kinds[2]
        assert sampled(llm, monkeypatch) == [0, 1, 2]
