"""How a decoder hands a step of one token to the kernel for whole steps."""

from __future__ import annotations

import random

import pytest
import torch

from tests.fused_decode_step_model import EPS, SCALE, V_AND_DOWN, make_model
from tests.hf_models import make_model as make_hf_model
from tests.hf_models import own_tensors, sample_config, write_folder
from tests.tiny_llm import greedy, open_tiny
from tiercel.layers import fused_decode_step as layers
from tiercel.layers.attention import Attention, AttentionShape
from tiercel.layers.linear import Linear
from tiercel.layers.mlp import GatedMLP
from tiercel.models import decoder_build
from tiercel.ops.fused_decode_step import DecoderShape
from tiercel.ops.linear import LinearWeight
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout

SHAPE = DecoderShape(1, 4096, 4096, 32, 8, 128, 128, 40960, is_plain=True)
CPU = torch.device("cpu")


@pytest.fixture
def _here(monkeypatch):
    """Packing is the same on every device; only the kernel needs a GPU."""
    monkeypatch.setattr(layers, "can_fused_decode_step", lambda _device: True)


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


def make_layer(parts, rope, *, layout=Layout.SOA):
    attention = Attention(
        AttentionShape(32, 8, 128, SCALE, 0),
        make_linear(parts["q"], parts["k"], parts["v"], layout=layout),
        make_linear(parts["o"], layout=layout),
        rope,
    )
    gate_up = make_linear(parts["gate"], parts["up"], layout=layout)
    mlp = GatedMLP(gate_up, make_linear(parts["down"], layout=layout), "silu")
    head_norms = (parts["q_norm"], parts["k_norm"])
    return layers.StepLayer(parts["attn_norm"], head_norms, attention, parts["mlp_norm"], mlp)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)
def test_layers_are_packed_as_the_file_has_them(layout):
    model = make_model([V_AND_DOWN], 1, CPU)
    expected = model.weights
    layer = make_layer(model.layers[0], expected.rope, layout=layout)
    step = layers.make_fused_decode_step([layer], SHAPE, EPS, CPU)
    assert step is not None
    found = step.weights
    assert found.masks == (V_AND_DOWN,)
    assert torch.equal(found.stream, expected.stream)
    assert torch.equal(found.norms, expected.norms)
    assert torch.equal(found.head_norms, expected.head_norms)
    assert found.rope is expected.rope
    assert (found.eps, found.scale, found.slices) == (EPS, SCALE, 1)


@pytest.mark.usefixtures("_here")
def test_a_layer_that_does_not_fit_leaves_it_out():
    model = make_model([0], 1, CPU)
    layer = make_layer(model.layers[0], model.weights.rope, layout=Layout.FILE)
    dense = LinearWeight((torch.zeros(4096, 4096),), (4096, 4096))
    mixed = make_model([V_AND_DOWN], 1, CPU).layers[0]
    wrong_shape = DecoderShape(1, 4096, 4096, 32, 8, 128, 64, 40960, is_plain=True)
    assert layers.make_fused_decode_step([layer], wrong_shape, EPS, CPU) is None
    layer.attention.output = Linear(dense)
    assert layers.make_fused_decode_step([layer], SHAPE, EPS, CPU) is None
    layer.attention.output = make_linear(model.layers[0]["o"], layout=Layout.FILE)
    assert layers.make_fused_decode_step([layer], SHAPE, EPS, CPU) is not None
    layer.mlp.gate_up = make_linear(mixed["gate"], mixed["down"], layout=Layout.FILE)
    assert layers.make_fused_decode_step([layer], SHAPE, EPS, CPU) is None


@pytest.mark.parametrize(
    ("family", "fields", "is_plain"),
    [
        ("llama", {"hidden_act": "silu"}, True),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, False),
        ("qwen3", {"hidden_act": "silu"}, True),
        ("qwen2", {"hidden_act": "silu"}, False),  # biases
        ("gemma3", {"hidden_activation": "silu", "layer_types": ["full_attention"] * 3}, False),
    ],
)
def test_what_the_kernel_is_told_of_a_model(tmp_path, monkeypatch, family, fields, is_plain):
    values = sample_config(random.Random(1), family).values | {"num_hidden_layers": 3} | fields
    write_folder(tmp_path, values, own_tensors(make_hf_model(values)))
    seen = []
    monkeypatch.setattr(decoder_build, "make_fused_decode_step", lambda *args: seen.append(args))
    with open_tiny(tmp_path, max_model_len=77) as llm:
        model = llm._engine.runner.model
    ((parts, shape, eps, _),) = seen
    assert shape == DecoderShape(
        num_layers=3,
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        rotary_dim=values["head_dim"],
        max_tokens=77,
        is_plain=is_plain,
    )
    assert eps == values["rms_norm_eps"]
    for part, layer in zip(parts, model.layers, strict=True):
        norms = layer.attention.head_norms
        assert part.attn_norm is layer.attn_norm.weight
        assert part.mlp_norm is layer.mlp_norm.weight
        assert (part.attention, part.mlp) == (layer.attention, layer.mlp)
        assert part.head_norms == (() if norms is None else (norms.q, norms.k))


def test_a_cpu_has_none():
    assert not layers.can_fused_decode_step(CPU)


class Recorder:
    """Counts the steps that it is asked about, and takes those of one token."""

    def __init__(self):
        self.asked, self.taken = [], 0

    def takes(self, batch):
        self.asked.append(batch.num_tokens)
        return batch.num_tokens == 1

    def __call__(self, x, batch):
        assert x.shape[0] == batch.num_reqs == 1
        self.taken += 1
        return x


def test_only_steps_of_one_token_go_there():
    with open_tiny(max_num_seqs=4) as llm:
        model = llm._engine.runner.model
        assert model.step is None
        expected = [o.outputs[0].token_ids for o in llm.generate(["ab", "cd ef"], greedy(6))]
        model.step = recorder = Recorder()
        together = [o.outputs[0].token_ids for o in llm.generate(["ab", "cd ef"], greedy(6))]
        assert together == expected
        assert recorder.taken == 0
        assert len(recorder.asked) == 6
        llm.generate("ab", greedy(6))
        assert recorder.taken == 5  # behind the prompt's
