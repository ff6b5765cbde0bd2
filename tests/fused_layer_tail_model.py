"""Random matrices of the fused layer tail, for the kernel and for its oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.fused_decode_step_model import random_matrix
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape
from tiercel.kernels.fused.fused_refusal import Refusal
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_layer_tail import (
    ChainExchange,
    ChainWeights,
    make_exchange,
    prepare_fused_layer_tail,
)
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

EPS = 0.2  # of both norms: large enough to matter


@dataclass
class Model:
    """Weights for the kernel, and the same for the oracle."""

    weights: ChainWeights
    exchange: ChainExchange
    parts: dict[str, list[QuantTensor]]

    def dense(self):
        """The oracle's view."""
        layer = {
            name: torch.cat([dequantize(part, torch.float32) for part in parts])
            for name, parts in self.parts.items()
        }
        layer["gate"], layer["up"] = layer.pop("gate_up").chunk(2)
        norms = {"mlp_norm": self.weights.mlp_norm, "next_norm": self.weights.next_norm}
        return layer | norms


def qwen3_8b(slices=3):
    """The widths of Qwen3-8B; `slices` of 4096 columns in a row of down."""
    return ChainShape(4096, 4096, 4096 * slices, 5120, 1024)


def make_model(six, shape, device, seed=0, *, is_last=False, num_sms=128, memory=None):
    """Random layers; `six` names those of `o gate_up down qk v` that are Q6_K.

    The shape is that of q and k alone; where v has the same type, they are one matrix. `memory`: of
    several GPUs, of which each has its own layers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {
        "o": (shape.hidden, shape.attended),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "qk": (shape.qk_rows, shape.hidden),
        "v": (shape.v_rows, shape.hidden),
    }
    parts = {
        name: random_matrix(*size, QuantType.Q6_K if name in six else QuantType.Q4_K, generator)
        for name, size in shapes.items()
    }
    qkv = [parts.pop("qk"), parts.pop("v")]
    if qkv[0].qtype is qkv[1].qtype:
        data = torch.cat([part.planes["data"] for part in qkv])
        size = (shape.heads_width, shape.hidden)
        qkv = [QuantTensor(qkv[0].qtype, Layout.FILE, size, {"data": data})]
    matrices = {name: [part] for name, part in parts.items()} | {"qkv": qkv}
    packed = {
        name: [prepare_packed(part, Layout.SOA) for part in segments]
        for name, segments in matrices.items()
    }
    if is_last:
        packed["qkv"] = []
    norms = [
        0.7 + 0.6 * torch.rand(shape.hidden, device=device, generator=generator) for _ in range(2)
    ]
    ranks = 1 if memory is None else len(memory.addresses)
    weights = prepare_fused_layer_tail(*packed.values(), *norms, EPS, num_sms, ranks)
    assert not isinstance(weights, Refusal), weights.reason
    return Model(weights, make_exchange(weights.geometry, generator.device, memory), matrices)
