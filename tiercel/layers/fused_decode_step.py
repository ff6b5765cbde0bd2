"""All layers of a decoder as one kernel for a step of a single token, or of two.

Its weights are in the order in which it reads them: a second copy, made from the layers that serve
all other steps, or the only one, which those read too (`TIERCEL_ONE_COPY`). Where ranks share the
decoder, each has its part of the weights, and all of them use the kernel or none does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.attention import Attention
from tiercel.layers.linear import Linear
from tiercel.layers.mlp import GatedMLP
from tiercel.ops.fused_decode_step import (
    DecoderShape,
    FusedDecodeStepBuilder,
    FusedDecodeStepCaches,
    FusedDecodeStepWeights,
    Refusal,
    StepGeometry,
    fused_decode_step,
    prepare_caches,
    refuse_device,
    refuse_pairs,
    refuse_shape,
    refuse_sharing,
    select_geometry,
    share_memory,
)
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.ops.packed_repack import packed_repack
from tiercel.parallel import SINGLE, Group
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout


class StepLayer(Struct, frozen=True):
    """The parts of a layer; its norms are float32 weights.

    Those of q and k heads are two or none, and so are those of the outputs of attention and MLP.
    """

    attn_norm: Tensor
    head_norms: tuple[Tensor, ...]
    attention: Attention
    mlp_norm: Tensor
    mlp: GatedMLP
    update_norms: tuple[Tensor, ...] = ()


class FusedDecodeStep:
    """Runs one token, or two; see ops/fused_decode_step.py.

    Attributes:
        no_pairs: why it takes no two tokens; None if it does.
    """

    def __init__(self, weights: FusedDecodeStepWeights, no_pairs: Refusal | None = None) -> None:
        self.weights = weights
        self.no_pairs = no_pairs
        self.caches: FusedDecodeStepCaches | None = None  # set by bind_cache
        self.groups = (0, 0)  # of full layers and of sliding ones

    def bind_cache(self, planes: Sequence[dict[str, Tensor]], groups: Sequence[int]) -> None:
        """Take the planes of all layers, in order, and the group whose tables find each layer's."""
        k, v = ([plane[name] for plane in planes] for name in ("k", "v"))
        geometry = self.weights.geometry
        self.caches = prepare_caches(geometry, k, v)
        sliding = geometry.shape.sliding or (False,) * len(groups)
        of_kind = dict(zip(sliding, groups, strict=True))
        # A kind without layers has no tables: those of the other are read in its place.
        self.groups = (of_kind.get(False, groups[0]), of_kind.get(True, groups[0]))

    def supports(self, batch: Batch) -> bool:
        """Whether a batch is one token, or two if it takes them, without items to score."""
        tokens = batch.num_tokens
        if batch.items is not None or self.caches is None or tokens > self.weights.most_tokens:
            return False
        # Of two requests each has one: none is padding without a token.
        return tokens == 1 or (tokens == 2 and batch.num_reqs * batch.max_query_len == 2)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, hidden) float32. Returns the residual after the last layer, of the same shape."""
        assert self.caches is not None, "supports() is True"
        return fused_decode_step(x, self.weights, self.caches, batch, self.groups)


def make_fused_decode_step(
    layers: Sequence[StepLayer],
    shape: DecoderShape,
    eps: float,
    device: torch.device,
    builder: FusedDecodeStepBuilder | None = None,
    group: Group = SINGLE,
    refusal: Refusal | None = None,
) -> FusedDecodeStep | Refusal:
    """Copy the layers' weights for the kernel, or say why it does not fit shape, device or types.

    Args:
        layers: all of a decoder, of one shape.
        shape: of the decoder, or of a rank's part.
        eps: of all norms.
        device: where the weights are.
        builder: has all matrices already, which the layers read there; None to copy theirs.
        group: ranks that share the model; all of them call it.
        refusal: why this rank has no copy, perhaps unlike the others.
    """
    refusal = refusal or refuse_shape(shape)
    if builder is None:
        has_memory = group.small_sums is not None
        common = refuse_device(device) or refuse_sharing(group.size, has_memory=has_memory)
        if common is not None:  # on all ranks
            return refusal or common
    plan = builder or refusal or _plan(layers, shape)
    memory = None
    if group.processes is not None:
        # Ranks may have parts of other widths; all go one way, or sums would wait for ever.
        own = plan if isinstance(plan, Refusal) else None
        shared = share_memory(shape, group.processes, device, own)
        if isinstance(shared, Refusal):
            return shared
        memory = shared
    if isinstance(plan, Refusal):
        return plan
    made = _copy(plan, device) if isinstance(plan, _Plan) else plan
    norms: list[Tensor] = []
    head_norms: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        norms += [layer.attn_norm, layer.mlp_norm, *layer.update_norms]
        head_norms += layer.head_norms
        if layer.attention.qkv.bias is not None:
            biases.append(layer.attention.qkv.bias.float())
    attention = layers[0].attention
    no_pairs = refuse_pairs(made.geometry)
    weights = made.finish(
        norms,
        head_norms,
        biases,
        _rope_tables(layers, shape),
        eps=eps,
        scale=attention.shape.scale,
        memory=memory,
        most_tokens=2 if no_pairs is None else 1,
    )
    return FusedDecodeStep(weights, no_pairs)


class _Plan(Struct, frozen=True):
    """What is to be copied, and how it is dealt out."""

    geometry: StepGeometry
    layers: tuple[dict[str, _Rows], ...]


def _plan(layers: Sequence[StepLayer], shape: DecoderShape) -> _Plan | Refusal:
    """The layers' matrices, or why they do not fit."""
    cuts = [_cut(layer, shape) for layer in layers]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(cuts):
        return Refusal(f"a matrix of layer {cuts.index(None)} is not packed")
    types = [{name: part.qtypes for name, part in cut.items()} for cut in known]
    geometry = select_geometry(shape, types)
    return geometry if isinstance(geometry, Refusal) else _Plan(geometry, tuple(known))


def _copy(plan: _Plan, device: torch.device) -> FusedDecodeStepBuilder:
    """The layers' matrices a second time."""
    builder = FusedDecodeStepBuilder(plan.geometry, device)
    for index, cut in enumerate(plan.layers):
        builder.add(index, {name: part.in_file_layout() for name, part in cut.items()})
    return builder


def _rope_tables(layers: Sequence[StepLayer], shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Of full layers and of sliding ones."""
    sliding = shape.sliding or (False,) * len(layers)
    tables = {kind: layer.attention.rope_table for kind, layer in zip(sliding, layers, strict=True)}
    any_table = layers[0].attention.rope_table
    return tables.get(False, any_table), tables.get(True, any_table)


class _Rows(Struct, frozen=True):
    """Rows of packed matrices that form one matrix of the kernel: gate and up are two."""

    parts: tuple[tuple[QuantTensor, int, int], ...]

    @property
    def qtypes(self) -> tuple[str, ...]:
        return tuple(tensor.qtype.name for tensor, _, _ in self.parts)

    def in_file_layout(self) -> list[QuantTensor]:
        return [
            packed_repack(tensor, Layout.FILE).rows(first, last)
            for tensor, first, last in self.parts
        ]


def _cut(layer: StepLayer, shape: DecoderShape) -> dict[str, _Rows] | None:
    """A layer's matrices; None if one of them is not packed."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention, mlp = layer.attention, layer.mlp
    parts = (
        *_cut_linear(attention.qkv, (q_size, kv_size, kv_size)),
        *_cut_linear(attention.output, (shape.hidden_size,)),
        *_cut_linear(mlp.gate_up, (shape.intermediate_size,) * 2),
        *_cut_linear(mlp.down, (shape.hidden_size,)),
    )
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    q, k, v, o, gate, up, down = found
    one = {"q": q, "k": k, "v": v, "o": o, "down": down}
    return {name: _Rows((place,)) for name, place in one.items()} | {"gate_up": _Rows((gate, up))}


def _cut_linear(linear: Linear, sizes: Sequence[int]) -> list[tuple[QuantTensor, int, int] | None]:
    """The packed matrix of each of some adjacent parts and its rows there, or None."""
    found: list[tuple[QuantTensor, int, int] | None] = []
    segments = iter(linear.weight.segments)
    segment, first = next(segments), 0
    for size in sizes:
        rows = segment.tensor.shape[0] if isinstance(segment, PackedWeight) else segment.shape[0]
        if first == rows:
            segment, first = next(segments), 0
        whole = segment.tensor if isinstance(segment, PackedWeight) else None
        found.append(None if whole is None else (whole, first, first + size))
        first += size
    return found
