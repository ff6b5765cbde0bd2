"""All layers of Qwen3-8B (Q4_K_M) for one token in one launch, in a graph, by depth of the context.

    python -m benchmarks.fused_decode_step --out benchmarks/results/decode_step_h200.json

Floor: the weights of all layers, keys and values of the context once. Embedding, last norm and
output matrix are not part of it; benchmarks/e2e_decode.py has whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.packed_matvec import random_part
from benchmarks.synthetic_model import has_more_bits
from tiercel.batch import Batch
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    HEAD,
    HIDDEN,
    KV_HEADS,
    MATRICES,
)
from tiercel.ops.dequantize import dequantize
from tiercel.ops.fused_decode_step import (
    FusedDecodeStepBuilder,
    FusedDecodeStepCaches,
    FusedDecodeStepWeights,
    fused_decode_step,
    prepare_caches,
)
from tiercel.quant import QuantTensor
from tiercel.quant_types import QuantType
from tiercel.reference import fused_decode_step as oracle

LAYERS, SLICES = 36, 3
DEPTHS = (0, 1024, 8192, 32767)
EPS, SCALE = 1e-6, HEAD**-0.5
V_AND_DOWN = 1 << 2 | 1 << 5


@dataclass(frozen=True)
class Model:
    """Weights for the kernel, and the same as in a file."""

    weights: FusedDecodeStepWeights
    parts: list[dict[str, list[QuantTensor]]]


@dataclass(frozen=True)
class Inputs:
    """A token at depth `depth`."""

    x: Tensor
    caches: FusedDecodeStepCaches
    batch: Batch


def make_model(device: torch.device) -> Model:
    """Random weights of the real shapes and types."""
    masks = [V_AND_DOWN * has_more_bits(i, LAYERS) for i in range(LAYERS)]
    builder = FusedDecodeStepBuilder(masks, SLICES, device)
    kv_size = KV_HEADS * HEAD
    rows = {"q": HIDDEN, "k": kv_size, "v": kv_size, "o": HIDDEN, "down": HIDDEN}
    parts: list[dict[str, list[QuantTensor]]] = []
    for layer, mask in enumerate(masks):
        matrices = {}
        for i, name in enumerate(MATRICES):
            qtype = QuantType.Q6_K if mask >> i & 1 else QuantType.Q4_K
            shape = (rows.get(name, SLICES * 4096), 4096 * (SLICES if name == "down" else 1))
            count = 2 if name == "gate_up" else 1
            seed = 100 * layer + 10 * i
            matrices[name] = [random_part(qtype, shape, seed + part) for part in range(count)]
        builder.add(layer, matrices)
        parts.append(matrices)
    ones = torch.ones(HIDDEN, device=device)
    angles = torch.rand(1, HEAD // 2, device=device)
    rope = torch.stack((angles.cos(), angles.sin()), dim=1)
    norms, head_norms = [ones] * 2 * LAYERS, [ones[:HEAD]] * 2 * LAYERS
    return Model(builder.finish(norms, head_norms, rope, eps=EPS, scale=SCALE), parts)


def make_inputs(depth: int, device: torch.device, seed: int) -> Inputs:
    """A context whose blocks are in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    needed = depth // BLOCK_TOKENS + 1

    def plane() -> Tensor:
        shape = (needed + 1, BLOCK_TOKENS, KV_HEADS, HEAD)
        return torch.randn(shape, dtype=torch.float16, device=device, generator=generator)

    table = torch.randperm(needed, device=device, generator=generator).int() + 1
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch(
        input_ids=zero,
        positions=zero,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=zero + depth + 1,
        rows=zero,
        logits_rows=zero,
        slot_mapping=(table[-1:].long() * BLOCK_TOKENS + depth % BLOCK_TOKENS)[None],
        block_tables=table[None, None],
        query_lens=(1,),
        context_lens=(depth + 1,),
        num_tokens=1,
        num_reqs=1,
        max_query_len=1,
        max_seq_len=depth + 1,
    )
    caches = prepare_caches([plane() for _ in range(LAYERS)], [plane() for _ in range(LAYERS)])
    x = torch.randn(1, HIDDEN, device=device, generator=generator)
    return Inputs(x, caches, batch)


class OracleLayers:
    """Layers as the oracle reads them, decoded one at a time."""

    def __init__(self, model: Model, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs

    def __len__(self) -> int:
        return LAYERS

    def __getitem__(self, layer: int) -> dict[str, Tensor]:
        if layer >= LAYERS:
            raise IndexError(layer)
        matrices, inputs = self.model.parts[layer], self.inputs
        names = {name: (name,) for name in MATRICES} | {"gate_up": ("gate", "up")}
        dense = {
            own: dequantize(part, torch.float32)
            for name in MATRICES
            for own, part in zip(names[name], matrices[name], strict=True)
        }
        weights = self.model.weights
        assert weights.head_norms is not None
        dense |= dict(zip(("attn_norm", "mlp_norm"), weights.norms[2 * layer :], strict=False))
        dense |= dict(zip(("q_norm", "k_norm"), weights.head_norms[layer], strict=True))
        depth = int(inputs.batch.seq_lens[0]) - 1
        blocks = inputs.batch.block_tables[0, 0].long()
        for name, planes in (("keys", inputs.caches.k), ("values", inputs.caches.v)):
            dense[name] = planes[layer][blocks].flatten(0, 1)[:depth]
        return dense


def make_case(model: Model, depth: int, device: torch.device) -> Case:
    """One depth."""
    kv_bytes = LAYERS * 2 * KV_HEADS * HEAD * 2 * (depth + 1)

    def check(inputs: Inputs) -> float:
        out = fused_decode_step(inputs.x, model.weights, inputs.caches, inputs.batch)
        layers, turn = OracleLayers(model, inputs), model.weights.rope[0]
        expected, _ = oracle.fused_decode_step(inputs.x[0], layers, turn, EPS, SCALE)
        return relative_error(out[0], expected)

    return Case(
        name=f"Qwen3-8B Q4_K_M depth={depth}",
        make=lambda seed: make_inputs(depth, device, seed),
        run=lambda inputs: fused_decode_step(inputs.x, model.weights, inputs.caches, inputs.batch),
        check=check,
        tolerance=5e-2,  # codes of 8 bits that fall on the other side, over 36 layers
        num_bytes=model.weights.stream.numel() + kv_bytes,
        max_sets=1,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per depth."""
    if device.type == "cpu":
        raise SystemExit("fused_decode_step: this kernel runs on a GPU.")
    model = make_model(device)
    for depth in DEPTHS:
        yield make_case(model, depth, device)


if __name__ == "__main__":
    main(__doc__, cases)
