"""Options of `LLM`: wrong ones are refused by name."""

import inspect
import os
import subprocess
import sys

import msgspec
import pytest

from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA, open_tiny
from tiercel.async_llm import AsyncLLM
from tiercel.config import LoadOptions
from tiercel.errors import ArgumentError
from tiercel.kernels.native import library
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
        ({"kv_dtype": "int8"}, "kv_dtype='int8' is unknown"),
        ({"kv_dtype": None}, "kv_dtype=None is unknown"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8': a llama model keeps keys and values in its dtype"),
        ({"kv_dtype": "bf16"}, "kv_dtype='bf16': a llama model"),
        ({"numerics": "fast"}, "numerics='fast' is unknown"),
        ({"numerics": "native"}, "numerics='native': a llama model has no other products"),
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


def test_llm_and_async_llm_take_the_same_options():
    own, others = (inspect.signature(kind).parameters for kind in (LLM, AsyncLLM))
    assert dict(own) == dict(others)
    defaults = {field.name: field.default for field in msgspec.structs.fields(LoadOptions)}
    for name in own.keys() - {"model", "progress"}:
        assert own[name].default == defaults[name], name
    of_servers = {"enable_fault_injection", "warm_up", "timed_steps"}
    of_servers |= {"replica", "num_replicas", "ranks_per_host"}
    assert defaults.keys() - own.keys() == of_servers
    scores, others = (inspect.signature(kind.score).parameters for kind in (LLM, AsyncLLM))
    assert dict(scores) == dict(others) | {"progress": scores["progress"]}


def test_none_is_the_default_of_every_count():
    """`tensor_parallel_size` started ranks, whose number was None, and waited for them."""
    counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_spec_tokens")
    with open_tiny(**dict.fromkeys((*counts, "seed", "threads", "tensor_parallel_size"))) as llm:
        assert llm.config.tensor_parallel_size == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_can_load_a_model():
    """Where PyTorch's threads have run before, and in the child they do not."""
    done = subprocess.run(
        [sys.executable, "-c", _FORK, str(LLAMA)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.returncode) == ("True\n0\n", 0), done.stderr


_FORK = """
import os, signal, sys, torch
from tiercel import LLM
from tiercel.engine import load  # as the first LLM of a process does
torch.set_num_threads(2)
torch.ones(1 << 20).add(1)
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    signal.alarm(20)
    with LLM(sys.argv[1], device="cpu", threads=2) as llm:
        print(len(llm.logits([1, 2])) == 2, flush=True)
    os._exit(0)
"""


def test_a_native_library_that_is_missing_is_a_warning(monkeypatch, caplog):
    """And not one that the user has left out."""
    for reason, value, level in (
        ("plain.so is not built.", "1", "WARNING"),
        ("TIERCEL_NATIVE=0", "0", "INFO"),
    ):
        caplog.clear()
        monkeypatch.setattr(library, "_find", lambda *_, reason=reason: reason)
        monkeypatch.setenv("TIERCEL_NATIVE", value)
        with caplog.at_level("INFO"), open_tiny():
            pass
        (record,) = [one for one in caplog.records if "Native library" in one.message]
        assert (record.message, record.levelname) == (f"Native library: not used: {reason}", level)
