"""A decoder whose layers rest among the weights of the fused decode step, put together on a CPU."""

import pytest
import torch

from benchmarks.synthetic_model import Shape
from tests.engine.wide_model import write_wide_model
from tests.packed_weights import make_tokens
from tiercel.config import ModelOptions
from tiercel.models import decoder_build
from tiercel.models.decoder import Decoder
from tiercel.models.decoder_build import DecoderBuilder
from tiercel.models.fused_paths import USED, step_geometry
from tiercel.models.source import open_source
from tiercel.models.weights import WeightReader
from tiercel.ops import linear as linear_op
from tiercel.ops.fused_decode_step import make_one_copy
from tiercel.quant_types import Layout

CPU = torch.device("cpu")
SHAPE = Shape(512, 2, 8, 2, 64, 1024, vocab=512, context=128, arch="llama")  # q and k permuted


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Makes the decoder as on a GPU, but for the kernels that are loaded."""
    for name in ("has_packed_gemm", "has_packed_mmq", "has_dependent_launch"):
        monkeypatch.setattr(linear_op, name, lambda *_: False)
    monkeypatch.setattr(linear_op, "select_form", lambda *_: "packed")
    monkeypatch.setattr(decoder_build, "make_native_layers", lambda *_, **__: None)
    source = open_source(write_wide_model(tmp_path / "m.gguf", SHAPE))

    def make(*, is_one):
        step = make_one_copy(step_geometry(source, 128), CPU) if is_one else None
        monkeypatch.setattr(DecoderBuilder, "_one_copy", lambda *_: step)
        reader = WeightReader(source, CPU, dense_copies=False, step_copy=False)
        return Decoder(source.config, reader, torch.float16, 128, ModelOptions())

    return make


def matrices(layer):
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def test_layers_and_the_step_share_their_weights(build):
    one, apart = build(is_one=True), build(is_one=False)
    assert one.fused_paths["fused_decode_step"] == USED
    weights = one.fused_decode_step.weights.stream.data
    for own, other in zip(one.layers, apart.layers, strict=True):
        for linear, planes in zip(matrices(own), matrices(other), strict=True):
            for segment in linear.weight.segments:
                assert segment.tensor.planes["weights"] is weights
            assert {s.tensor.layout for s in planes.weight.segments} == {Layout.SOA}
            x = make_tokens(2, linear.weight.shape[1], CPU) / 100
            assert torch.equal(linear(x), planes(x))
