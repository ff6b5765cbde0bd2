"""Options of `LLM`: wrong ones are refused by name."""

import pytest

from tests.tiny_llm import LLAMA
from tiercel.errors import ArgumentError
from tiercel.llm import LLM


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 2049}, "max_model_len=2049"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization='all'"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_wrong_options_are_refused_by_name(options, match):
    with pytest.raises(ArgumentError, match=match):
        LLM(LLAMA, **({"device": "cpu"} | options))


@pytest.mark.parametrize("name", ["Q4K_SOA", "CUDA_GRAPH", "PDL", "PREFILL_MMQ", "SYNC_DEBUG"])
def test_a_wrong_switch_is_refused_on_any_device(monkeypatch, name):
    monkeypatch.setenv(f"TIERCEL_{name}", "on")
    with pytest.raises(ArgumentError, match=f"TIERCEL_{name}='on' cannot be read"):
        LLM(LLAMA, device="cpu")
