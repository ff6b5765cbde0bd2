"""What a model takes in memory: the plan against the tensors of a loaded one, and true shapes."""

import gc
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.dsv4_files import TINY
from tests.gguf_files import tiny_model
from tests.large_models import sparse_model
from tests.mtp_model import mtp_model
from tiercel.engine.memory import GIB, Demand, MemoryBudget
from tiercel.errors import OutOfMemoryError
from tiercel.llm import LLM
from tiercel.machine import Memory
from tiercel.models import footprint
from tiercel.models.footprint import cache_bytes, weight_footprint
from tiercel.models.source import open_source
from tiercel.ops.linear_torch import Int4Planes
from tiercel.quant_types import QuantType
from tiercel.resting import keeps_q8_planes

CPU = torch.device("cpu")


def loaded_bytes(llm):
    """Bytes of the weights of a loaded model: everything that its layers multiply or add."""
    model = llm._engine.runner.model
    linears = [model.head]
    norms = [model.norm]
    for layer in model.layers:
        linears += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
        norms += [layer.attn_norm, layer.mlp_norm]
    total = model.embedding.table.nbytes
    for linear in linears:
        for segment in linear.weight.segments:
            planes = [segment.packed, segment.scale_zero] if isinstance(segment, Int4Planes) else []
            total += sum(tensor.nbytes for tensor in planes or [segment])
    return total + sum(norm.weight.nbytes for norm in norms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("qtype", "arch"),
    [("Q8_0", "llama"), ("Q4_K", "llama"), ("Q6_K", "llama"), ("Q4_1", "qwen2")],
)
def test_the_plan_is_what_loading_makes(tmp_path, qtype, arch, dtype):
    """Tied and not, packed and dense: to the byte."""
    path = tiny_model(
        tmp_path / "m.gguf",
        arch,
        qtype=qtype,
        hidden=256,
        head_dim=64,
        ff=512,
        tied=arch != "llama",
    )
    planned = weight_footprint(open_source(path), dtype, "cpu")
    with LLM(path, device="cpu", dtype=dtype) as llm:
        biases = 0 if arch == "llama" else 2 * (256 + 128 + 128) * 4  # kept beside, in the dtype
        assert loaded_bytes(llm) == planned.nbytes - biases
    gc.collect()


def tensors_of(value, seen):
    """Tensors that an object of ours holds, by storage; pools of the cache and angles are not."""
    if id(value) in seen:
        return
    seen.append(id(value))
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
        return
    children = []
    if isinstance(value, list | tuple):
        children = list(value)
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif type(value).__module__.startswith("tiercel.") and "Cache" not in type(value).__name__:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = {*slots, *getattr(value, "__dict__", {})} - NOT_WEIGHTS
        children = [getattr(value, name) for name in names if hasattr(value, name)]
    for child in children:
        yield from tensors_of(child, seen)


NOT_WEIGHTS = {"_window", "_inputs", "_entries", "_rope", "rope"}


@pytest.mark.parametrize("spec", ["off", "mtp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_deepseek_v4_takes_what_the_plan_says(dtype, spec):
    """Joined projections are stored once, and nothing is kept beside them."""
    planned = weight_footprint(open_source(TINY), dtype, "cpu", has_draft_head=spec == "mtp")
    with LLM(TINY, device="cpu", dtype=dtype, spec=spec, max_model_len=128) as llm:
        held = {s.data_ptr(): s.nbytes() for s in tensors_of(llm._engine.runner.model, [])}
    assert sum(held.values()) == pytest.approx(planned.nbytes, rel=0.02)


def test_q8_of_deepseek_v4_counts_its_planes_on_a_gpu(monkeypatch):
    """Here all of the tiny model's matrices of FP8 are taken for Q8_0 of the same sizes."""
    source = open_source(TINY)
    found = {name: s for name, s in source.stored.items() if not name.startswith("mtp.")}
    blocks = {name: s for name, s in found.items() if s.qtype is QuantType.FP8_BLOCK}
    as_q8 = {name: replace(s, qtype=QuantType.Q8_0) for name, s in blocks.items()}
    source = replace(source, stored={**source.stored, **as_q8})
    monkeypatch.setattr(footprint, "keeps_q8_planes", lambda qtype, *_: qtype is QuantType.Q8_0)
    alone = weight_footprint(source, "bfloat16", "cuda")
    copies = weight_footprint(source, "bfloat16", "cuda", dense_copies=True)
    assert alone.forms["Q8_0"] == sum(stored.nbytes for stored in as_q8.values())
    assert copies.nbytes > alone.nbytes
    assert copies.forms["Q8_0"] == alone.forms["Q8_0"]


@pytest.mark.parametrize(
    ("qtype", "shape", "dtype", "device"),
    [
        (QuantType.Q8_0, (40, 256), "float16", "cuda"),
        (QuantType.Q8_0, (40, 256), "bfloat16", "cpu"),
        (QuantType.Q8_0, (40, 96), "bfloat16", "cuda"),
        (QuantType.Q8_0, (4, 40, 256), "bfloat16", "cuda"),
        (QuantType.Q4_K, (40, 256), "bfloat16", "cuda"),
    ],
)
def test_what_keeps_no_planes_of_q8(qtype, shape, dtype, device):
    assert keeps_q8_planes(QuantType.Q8_0, (40, 256), "bfloat16", "cuda")
    assert not keeps_q8_planes(qtype, shape, dtype, device)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return open_source(sparse_model(tmp_path_factory.mktemp("large") / "8b.gguf", "qwen3-8b"))


@pytest.mark.usefixtures("without_native")
def test_a_common_gguf_takes_little_more_than_its_file(qwen3):
    """Qwen3-8B Q4_K_M, 5.0 GB: it took 30.5 GiB where 80% of the weights pack."""
    planned = weight_footprint(qwen3, "bfloat16", "cpu")
    assert planned.nbytes / GIB == pytest.approx(6.79, abs=0.01)
    assert planned.forms["4-bit planes"] == 5_964_300_288 * 20 // 32
    assert planned.forms["bfloat16"] == 981_467_136 * 2  # Q6_K, of which there are no planes
    assert planned.forms["float16"] == 151_936 * 4096 * 2  # the output matrix
    assert planned.forms["as stored"] == 151_936 * 4096 // 256 * 144
    assert weight_footprint(qwen3, "float32", "cpu").nbytes / GIB == pytest.approx(28.5, abs=0.1)
    packed = weight_footprint(qwen3, "float16", "cuda")
    assert packed.nbytes / GIB == pytest.approx(4.68, abs=0.01)
    copies = weight_footprint(qwen3, "float16", "cuda", dense_copies=True)
    assert copies.nbytes - packed.nbytes == 2 * (6_945_767_424 + 151_936 * 4096)
    assert cache_bytes(qwen3.config, 40_960, "bfloat16") == 40_960 * 36 * 2 * 8 * 128 * 2


def test_layers_that_only_draft_count_if_they_are_loaded(tmp_path):
    source = open_source(mtp_model(tmp_path / "m.gguf"))
    with_head = weight_footprint(source, "float32", "cpu", has_draft_head=True).nbytes
    assert with_head > weight_footprint(source, "float32", "cpu").nbytes


@pytest.mark.usefixtures("without_native")
def test_a_container_of_6_gb_refuses_with_the_numbers(qwen3):
    """Neither dtype fits 80% of it: the error says what would."""
    limit = 6_000_000_000
    budget = MemoryBudget(CPU, 0.9, lambda: Memory(limit - 200_000_000, 24 * GIB, limit))
    plans = [
        Demand(weight_footprint(qwen3, dtype, "cpu"), 8, lambda num_tokens: num_tokens)
        for dtype in ("bfloat16", "float32")
    ]
    with pytest.raises(OutOfMemoryError) as caught:
        budget.check(plans[0], plans[1:])
    assert str(caught.value) == (
        "the weights need about 6.8 GiB in bfloat16 and one sequence of 8 tokens 0.0 GiB, but cpu "
        "has 4.3 GiB to use (80% of the 5.4 GiB available within a limit of 5.6 GiB)."
    )
    assert caught.value.hint == (
        "It takes 8.5 GiB of free memory; or use a smaller model or a smaller quantisation."
    )
    roomy = MemoryBudget(CPU, 0.9, lambda: Memory(12 * GIB, 24 * GIB, 12 * GIB))
    roomy.check(plans[0], plans[1:])
    with pytest.raises(OutOfMemoryError) as caught:
        roomy.check(plans[1], plans[:1])
    assert caught.value.hint == "Use --dtype bfloat16: it needs 6.8 GiB."
