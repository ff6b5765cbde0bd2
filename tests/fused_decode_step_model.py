"""Random layers of the sizes of the fused decode step, for the kernel and for its oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiercel.kernels.fused.fused_decode_step_geometry import HEAD, HIDDEN, MATRICES
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_decode_step import FusedDecodeStepBuilder, FusedDecodeStepWeights
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

EPS, SCALE = 0.2, HEAD**-0.5  # eps is so large that it matters
POSITIONS = 64
V_AND_DOWN = 1 << 2 | 1 << 5  # the matrices of a layer that are Q6_K in half of a Q4_K_M file
ROWS = {"q": HIDDEN, "k": 1024, "v": 1024, "o": HIDDEN, "down": HIDDEN}


def random_matrix(rows, columns, qtype, generator):
    """Random codes; d (and dmin) of both signs such that products keep a size of about 1."""
    device = generator.device
    size = (rows, columns // 256, qtype.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    spread = columns**-0.5
    ranges = {0: spread / 150, 2: spread / 20} if qtype is QuantType.Q4_K else {208: spread / 1300}
    for at, d in ranges.items():
        factor = 0.5 + torch.rand(*size[:2], 1, device=device, generator=generator)
        data[:, :, at : at + 2] = (d * factor).half().view(torch.uint8)
    return QuantTensor(qtype, Layout.FILE, (rows, columns), {"data": data.flatten(1)})


@dataclass
class Model:
    """Weights for the kernel, and the same for the oracle."""

    weights: FusedDecodeStepWeights
    layers: list[dict[str, torch.Tensor | QuantTensor]]

    def dense(self, layer):
        """The oracle's view of a layer."""
        return {
            name: dequantize(part, torch.float32) if isinstance(part, QuantTensor) else part
            for name, part in self.layers[layer].items()
        }


def make_model(masks, slices, device, seed=0, *, has_qk_norm=True, inner=None):
    """Random layers; `inner` is the intermediate size if it does not fill all slices."""
    inner = inner or 4096 * slices
    generator = torch.Generator(device).manual_seed(seed)

    def near_one(size):
        return 0.25 + 1.5 * torch.rand(size, device=device, generator=generator)

    builder = FusedDecodeStepBuilder(masks, slices, device)
    layers, norms, head_norms = [], [], []
    for index, mask in enumerate(masks):
        layer = {}
        for i, name in enumerate(MATRICES):
            qtype = (QuantType.Q4_K, QuantType.Q6_K)[mask >> i & 1]
            columns = inner if name == "down" else 4096
            names = ("gate", "up") if name == "gate_up" else (name,)
            rows = ROWS.get(name, inner)
            parts = [random_matrix(rows, columns, qtype, generator) for _ in names]
            layer |= dict(zip(names, parts, strict=True))
        builder.add(
            index,
            {
                name: [layer["gate"], layer["up"]] if name == "gate_up" else [layer[name]]
                for name in MATRICES
            },
        )
        layer |= {"attn_norm": near_one(HIDDEN), "mlp_norm": near_one(HIDDEN)}
        norms += [layer["attn_norm"], layer["mlp_norm"]]
        if has_qk_norm:
            layer |= {"q_norm": near_one(HEAD), "k_norm": near_one(HEAD)}
            head_norms += [layer["q_norm"], layer["k_norm"]]
        layers.append(layer)
    angles = torch.rand(POSITIONS, HEAD // 2, device=device, generator=generator) * 6.3
    rope = torch.stack((angles.cos(), angles.sin()), dim=1)
    return Model(builder.finish(norms, head_norms, rope, eps=EPS, scale=SCALE), layers)
