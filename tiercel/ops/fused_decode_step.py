"""All layers of a dense decoder for one new token, or two, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused import fused_decode_step as kernel
from tiercel.kernels.fused import fused_device
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK,
    BLOCK_TOKENS,
    MATRICES,
    MOST_STEP_TOKENS,
    READ_TYPES,
)
from tiercel.kernels.fused.fused_decode_step_geometry import DecoderShape as DecoderShape
from tiercel.kernels.fused.fused_decode_step_geometry import StepGeometry as StepGeometry
from tiercel.kernels.fused.fused_decode_step_geometry import refuse_pairs as refuse_pairs
from tiercel.kernels.fused.fused_decode_step_geometry import refuse_shape as refuse_shape
from tiercel.kernels.fused.fused_decode_step_geometry import select_geometry as select_geometry
from tiercel.kernels.fused.fused_decode_step_rows import RowTable
from tiercel.kernels.fused.fused_decode_step_stream import MatrixOrder, StreamLayout
from tiercel.kernels.fused.fused_device import refuse_device as refuse_device
from tiercel.kernels.fused.fused_refusal import CTAS
from tiercel.kernels.fused.fused_refusal import Refusal as Refusal
from tiercel.kernels.fused.fused_refusal import refuse_sharing as refuse_sharing
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

_GROUP = 32  # activations with one scale


class StepStream:
    """The weights of all layers in one tensor, and where each matrix is.

    Attributes:
        geometry: of the decoder.
        layout: of the stream.
        data: (bytes,) uint8, in the order of kernels/fused/fused_decode_step_stream.py.
    """

    def __init__(self, geometry: StepGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.layout = StreamLayout(geometry)
        # Not all bytes are weights: some fill lines.
        self.data = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self._orders: dict[tuple[str, str], MatrixOrder] = {}
        self._tables: dict[tuple[str, str], RowTable] = {}

    def _order(self, layer: int, name: str) -> MatrixOrder:
        qtype = self.geometry.qtype(layer, name)
        if (name, qtype) not in self._orders:
            self._orders[name, qtype] = MatrixOrder(self.geometry, name, qtype, self.data.device)
        return self._orders[name, qtype]

    def write(self, layer: int, name: str, rows: Tensor) -> None:
        """Put a matrix, (rows, row bytes) uint8 as in a file, into its place."""
        place = self.layout.place(layer, name)
        self._order(layer, name).write(self.data, place, rows)

    def read(self, layer: int, name: str) -> Tensor:
        """The inverse of `write`."""
        return self._order(layer, name).read(self.data, self.layout.place(layer, name))

    def matrix(self, layer: int, name: str) -> QuantTensor:
        """A matrix where it is, in layout STEP, for the kernels that read single matrices.

        Raises:
            ArgumentError: they do not read its type from here.
        """
        qtype = self.geometry.qtype(layer, name)
        if qtype not in READ_TYPES:
            raise ArgumentError(
                f"fused_decode_step: {name} of layer {layer} is {qtype}, which no other kernel "
                "reads from its weights.",
                hint=f"Types: {', '.join(READ_TYPES)}.",
            )
        if (name, qtype) not in self._tables:
            self._tables[name, qtype] = RowTable(self.geometry, name, qtype)
        table = self._tables[name, qtype].place(self.layout.place(layer, name))
        shape = (table.shape[1], self.geometry.plan(name).blocks * BLOCK)
        planes = {"weights": self.data, "table": table.to(self.data.device)}
        return QuantTensor(QuantType[qtype], Layout.STEP, shape, planes)

    def forget_orders(self) -> None:
        """Free the lists of pieces and rows, which a step does not need."""
        self._orders.clear()
        self._tables.clear()


class FusedDecodeStepWeights(Struct, frozen=True):
    """The weights of all layers as `fused_decode_step` reads them.

    Attributes:
        stream: the matrices.
        starts: (CTAs, groups of warps) int64, where each group begins in the stream.
        shares: (CTAs, 1 + most) int32, the groups of 32 pairs of gate and up of each CTA.
        norms: (2 * layers, hidden) float32, of attention and MLP in turn; with norms of updates
            4 a layer, those of attention's and of the MLP's last.
        head_norms: (layers, 2, head_dim) float32, of q and k; None without.
        bias: (layers, rows of q, k and v) float32; None without.
        ropes: (positions, 2, head_dim / 2) float32, cos and sin, of full layers and of sliding
            ones; the same twice where there are no two.
        exchange: int32, through which activations travel.
        eps: of all norms.
        scale: of the scores.
        memory: in which ranks that share the model exchange sums; all make the same calls in the
            same order. None for one GPU.
        passed: (CTAs,) int32, layers of all calls so far; None for one GPU.
        most_tokens: of a call: 1 or 2.
    """

    stream: StepStream
    starts: Tensor
    shares: Tensor
    norms: Tensor
    head_norms: Tensor | None
    bias: Tensor | None
    ropes: tuple[Tensor, Tensor]
    exchange: Tensor
    eps: float
    scale: float
    memory: SymmetricMemory | None = None
    passed: Tensor | None = None
    most_tokens: int = 1

    @property
    def geometry(self) -> StepGeometry:
        """Of the decoder."""
        return self.stream.geometry


class FusedDecodeStepCaches(Struct, frozen=True):
    """Keys and values of all layers, (blocks, 64, kv_heads, head_dim) each, and their addresses."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    on_device: Any


class FusedDecodeStepBuilder:
    """Packs the weights of all layers, one layer at a time, so that memory holds no second copy."""

    def __init__(self, geometry: StepGeometry, device: torch.device) -> None:
        """Allocate.

        Args:
            geometry: of the decoder.
            device: of the result.
        """
        self.geometry = geometry
        self.stream = StepStream(geometry, device)

    def add(self, layer: int, matrices: Mapping[str, Sequence[QuantTensor]]) -> None:
        """Write a layer.

        Args:
            layer: its number.
            matrices: of each of `MATRICES` its parts in layout FILE: gate and up, else one.

        Raises:
            ArgumentError: a type is not that of the layer's mask.
        """
        for name in MATRICES:
            self._write(layer, name, matrices[name])

    def _write(self, layer: int, name: str, parts: Sequence[QuantTensor]) -> None:
        expected = QuantType[self.geometry.qtype(layer, name)]
        if any(part.qtype is not expected for part in parts):
            raise ArgumentError(
                f"fused_decode_step: {name} of layer {layer} is {parts[0].qtype.name}.",
                hint=f"Its mask says {expected.name}.",
            )
        data = [part.planes["data"] for part in parts]
        rows = data[0] if len(data) == 1 else torch.stack(data, dim=1).flatten(0, 1)
        self.stream.write(layer, name, rows)

    def rest(self, layer: int, parts: Mapping[str, QuantTensor]) -> list[QuantTensor]:
        """Write matrices that share an input, and say where they are: this is their only copy.

        Args:
            layer: its number.
            parts: by name, q, k and v, or o, or gate and up, or down, in layout FILE.

        Returns:
            The same in layout STEP.

        Raises:
            ArgumentError: a type is not that of the layer's mask, or not read from here.
        """
        if "gate" in parts:
            self._write(layer, "gate_up", [parts["gate"], parts["up"]])
            both = self.stream.matrix(layer, "gate_up")
            return [_every_second(both, first) for first in (0, 1)]
        for name, part in parts.items():
            self._write(layer, name, [part])
        return [self.stream.matrix(layer, name) for name in parts]

    def finish(
        self,
        norms: Sequence[Tensor],
        head_norms: Sequence[Tensor],
        biases: Sequence[Tensor],
        ropes: tuple[Tensor, Tensor],
        *,
        eps: float,
        scale: float,
        memory: SymmetricMemory | None = None,
        most_tokens: int = 1,
    ) -> FusedDecodeStepWeights:
        """Weights with everything else that a step reads; on a GPU the kernel is loaded.

        Args:
            norms: (hidden,) float32, in the order of `FusedDecodeStepWeights.norms`.
            head_norms: (head_dim,) float32, of q and k of each layer in turn; none without.
            biases: (rows of q, k and v,) float32, of each layer; none without.
            ropes: see `FusedDecodeStepWeights`.
            eps: of all norms.
            scale: of the scores.
            memory: from `share_memory`, where several GPUs share the model.
            most_tokens: of a call; 2 only where `refuse_pairs` has no reason.
        """
        device = self.stream.data.device
        assert 1 <= most_tokens <= MOST_STEP_TOKENS, "registers"
        assert (self.geometry.shape.ranks > 1) == (memory is not None), "ranks exchange sums"
        self.stream.forget_orders()
        words = most_tokens * kernel.exchange_words(self.geometry)
        weights = FusedDecodeStepWeights(
            self.stream,
            self.stream.layout.starts.to(device),
            torch.tensor(kernel.shares_table(self.geometry), dtype=torch.int32, device=device),
            torch.stack(list(norms)),
            torch.stack(list(head_norms)).unflatten(0, (-1, 2)) if head_norms else None,
            torch.stack(list(biases)) if biases else None,
            ropes,
            torch.empty(words, dtype=torch.int32, device=device),
            eps,
            scale,
            memory,
            None if memory is None else torch.zeros(CTAS, dtype=torch.int32, device=device),
            most_tokens,
        )
        for tokens in range(1, most_tokens + 1 if device.type == "cuda" else 1):
            kernel.load_fused_decode_step(
                self.geometry,
                device,
                has_qk_norm=bool(head_norms),
                has_bias=bool(biases),
                tokens=tokens,
            )
        return weights


def share_memory(
    shape: DecoderShape, group: dist.ProcessGroup, device: torch.device, refusal: Refusal | None
) -> SymmetricMemory | Refusal:
    """Memory in which ranks exchange sums, or why there is none: `fused_device.share_memory`."""
    return fused_device.share_memory(kernel.peer_bytes(shape), group, device, refusal)


def make_one_copy(
    geometry: StepGeometry | Refusal, device: torch.device
) -> FusedDecodeStepBuilder | Refusal:
    """The weights of a step in which all kernels find theirs, or why some would not.

    Args:
        geometry: of the decoder, or why there is none.
        device: of the weights.
    """
    if isinstance(geometry, Refusal):
        return geometry
    if geometry.unread_types:
        types = ", ".join(geometry.unread_types)
        return Refusal(f"other kernels do not read {types} from the step's weights")
    return FusedDecodeStepBuilder(geometry, device)


def _every_second(both: QuantTensor, first: int) -> QuantTensor:
    """Rows of gate, or of up, of the two in layout STEP."""
    planes = both.planes | {"table": both.planes["table"][:, first::2].contiguous()}
    return QuantTensor(both.qtype, both.layout, (both.shape[0] // 2, both.shape[1]), planes)


def prepare_caches(
    geometry: StepGeometry, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]
) -> FusedDecodeStepCaches:
    """Describe the caches of all layers to the kernel.

    Args:
        geometry: of the decoder.
        k_caches: of each layer (blocks, 64, kv_heads, head_dim) float16 contiguous.
        v_caches: the same.

    Raises:
        ArgumentError: one has another shape or dtype.
    """
    tail = (BLOCK_TOKENS, geometry.shape.num_kv_heads, geometry.shape.head_dim)
    for plane in (*k_caches, *v_caches):
        is_right = tuple(plane.shape[1:]) == tail and plane.is_contiguous()
        if not is_right or plane.dtype != torch.float16:
            raise ArgumentError(
                f"fused_decode_step: a cache is {tuple(plane.shape)} {plane.dtype}.",
                hint=f"Pass contiguous (blocks, {', '.join(map(str, tail))}) float16.",
            )
    on_device = kernel.make_caches(k_caches, v_caches) if k_caches[0].is_cuda else None
    return FusedDecodeStepCaches(tuple(k_caches), tuple(v_caches), on_device)


def fused_decode_step(
    x: Tensor,
    weights: FusedDecodeStepWeights,
    caches: FusedDecodeStepCaches,
    batch: Batch,
    groups: tuple[int, int] = (0, 0),
) -> Tensor:
    """Pass one token or two through all layers; their keys and values go to the cache.

    Two are of two requests, or neighbours of one, of which the second sees the first. Each has the
    bits that it has alone.

    Inputs of matrices are rounded to 8 bits with one scale for 32, sums are exact within 32, then
    float32. Queries, keys, values and attention's weights are float16. The result has the same bits
    in every run, in a graph or outside; it is not that of the ops for more tokens. One launch at a
    time on a device: activations travel through `weights.exchange`.

    Args:
        x: (T, hidden) float32, the embeddings of the tokens.
        weights: from `FusedDecodeStepBuilder`.
        caches: from `prepare_caches`.
        batch: with T tokens, of one request or of T; lengths, blocks and slots are read on the
            device.
        groups: the cache groups of full layers and of sliding ones.

    Returns:
        (T, hidden) float32, the residual before the last norm; NaN if a launch could not end.

    Raises:
        ArgumentError: x or the batch is another.
    """
    _check_tokens(x, weights, batch)
    tokens = batch.num_tokens
    if not x.is_cuda:
        assert weights.memory is None, "of one process"
        rows = [
            _fused_decode_step_torch(x[token], weights, caches, batch, groups, token)
            for token in range(tokens)
        ]
        return torch.stack(rows)
    out = torch.empty_like(x)
    exchange = weights.exchange[: tokens * kernel.exchange_words(weights.geometry)]
    exchange.fill_(kernel.EXCHANGE_EMPTY)
    args = kernel.make_args(
        x.contiguous(),
        out,
        weights.stream.data,
        weights.starts,
        weights.shares,
        weights.geometry,
        weights.norms,
        weights.head_norms,
        weights.bias,
        weights.ropes,
        exchange,
        batch.positions,
        batch.seq_lens,
        batch.rows,
        (batch.block_tables[groups[0]], batch.block_tables[groups[1]]),
        (batch.slot_mapping[groups[0]], batch.slot_mapping[groups[1]]),
        eps=weights.eps,
        scale=weights.scale,
        memory=weights.memory,
        passed=weights.passed,
    )
    kernel.launch_fused_decode_step(
        args,
        caches.on_device,
        weights.geometry,
        x.device,
        has_qk_norm=weights.head_norms is not None,
        has_bias=weights.bias is not None,
        tokens=tokens,
    )
    return out


def _check_tokens(x: Tensor, weights: FusedDecodeStepWeights, batch: Batch) -> None:
    hidden, tokens = weights.geometry.shape.hidden_size, batch.num_tokens
    is_right = x.shape == (tokens, hidden) and x.dtype == torch.float32
    if not is_right or not 1 <= tokens <= weights.most_tokens or batch.num_reqs not in (1, tokens):
        raise ArgumentError(
            f"fused_decode_step: x is {tuple(x.shape)} {x.dtype} for {tokens} tokens of "
            f"{batch.num_reqs} requests.",
            hint=f"Pass (T, {hidden}) float32, T up to {weights.most_tokens}, of 1 or T requests.",
        )


# ---- on a CPU


def _rounded(x: Tensor) -> Tensor:
    """Each 32 neighbours to 8 bits and back."""
    groups = x.unflatten(0, (-1, _GROUP))
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0.0).round()
    flat: Tensor = (codes * scale).flatten()
    return flat


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh")
    return torch.nn.functional.silu(gate)


def _cached_slots(batch: Batch, group: int, window: int, token: int) -> Tensor:
    """Slots of the earlier tokens that a token sees in a layer."""
    request = token if batch.num_reqs > 1 else 0
    behind = batch.num_tokens - 1 - token if batch.num_reqs == 1 else 0
    tables = batch.block_tables[group, batch.rows[request]]
    length = int(batch.seq_lens[request]) - behind
    tokens = torch.arange(max(0, length - window) if window else 0, length - 1)
    slots: Tensor = tables[tokens // BLOCK_TOKENS].long() * BLOCK_TOKENS + tokens % BLOCK_TOKENS
    return slots


def _fused_decode_step_torch(
    x: Tensor,
    weights: FusedDecodeStepWeights,
    caches: FusedDecodeStepCaches,
    batch: Batch,
    groups: tuple[int, int],
    token: int,
) -> Tensor:
    """The kernel's arithmetic for a token, matrix by matrix; those before it have passed."""
    shape = weights.geometry.shape
    sliding = shape.sliding or (False,) * shape.num_layers
    all_norms = weights.norms.unflatten(0, (shape.num_layers, -1))
    for layer, norms in enumerate(all_norms):

        def times(name: str, y: Tensor, layer: int = layer) -> Tensor:
            data = weights.stream.read(layer, name)
            qtype = QuantType[weights.geometry.qtype(layer, name)]
            matrix = QuantTensor(qtype, Layout.FILE, (len(data), len(y)), {"data": data})
            return dequantize(matrix, torch.float32) @ _rounded(y)

        def updated(x: Tensor, update: Tensor, i: int, norms: Tensor = norms) -> Tensor:
            has_norm = shape.has_update_norms
            return x + (_norm(update, norms[2 + i], weights.eps) if has_norm else update)

        h = _norm(x, norms[0], weights.eps)
        rows = [times(name, h) for name in MATRICES[:3]]
        if weights.bias is not None:
            biases = weights.bias[layer].split([len(row) for row in rows])
            rows = [row + bias for row, bias in zip(rows, biases, strict=True)]
        kind = int(sliding[layer])
        window = shape.window if kind else 0
        slots = _cached_slots(batch, groups[kind], window, token)
        slot = int(batch.slot_mapping[groups[kind], token])
        turn = weights.ropes[kind][int(batch.positions[token])]
        x = updated(x, times("o", _attend(rows, weights, caches, layer, turn, slots, slot)), 0)
        h = _norm(x, norms[1], weights.eps)
        gate, up = times("gate_up", h).unflatten(0, (-1, 2)).unbind(1)
        x = updated(x, times("down", _activated(gate, shape.activation) * up), 1)
    return x


def _attend(
    rows: Sequence[Tensor],
    weights: FusedDecodeStepWeights,
    caches: FusedDecodeStepCaches,
    layer: int,
    turn: Tensor,
    slots: Tensor,
    slot: int,
) -> Tensor:
    """Attention's output for rows of q, k and v; the new key and value go to `slot`."""
    shape = weights.geometry.shape
    cos, sin = turn

    def turned(heads: Tensor, i: int) -> Tensor:
        if weights.head_norms is not None:
            heads = _norm(heads, weights.head_norms[layer, i], weights.eps)
        first, second = heads.chunk(2, dim=1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), 1).half()

    q, k, v = (row.unflatten(0, (-1, shape.head_dim)) for row in rows)
    q, k, v = turned(q, 0), turned(k, 1), v.half()
    keys, values = (
        torch.cat((plane[layer].flatten(0, 1)[slots], new[None])).float()
        for plane, new in ((caches.k, k), (caches.v, v))
    )
    if slot >= 0:
        caches.k[layer].flatten(0, 1)[slot] = k
        caches.v[layer].flatten(0, 1)[slot] = v
    grouped = q.float().unflatten(0, (shape.num_kv_heads, -1))
    scores = torch.einsum("ghd,tgd->ght", grouped, keys) * weights.scale
    return torch.einsum("ght,tgd->ghd", scores.softmax(dim=2), values).flatten()
