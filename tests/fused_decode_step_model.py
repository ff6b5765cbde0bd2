"""Random layers of any sizes of the fused decode step, for the kernel and for its oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused.fused_decode_step import peer_bytes
from tiercel.kernels.fused.fused_decode_step_geometry import (
    MATRICES,
    DecoderShape,
    make_geometry,
    refuse_shape,
)
from tiercel.models.sharding import Sharding
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_decode_step import FusedDecodeStepBuilder, FusedDecodeStepWeights
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

EPS, SCALE = 0.2, 128**-0.5  # eps is so large that it matters
POSITIONS = 64
V_AND_DOWN = 1 << 2 | 1 << 5  # the matrices of a layer that are Q6_K in half of a Q4_K_M file


def make_shape(num_layers=1, hidden=4096, inner=4096, heads=32, kv_heads=8, head_dim=128, window=0):
    """Sizes of a decoder, those of Qwen3-8B but for its MLP; with a window what Gemma 3 has."""
    is_gemma = window > 0
    return DecoderShape(
        *(num_layers, hidden, inner, heads, kv_heads, head_dim, head_dim, 40960),
        activation="gelu_tanh" if is_gemma else "silu",
        has_update_norms=is_gemma,
        window=window,
    )


def rows_of(shape):
    """Rows of each matrix of a layer."""
    rows = dict.fromkeys(("o", "down"), shape.hidden_size) | {"q": shape.q_size}
    return rows | dict.fromkeys(("k", "v"), shape.kv_size) | {"gate_up": shape.intermediate_size}


def columns_of(shape):
    """Columns of each matrix of a layer."""
    columns = dict.fromkeys(MATRICES, shape.hidden_size)
    return columns | {"o": shape.q_size, "down": shape.intermediate_size}


def random_matrix(rows, columns, qtype, generator):
    """Random codes; d (and dmin) of both signs such that products keep a size of about 1."""
    device = generator.device
    size = (rows, columns // qtype.block_weights, qtype.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    spread = columns**-0.5
    ranges = {
        QuantType.Q4_K: {0: spread / 150, 2: spread / 20},
        QuantType.Q5_K: {0: spread / 300, 2: spread / 20},
        QuantType.Q6_K: {208: spread / 1300},
        QuantType.Q4_0: {0: spread / 5},
        QuantType.Q8_0: {0: spread / 74},
        QuantType.IQ4_XS: {0: spread / 1200},
        QuantType.Q5_0: {0: spread / 9},
        QuantType.IQ4_NL: {0: spread / 65},
    }[qtype]
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


def make_model(
    masks,
    shape=None,
    device="cpu",
    seed=0,
    *,
    has_qk_norm=True,
    has_bias=False,
    spread=1.5,
    most_tokens=1,
):
    """Random layers of a shape, every second one full; spread: of the weights of norms."""
    shape = replace(shape or make_shape(), num_layers=len(masks))
    if shape.window:
        shape = replace(shape, sliding=tuple(index % 2 == 0 for index in range(len(masks))))
    assert refuse_shape(shape) is None
    geometry = make_geometry(shape, masks)
    generator = torch.Generator(device).manual_seed(seed)

    def near_one(size):
        noise = torch.rand(size, device=device, generator=generator)
        return 1 + spread * (noise - 0.5)

    builder = FusedDecodeStepBuilder(geometry, torch.device(device))
    rows, columns = rows_of(shape), columns_of(shape)
    layers, norms, head_norms, biases = [], [], [], []
    for index in range(len(masks)):
        layer = {}
        for name in MATRICES:
            qtype = QuantType[geometry.qtype(index, name)]
            names = ("gate", "up") if name == "gate_up" else (name,)
            parts = [random_matrix(rows[name], columns[name], qtype, generator) for _ in names]
            layer |= dict(zip(names, parts, strict=True))
        builder.add(
            index,
            {
                name: [layer["gate"], layer["up"]] if name == "gate_up" else [layer[name]]
                for name in MATRICES
            },
        )
        layer |= {"attn_norm": near_one(shape.hidden_size), "mlp_norm": near_one(shape.hidden_size)}
        norms += [layer["attn_norm"], layer["mlp_norm"]]
        if shape.has_update_norms:
            own = {f"{part}_update_norm": near_one(shape.hidden_size) for part in ("attn", "mlp")}
            layer |= own
            norms += own.values()
        if has_qk_norm:
            layer |= {"q_norm": near_one(shape.head_dim), "k_norm": near_one(shape.head_dim)}
            head_norms += [layer["q_norm"], layer["k_norm"]]
        if has_bias:
            layer |= {f"{name}_bias": near_one(rows[name]) - 1 for name in "qkv"}
            biases.append(torch.cat([layer[f"{name}_bias"] for name in "qkv"]))
        layers.append(layer)
    angles = torch.rand(POSITIONS, shape.head_dim // 2, device=device, generator=generator) * 6.3
    ropes = tuple(torch.stack((turns.cos(), turns.sin()), dim=1) for turns in (angles, 3 * angles))
    weights = builder.finish(
        norms, head_norms, biases, ropes, eps=EPS, scale=SCALE, most_tokens=most_tokens
    )
    return Model(weights, layers)


def share_here(shape):
    """Memory of all ranks in one process; poisoned, because no count is what it holds."""
    size = peer_bytes(shape)
    buffers = [torch.full((size,), 0x55, dtype=torch.uint8) for _ in range(shape.ranks)]
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    return [SymmetricMemory(r, addresses, buffers[r], None) for r in range(shape.ranks)]


def shape_of_ranks(shape, ranks):
    """The sizes of each of some ranks that have equal parts of a decoder."""
    first, last = Sharding(0, ranks).kv_part(shape.num_kv_heads)
    return replace(
        shape,
        num_heads=shape.num_heads // ranks,
        num_kv_heads=last - first,
        intermediate_size=shape.intermediate_size // ranks,
        ranks=ranks,
    )


def cut_columns(tensor, first, last):
    """Some columns of a matrix in layout FILE."""
    kind = tensor.qtype
    data = tensor.planes["data"][:, kind.row_bytes(first) : kind.row_bytes(last)].contiguous()
    return QuantTensor(kind, tensor.layout, (len(data), last - first), {"data": data})


def shard_model(model, rank, memory):
    """The weights of a rank with its `memory` of all, and its key/value heads."""
    whole, ranks = model.weights.geometry, len(memory.addresses)
    shape = shape_of_ranks(whole.shape, ranks)
    builder = FusedDecodeStepBuilder(
        make_geometry(shape, whole.masks), model.weights.stream.data.device
    )
    heads = Sharding(rank, ranks).kv_part(whole.shape.num_kv_heads)
    parts = dict.fromkeys(("k", "v"), slice(*(shape.head_dim * head for head in heads)))
    parts["q"] = slice(rank * shape.q_size, (rank + 1) * shape.q_size)
    inner = (rank * shape.intermediate_size, (rank + 1) * shape.intermediate_size)
    biases = []
    for index, layer in enumerate(model.layers):
        cuts = {name: [layer[name].rows(part.start, part.stop)] for name, part in parts.items()}
        cuts["o"] = [cut_columns(layer["o"], parts["q"].start, parts["q"].stop)]
        cuts["gate_up"] = [layer[name].rows(*inner) for name in ("gate", "up")]
        builder.add(index, cuts | {"down": [cut_columns(layer["down"], *inner)]})
        if "q_bias" in layer:
            biases.append(torch.cat([layer[f"{name}_bias"][parts[name]] for name in "qkv"]))
    weights = model.weights
    head_norms = () if weights.head_norms is None else weights.head_norms.flatten(0, 1)
    own = builder.finish(
        list(weights.norms),
        list(head_norms),
        biases,
        weights.ropes,
        eps=weights.eps,
        scale=weights.scale,
        memory=memory,
    )
    return own, slice(*heads)
