"""How a decoder hands a step of one token to the kernel for whole steps."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fused_decode_step_model import (
    EPS,
    SCALE,
    V_AND_DOWN,
    cut_columns,
    make_model,
    make_shape,
    shape_of_ranks,
    shard_model,
    share_here,
)
from tests.hf_models import make_model as make_hf_model
from tests.hf_models import own_tensors, sample_config, write_folder
from tests.mtp_model import mtp_model
from tests.packed_weights import LAYOUTS
from tests.tiny_llm import greedy, open_tiny
from tiercel.kernels.fused.fused_decode_step import exchange_words
from tiercel.layers import fused_decode_step as layers
from tiercel.layers.attention import Attention, AttentionShape
from tiercel.layers.linear import Linear
from tiercel.layers.mlp import GatedMLP
from tiercel.models import decoder_build
from tiercel.ops.fused_decode_step import DecoderShape, Refusal
from tiercel.ops.linear import LinearWeight
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.parallel import Group
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout

SHAPE = DecoderShape(1, 4096, 4096, 32, 8, 128, 128, 40960)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _every_form(monkeypatch):
    """Those that were not timed too."""
    monkeypatch.setenv("TIERCEL_MEGAKERNEL", "1")


@pytest.fixture
def _here(monkeypatch):
    """Packing is the same on every device; only the kernel needs a GPU."""
    monkeypatch.setattr(layers, "refuse_device", lambda _device: None)


def make_linear(*parts, layout=Layout.SOA):
    """As `prepare_linear` rests them: neighbours of one type are one matrix."""
    segments, joined = [], []
    for part, following in zip(parts, (*parts[1:], None), strict=True):
        joined.append(part.planes["data"])
        if following is None or following.qtype is not part.qtype:
            data = torch.cat(joined)
            whole = QuantTensor(part.qtype, Layout.FILE, (len(data), part.shape[1]), {"data": data})
            segments.append(prepare_packed(whole, layout))
            joined = []
    rows = sum(part.shape[0] for part in parts)
    return Linear(LinearWeight(tuple(segments), (rows, parts[0].shape[1])))


def make_layer(parts, rope, *, layout=Layout.SOA, shape=SHAPE):
    attention = Attention(
        AttentionShape(shape.num_heads, shape.num_kv_heads, 128, SCALE, 0),
        make_linear(parts["q"], parts["k"], parts["v"], layout=layout),
        make_linear(parts["o"], layout=layout),
        rope,
    )
    gate_up = make_linear(parts["gate"], parts["up"], layout=layout)
    mlp = GatedMLP(gate_up, make_linear(parts["down"], layout=layout), "silu")
    head_norms = (parts["q_norm"], parts["k_norm"])
    return layers.StepLayer(parts["attn_norm"], head_norms, attention, parts["mlp_norm"], mlp)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layers_are_packed_as_the_file_has_them(layout):
    model = make_model((V_AND_DOWN,))
    expected = model.weights
    layer = make_layer(model.layers[0], expected.ropes[0], layout=layout)
    step = layers.make_fused_decode_step([layer], SHAPE, EPS, CPU)
    found = step.weights
    assert found.geometry.masks == (V_AND_DOWN,)
    assert torch.equal(found.stream.data, expected.stream.data)
    assert torch.equal(found.norms, expected.norms)
    assert torch.equal(found.head_norms, expected.head_norms)
    assert found.ropes[0] is found.ropes[1] is expected.ropes[0]
    assert (found.eps, found.scale) == (EPS, SCALE)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("refusal", [None, Refusal("no memory"), Refusal("wide (rank 0)")])
def test_a_rank_packs_its_part_or_all_go_another_way(refusal, monkeypatch):
    """What one rank refuses is told to all, before a copy is made; what all refuse is not."""
    model = make_model((V_AND_DOWN,), make_shape(hidden=512, inner=1024, heads=8, kv_heads=4))
    whole = model.weights.geometry.shape
    shape = shape_of_ranks(whole, 2)
    memories, told = share_here(shape), []
    expected, _ = shard_model(model, 1, memories[1])

    def share(given, processes, device, own):
        told.append((given, processes, device, own))
        return refusal or memories[1]

    monkeypatch.setattr(layers, "share_memory", share)
    parts = dict(model.layers[0])
    parts |= {name: parts[name].rows(512, 1024) for name in ("q", "gate", "up")}
    parts |= {name: parts[name].rows(256, 512) for name in "kv"}
    parts |= {name: cut_columns(parts[name], 512, 1024) for name in ("o", "down")}
    layer = make_layer(parts, expected.ropes[0], shape=shape)
    group = Group(1, 2, processes="processes", small_sums="sums")
    own = refusal if refusal == Refusal("no memory") else None
    step = layers.make_fused_decode_step([layer], shape, EPS, CPU, None, group, own)
    assert told == [(shape, "processes", CPU, own)]
    if refusal is not None:
        assert step == refusal
        return
    assert torch.equal(step.weights.stream.data, expected.stream.data)
    assert step.weights.memory is memories[1]
    assert step.weights.passed.tolist() == [0] * 128
    alone = replace(group, small_sums=None)
    reason = Refusal("2 GPUs share the model and no memory")
    assert layers.make_fused_decode_step([layer], shape, EPS, CPU, None, alone) == reason
    assert len(told) == 1


@pytest.mark.usefixtures("_here")
def test_a_layer_that_does_not_fit_leaves_it_out():
    model = make_model((0,))
    layer = make_layer(model.layers[0], model.weights.ropes[0], layout=Layout.FILE)
    dense = LinearWeight((torch.zeros(4096, 4096),), (4096, 4096))
    mixed = make_model((V_AND_DOWN,)).layers[0]

    def make(shape=SHAPE):
        return layers.make_fused_decode_step([layer], shape, EPS, CPU)

    assert "rotary_dim is 64" in make(replace(SHAPE, rotary_dim=64)).reason
    layer.attention.output = Linear(dense)
    assert make() == Refusal("a matrix of layer 0 is not packed")
    layer.attention.output = make_linear(model.layers[0]["o"], layout=Layout.FILE)
    assert isinstance(make(), layers.FusedDecodeStep)
    layer.mlp.gate_up = make_linear(mixed["gate"], mixed["down"], layout=Layout.FILE)
    assert make() == Refusal("gate_up of layer 0 is of two types, Q4_K and Q6_K")


@pytest.mark.parametrize(
    ("family", "fields", "parts"),
    [
        ("llama", {"hidden_act": "silu"}, {}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
        ("qwen3", {"hidden_act": "silu"}, {}),
        ("qwen2", {"hidden_act": "silu"}, {}),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
            | {"sliding_window": 33, "hidden_activation": "gelu_pytorch_tanh"},
            {"activation": "gelu_tanh", "has_update_norms": True, "window": 33}
            | {"sliding": (True, False, True)},
        ),
        (
            "gemma3",
            {"layer_types": ["full_attention"] * 3, "hidden_activation": "silu"},
            {"has_update_norms": True},
        ),
    ],
)
def test_what_the_kernel_is_told_of_a_model(tmp_path, monkeypatch, family, fields, parts):
    values = sample_config(random.Random(1), family).values | {"num_hidden_layers": 3} | fields
    write_folder(tmp_path, values, own_tensors(make_hf_model(values)))
    seen = []
    monkeypatch.setattr(decoder_build, "make_fused_decode_step", lambda *args: seen.append(args))
    with open_tiny(tmp_path, max_model_len=77) as llm:
        model = llm._engine.runner.model
    ((given, shape, eps, *_),) = seen
    assert shape == DecoderShape(
        num_layers=3,
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        rotary_dim=values["head_dim"],
        max_tokens=77,
        **{"sliding": (False,) * 3} | parts,
    )
    assert eps == values["rms_norm_eps"]
    following = [*model.layers[1:], None]
    for part, layer, after in zip(given, model.layers, following, strict=True):
        norms = layer.attention.head_norms
        assert part.attn_norm is layer.attn_norm.weight
        assert part.mlp_norm is layer.mlp_norm.weight
        assert (part.attention, part.mlp) == (layer.attention, layer.mlp)
        assert part.head_norms == (() if norms is None else (norms.q, norms.k))
        last = model.last_update_norm
        output = after.attn_norm.update_weight if after else None if last is None else last.weight
        wanted = (layer.mlp_norm.update_weight, output) if family == "gemma3" else ()
        assert len(part.update_norms) == len(wanted)
        assert all(a is b for a, b in zip(part.update_norms, wanted, strict=True))


def test_each_layer_is_found_through_its_own_tables():
    shape = make_shape(hidden=512, inner=512, heads=4, kv_heads=2, head_dim=64, window=9)
    model = make_model((0, 0, 0), shape)
    step = layers.FusedDecodeStep(model.weights)
    planes = [
        {name: torch.zeros(2, 64, 2, 64, dtype=torch.float16) for name in "kv"} for _ in range(3)
    ]
    step.bind_cache(planes, (1, 0, 1))
    assert step.groups == (0, 1)  # the second layer alone is full
    assert [plane.data_ptr() for plane in step.caches.v] == [p["v"].data_ptr() for p in planes]


@pytest.mark.parametrize("most_tokens", [1, 2])
def test_steps_that_the_kernel_takes(most_tokens):
    """One token, and where it takes pairs two of one request or of two, but no more requests."""
    shape = make_shape(hidden=512, inner=512, heads=4, kv_heads=2, head_dim=64)
    step = layers.FusedDecodeStep(make_model((0,), shape, most_tokens=most_tokens).weights)
    single, others = (1, 1, 1), ((2, 1, 2), (2, 2, 1), (2, 2, 2), (3, 3, 1), (0, 0, 0))

    def taken(items=None):
        return [
            found
            for found in (single, *others)
            if step.supports(
                SimpleNamespace(
                    num_tokens=found[0], num_reqs=found[1], max_query_len=found[2], items=items
                )
            )
        ]

    assert taken() == []  # without a cache
    plane = torch.zeros(2, 64, 2, 64, dtype=torch.float16)
    step.bind_cache([{"k": plane, "v": plane}], (0,))
    assert taken() == [single, *others[: 2 * (most_tokens - 1)]]
    assert taken(items=object()) == []


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_pairs_must_be_asked_for(switch, monkeypatch):
    monkeypatch.setenv("TIERCEL_MEGAKERNEL_PAIRS", switch)
    model = make_model((0,))
    layer = make_layer(model.layers[0], model.weights.ropes[0])
    step = layers.make_fused_decode_step([layer], SHAPE, EPS, CPU)
    if switch == "1":
        assert (step.no_pairs, step.weights.most_tokens) == (None, 2)
    else:
        assert step.no_pairs.reason.endswith("TIERCEL_MEGAKERNEL_PAIRS=1 uses it")
        assert step.weights.most_tokens == 1
    words = exchange_words(step.weights.geometry)
    assert len(step.weights.exchange) == words * step.weights.most_tokens


def test_the_layer_that_drafts_is_one_too(tmp_path, monkeypatch):
    """Its steps of a single token go there, found through its own planes and tables."""
    seen = []
    monkeypatch.setattr(decoder_build, "make_fused_decode_step", lambda *args: seen.append(args))
    with open_tiny(
        mtp_model(tmp_path / "m.gguf", head_seed=6), spec="mtp", num_spec_tokens=3
    ) as llm:
        model = llm._engine.runner.model
        head = model.draft_head
        (all_parts, whole, *_), ((part,), single, *_) = seen
        assert len(all_parts) == whole.num_layers == len(model.layers)
        assert single == replace(whole, num_layers=1, sliding=(False,))
        assert part.attention is head.layer.attention
        head.fused_layer = recorder = Recorder()
        llm.generate("ab", greedy(6))
    assert recorder.taken > 0
    assert set(recorder.asked) >= {1}


def test_a_cpu_has_none():
    assert layers.refuse_device(CPU) == Refusal("the device is cpu, not a GPU")


class Recorder:
    """Counts the steps that it is asked about, and takes those of one token."""

    def __init__(self):
        self.asked, self.taken = [], 0

    def supports(self, batch):
        self.asked.append(batch.num_tokens)
        return batch.num_tokens == 1

    def __call__(self, x, batch):
        assert x.shape[0] == batch.num_reqs == 1
        self.taken += 1
        return x


def test_only_steps_of_one_token_go_there():
    with open_tiny(max_num_seqs=4) as llm:
        model = llm._engine.runner.model
        assert model.fused_decode_step is None
        expected = [o.outputs[0].token_ids for o in llm.generate(["ab", "cd ef"], greedy(6))]
        model.fused_decode_step = recorder = Recorder()
        together = [o.outputs[0].token_ids for o in llm.generate(["ab", "cd ef"], greedy(6))]
        assert together == expected
        assert recorder.taken == 0
        assert len(recorder.asked) == 6
        llm.generate("ab", greedy(6))
        assert recorder.taken == 5  # after the prompt's
