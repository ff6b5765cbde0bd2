"""Whole decode steps in one launch: Qwen3-8B in Q4_K_M by depth, others at depth 1,024.

Every size that fits in its usual mixture of types, and some in others; each with one token, then
with two of two requests, and Qwen3-8B with two of one. Two tokens must have the bits that each has
alone; their peer are two launches of one.

    python -m benchmarks.fused_decode_step --out benchmarks/results/decode_step_h200.json

Floor: the weights of all layers once, keys and values of each request's context once. Embedding,
last norm and output matrix are not part of it; benchmarks/e2e_decode.py has whole steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.model_shapes import SHAPES, decoder_shape, step_types
from benchmarks.op_timing import Case, main, relative_error
from benchmarks.packed_matvec import random_part
from tiercel.batch import Batch
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    MATRICES,
    MOST_STEP_TOKENS,
    StepGeometry,
    make_geometry,
    make_mask,
    refuse_shape,
)
from tiercel.kernels.fused.fused_decode_step_stream import StreamLayout
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

MAIN = "qwen3-8b"
DEPTHS = (0, 1024, 8192, 32767)
DEPTH = 1024  # of the other sizes
PAIRS = ((1, 1), (2, 2), (2, 1))  # tokens, requests
OTHER_MIXTURES = {
    "qwen3-8b": ("Q8_0", "Q4_0", "IQ4_XS"),
    "qwen3-4b": ("Q8_0", "Q4_0", "IQ4_XS"),
    "llama3-8b": ("Q8_0", "Q4_0", "IQ4_XS"),
    "gemma3-1b": ("Q4_0", "Q8_0"),
    "gemma3-4b": ("Q4_0", "Q8_0", "IQ4_XS"),
    "gemma3-12b": ("Q4_0",),
    "gemma3-27b": ("Q4_0",),
}
EPS, SCALE = 1e-6, 128**-0.5


@dataclass(frozen=True)
class Model:
    """Weights for the kernel, and the same as in a file."""

    weights: FusedDecodeStepWeights
    parts: list[dict[str, list[QuantTensor]]]

    @property
    def geometry(self) -> StepGeometry:
        """Of the decoder."""
        return self.weights.geometry


@dataclass(frozen=True)
class Inputs:
    """One token or two, at depth `depth` or, the second of a request, one more."""

    x: Tensor
    caches: FusedDecodeStepCaches
    batch: Batch
    alone: tuple[Inputs, ...] = ()  # each of its tokens


def find_geometry(name: str, mixture: str) -> StepGeometry:
    """The geometry of a size in a mixture of types."""
    masks = [make_mask(types) for types in step_types(name, mixture)]
    return make_geometry(decoder_shape(name), masks)


@functools.lru_cache(maxsize=1)  # one fits the memory beside the caches
def make_model(name: str, mixture: str, device: torch.device) -> Model:
    """Random weights of the real shapes; layers of the same types have the same ones."""
    geometry = find_geometry(name, mixture)
    shape, masks = geometry.shape, geometry.masks
    layers, hidden = shape.num_layers, shape.hidden_size
    builder = FusedDecodeStepBuilder(geometry, device)
    rows = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size, "o": hidden, "down": hidden}
    columns = {"o": shape.q_size, "down": shape.intermediate_size}
    kinds: dict[int, dict[str, list[QuantTensor]]] = {}
    for mask in sorted(set(masks)):
        kinds[mask] = {}
        for i, matrix in enumerate(MATRICES):
            qtype = QuantType[geometry.qtype(masks.index(mask), matrix)]
            size = (rows.get(matrix, shape.intermediate_size), columns.get(matrix, hidden))
            count = 2 if matrix == "gate_up" else 1
            seeds = range(mask + 100 * i, mask + 100 * i + count)
            kinds[mask][matrix] = [random_part(qtype, size, seed) for seed in seeds]
    parts = [kinds[mask] for mask in masks]
    for layer, matrices in enumerate(parts):
        builder.add(layer, matrices)
    ones = torch.ones(hidden, device=device)
    angles = torch.rand(1, shape.head_dim // 2, device=device)
    rope = torch.stack((angles.cos(), angles.sin()), dim=1)
    is_normed = SHAPES[name].arch in ("qwen3", "gemma3")
    is_biased = SHAPES[name].arch == "qwen2"
    head_norms = [torch.ones(shape.head_dim, device=device)] * 2 * layers if is_normed else []
    biases = [torch.zeros(shape.q_size + 2 * shape.kv_size, device=device)] * layers
    norms = [ones] * (4 if shape.has_update_norms else 2) * layers
    weights = builder.finish(
        norms,
        head_norms,
        biases if is_biased else [],
        (rope, rope),
        eps=EPS,
        scale=SCALE,
        most_tokens=MOST_STEP_TOKENS,
    )
    return Model(weights, parts)


def make_inputs(
    model: Model, depth: int, device: torch.device, seed: int, tokens: int = 1, requests: int = 1
) -> Inputs:
    """Contexts whose blocks are in any order: of each token its own, or one of all."""
    sizes = model.geometry.shape
    generator = torch.Generator(device).manual_seed(seed)
    each = tokens // requests  # new tokens of a request
    needed = (depth + each - 1) // BLOCK_TOKENS + 1

    def plane() -> Tensor:
        blocks = requests * needed + 1
        shape = (blocks, BLOCK_TOKENS, sizes.num_kv_heads, sizes.head_dim)
        return torch.randn(shape, dtype=torch.float16, device=device, generator=generator)

    order = torch.randperm(requests * needed, device=device, generator=generator).int() + 1
    tables = order.view(requests, needed)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    places = [(token // each, depth + token % each) for token in range(tokens)]
    slots = [
        tables[request, place // BLOCK_TOKENS].long() * BLOCK_TOKENS + place % BLOCK_TOKENS
        for request, place in places
    ]
    batch = Batch(
        input_ids=zeros,
        positions=zeros,
        cu_seqlens_q=torch.arange(0, tokens + 1, each, dtype=torch.int32, device=device),
        seq_lens=zeros[:requests] + depth + each,
        rows=torch.arange(requests, dtype=torch.int32, device=device),
        logits_rows=zeros,
        slot_mapping=torch.stack(slots)[None],
        block_tables=tables[None],
        query_lens=(each,) * requests,
        context_lens=(depth + each,) * requests,
        num_tokens=tokens,
        num_reqs=requests,
        max_query_len=each,
        max_seq_len=depth + each,
    )
    k, v = ([plane() for _ in range(sizes.num_layers)] for _ in range(2))
    caches = prepare_caches(model.geometry, k, v)
    x = torch.randn(tokens, sizes.hidden_size, device=device, generator=generator)
    together = Inputs(x, caches, batch)
    return replace(together, alone=tuple(split_tokens(together)))


def alone(batch: Batch, token: int) -> Batch:
    """A token's own batch; of one request a later token finds the earlier ones in the cache."""
    each = batch.num_tokens // batch.num_reqs
    request, one = token // each, slice(token, token + 1)
    length = batch.context_lens[request] - (each - 1 - token % each)
    return replace(
        batch,
        input_ids=batch.input_ids[one],
        positions=batch.positions[one],
        cu_seqlens_q=batch.cu_seqlens_q[:2] // each,
        seq_lens=torch.full_like(batch.seq_lens[:1], length),
        rows=batch.rows[request : request + 1],
        slot_mapping=batch.slot_mapping[:, one].contiguous(),
        query_lens=(1,),
        context_lens=(length,),
        num_tokens=1,
        num_reqs=1,
        max_query_len=1,
    )


def split_tokens(inputs: Inputs) -> list[Inputs]:
    """Each token alone."""
    return [
        Inputs(inputs.x[token : token + 1], inputs.caches, alone(inputs.batch, token))
        for token in range(inputs.batch.num_tokens)
    ]


class OracleLayers:
    """Layers as the oracle reads them for one token, decoded one at a time."""

    def __init__(self, model: Model, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs

    def __len__(self) -> int:
        return len(self.model.parts)

    def __getitem__(self, layer: int) -> dict[str, Tensor]:
        if layer >= len(self):
            raise IndexError(layer)
        matrices, inputs = self.model.parts[layer], self.inputs
        names = {name: (name,) for name in MATRICES} | {"gate_up": ("gate", "up")}
        dense = {
            own: dequantize(part, torch.float32)
            for name in MATRICES
            for own, part in zip(names[name], matrices[name], strict=True)
        }
        weights, shape = self.model.weights, self.model.geometry.shape
        names_of_norms = ("attn_norm", "mlp_norm", "attn_update_norm", "mlp_update_norm")
        norms = weights.norms.unflatten(0, (shape.num_layers, -1))[layer]
        dense |= dict(zip(names_of_norms, norms, strict=False))
        if weights.head_norms is not None:
            dense |= dict(zip(("q_norm", "k_norm"), weights.head_norms[layer], strict=True))
        depth = inputs.batch.context_lens[0] - 1
        slides = bool(shape.sliding) and shape.sliding[layer]
        first = max(0, depth + 1 - shape.window) if slides else 0
        blocks = inputs.batch.block_tables[0, inputs.batch.rows[0]].long()
        for name, planes in (("keys", inputs.caches.k), ("values", inputs.caches.v)):
            dense[name] = planes[layer][blocks].flatten(0, 1)[first:depth]
        return dense


def step(name: str, mixture: str, inputs: Inputs) -> Tensor:
    """The launch."""
    weights = make_model(name, mixture, inputs.x.device).weights
    return fused_decode_step(inputs.x, weights, inputs.caches, inputs.batch)


def find_error(name: str, mixture: str, inputs: Inputs) -> float:
    """The largest error of a token; infinite if one has other bits than it has alone."""
    model = make_model(name, mixture, inputs.x.device)
    out = step(name, mixture, inputs).clone()
    turn, shape, errors = model.weights.ropes[0][0], model.geometry.shape, []
    for own, row in zip(inputs.alone, out, strict=True):
        if not torch.equal(step(name, mixture, own)[0], row):
            return math.inf
        layers = OracleLayers(model, own)
        expected, _ = oracle.fused_decode_step(
            own.x[0], layers, turn, EPS, SCALE, activation=shape.activation
        )
        errors.append(relative_error(row, expected))
    return max(errors)


def make_case(
    name: str, mixture: str, depth: int, device: torch.device, tokens: int = 1, requests: int = 1
) -> Case:
    """One size, mixture and depth."""
    geometry = find_geometry(name, mixture)
    sizes = geometry.shape
    sliding = sizes.sliding or (False,) * sizes.num_layers
    keys = sum(min(depth + 1, sizes.window) if slides else depth + 1 for slides in sliding)
    kv_bytes = 2 * sizes.kv_size * 2 * keys * requests
    of_tokens = f" tokens={tokens} requests={requests}" if tokens > 1 else ""

    def run_apart(inputs: Inputs) -> list[Tensor]:
        return [step(name, mixture, own) for own in inputs.alone]

    return Case(
        name=f"{name} {mixture} depth={depth}{of_tokens}",
        make=lambda seed: make_inputs(
            make_model(name, mixture, device), depth, device, seed, tokens, requests
        ),
        run=functools.partial(step, name, mixture),
        check=functools.partial(find_error, name, mixture),
        # Codes of 8 bits that fall on the other side, over all layers. Norms of updates make each
        # layer's as large as the residual: 1e-6 of x becomes 2e-2 in 18 layers of Gemma 3 270M.
        tolerance=2e-1 if sizes.has_update_norms else 5e-2,
        num_bytes=StreamLayout(geometry).num_bytes + kv_bytes,
        peer=run_apart if tokens > 1 else None,
        peer_name="one token after the other" if tokens > 1 else "",
        max_sets=1,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield Cases per depth of Qwen3-8B, per other size that fits, then of other mixtures."""
    if device.type == "cpu":
        raise SystemExit("fused_decode_step: this kernel runs on a GPU.")
    others = [name for name in SHAPES if name != MAIN]
    for name in [MAIN, *others]:
        if refuse_shape(decoder_shape(name)) is None:
            for depth in DEPTHS if name == MAIN else (DEPTH,):
                for tokens, requests in PAIRS if name == MAIN else PAIRS[:2]:
                    yield make_case(name, SHAPES[name].mixture, depth, device, tokens, requests)
    for name, mixtures in OTHER_MIXTURES.items():
        for mixture in mixtures:
            for tokens, requests in PAIRS[:2]:
                yield make_case(name, mixture, DEPTH, device, tokens, requests)


if __name__ == "__main__":
    main(__doc__, cases)
