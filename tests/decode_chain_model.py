"""Random matrices between two attentions, for the kernel and for its oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.decode_step_model import random_matrix
from tiercel.ops.decode_chain import (
    ChainExchange,
    ChainWeights,
    make_exchange,
    prepare_decode_chain,
)
from tiercel.ops.dequantize import dequantize
from tiercel.ops.q4k_matvec import prepare_q4k
from tiercel.quant import Layout, QuantTensor, QuantType

EPS = 0.2  # of both norms: large enough to show


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


def make_model(six, slices, device, seed=0, *, is_last=False):
    """Random layers; `six` names those of `o gate_up down qk v` that are Q6_K."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {
        "o": (4096, 4096),
        "gate_up": (8192 * slices, 4096),
        "down": (4096, 4096 * slices),
        "qk": (5120, 4096),
        "v": (1024, 4096),
    }
    parts = {
        name: random_matrix(*shape, QuantType.Q6_K if name in six else QuantType.Q4_K, generator)
        for name, shape in shapes.items()
    }
    qkv = [parts.pop("qk"), parts.pop("v")]
    if qkv[0].qtype is qkv[1].qtype:
        data = torch.cat([part.planes["data"] for part in qkv])
        qkv = [QuantTensor(qkv[0].qtype, Layout.FILE, (6144, 4096), {"data": data})]
    matrices = {name: [part] for name, part in parts.items()} | {"qkv": qkv}
    packed = {
        name: [prepare_q4k(part, Layout.SOA) for part in segments]
        for name, segments in matrices.items()
    }
    if is_last:
        packed["qkv"] = []
    norms = [0.7 + 0.6 * torch.rand(4096, device=device, generator=generator) for _ in range(2)]
    weights = prepare_decode_chain(*packed.values(), *norms, EPS)
    assert weights is not None
    return Model(weights, make_exchange(slices, generator.device), matrices)
