"""Layers with each toggle against the oracle: the paths of a CPU, and kernels of a GPU."""

import pytest
import torch

from benchmarks.e2e_layers import TOLERANCE, WAYS, Loaded, error_of, switched
from tiercel.ops.packed_gemm import has_packed_gemm


@pytest.mark.parametrize("way", ["default", "all, 24 MB of keys"])
def test_layers_match_the_oracle(way):
    """Seven requests in blocks that end within the context."""
    with switched(WAYS[way]):
        loaded = Loaded("qwen3-8b", 1, 16, torch.device("cpu"))
        assert error_of(loaded, 7, 70) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama3-1b"])
@pytest.mark.parametrize("way", ["norms", "heads", "image", "all, 24 MB of keys"])
def test_kernels_match_the_oracle(way, model, device):
    """Heads of 128 with norms, and of 64 without; values and down in Q6_K in the last layer."""
    if not has_packed_gemm(device):
        pytest.skip("the kernels are built for Hopper")
    with switched(WAYS[way]):
        loaded = Loaded(model, 3, 1, device)
        for tokens in (17, 64, 90):
            assert error_of(loaded, tokens, 200) < TOLERANCE
