"""Layers with each toggle: the benchmark's oracle and batch, on a CPU's path."""

import pytest
import torch

from benchmarks.e2e_layers import WAYS, Loaded, error_of, switched


@pytest.mark.parametrize("way", ["default", "all, 24 MB of keys"])
def test_layers_match_the_oracle(way):
    """Seven requests in blocks that end within the context."""
    with switched(WAYS[way]):
        loaded = Loaded("qwen3-8b", 1, 16, torch.device("cpu"))
        assert error_of(loaded, 7, 70) < 1e-5
