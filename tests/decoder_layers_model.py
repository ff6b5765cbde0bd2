"""Layers of a dense decoder with random weights, as the native op and as the oracle take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.test_dequantize import HALVES, random_blocks
from tiercel.batch import Batch
from tiercel.ops.decoder_layers import LayerParts, LayersShape, decoder_layers, prepare_layers
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import prepare_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import decoder_layers as oracle

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CPU, EPS, ROWS, POSITIONS = torch.device("cpu"), 1e-5, 6, 400
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LINEARS = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True)
class Model:
    """A shape and the types of its matrices."""

    types: str = "Q4_0 Q4_0 Q8_0 Q4_1 Q4_0 Q5_0 Q8_0"  # of MATRICES
    hidden: int = 96
    inner: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    half: int = 16
    windows: tuple[int, ...] = (0, 0)
    extras: tuple[str, ...] = ()
    activation: str = "silu"
    cache: torch.dtype = torch.float16
    rounds: bool = True
    block_size: int = 16


class Made:
    """Layers as the op and as the oracle take them, with caches of random contents."""

    def __init__(self, model, seed=0):
        torch.manual_seed(seed)
        self.model, self.num_blocks = model, 60
        self.parts, self.layers, self.ropes = [], [], []
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        sizes = {
            "q_norm": model.head_dim, "k_norm": model.head_dim, "qkv_bias": width,
            "o_bias": model.hidden, "attn_update_norm": model.hidden,
            "mlp_update_norm": model.hidden,
        }  # fmt: skip
        for index, window in enumerate(model.windows):
            matrices = self._matrices(seed * 100 + index)
            vectors = {"attn_norm": model.hidden, "mlp_norm": model.hidden}
            vectors |= {name: sizes[name] for name in model.extras}
            weights = {name: torch.rand(size) + 0.5 for name, size in vectors.items()}
            angles = torch.rand(POSITIONS, model.half) * 6
            rope = torch.stack((angles.cos(), angles.sin()), 1).contiguous()
            self.layers.append(
                weights | {n: dequantize(m, torch.float32) for n, m in matrices.items()}
            )
            self.ropes.append(rope)
            self.parts.append(self._parts(matrices, weights, rope, window, index))
        self.last_norm = torch.rand(model.hidden) if "mlp_update_norm" in model.extras else None
        shape = LayersShape(
            model.hidden, model.inner, model.heads, model.kv_heads, model.head_dim,
            model.activation, EPS, model.head_dim**-0.5, model.rounds,
        )  # fmt: skip
        self.native = prepare_layers(self.parts, shape, self.last_norm)
        self.reset()

    def _matrices(self, seed):
        m = self.model
        q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        shapes = [(q, m.hidden), (kv, m.hidden), (kv, m.hidden), (m.hidden, q)]
        shapes += [(m.inner, m.hidden)] * 2 + [(m.hidden, m.inner)]
        found = {}
        for place, (name, kind, (rows, cols)) in enumerate(
            zip(MATRICES, m.types.split(), shapes, strict=True)
        ):
            qtype = QuantType[kind]
            if qtype.is_float:
                values = torch.randn(rows, cols).to(getattr(torch, FLOATS[kind]))
                data = (values * 0.1).view(torch.uint8)
            else:
                blocks = random_blocks(kind, rows, cols // qtype.block_weights, seed * 10 + place)
                for byte in HALVES[kind]:  # small weights: attention stays soft
                    low = 0x0A if qtype.block_weights == 256 else 0x1A
                    blocks[..., byte + 1] = blocks[..., byte + 1] & 0x83 | low
                data = torch.as_tensor(blocks).view(rows, -1)
            found[name] = QuantTensor(qtype, Layout.FILE, (rows, cols), {"data": data})
        return found

    def _parts(self, matrices, weights, rope, window, index):
        dtype = torch.float16 if self.model.rounds else torch.float32
        linears = {
            name: prepare_linear([matrices[part] for part in parts], dtype, CPU).segments
            for name, parts in LINEARS.items()
        }
        norms = (weights["q_norm"], weights["k_norm"]) if "q_norm" in weights else None
        return LayerParts(
            attn_norm=weights["attn_norm"],
            attn_update_norm=weights.get("attn_update_norm") if index else None,
            mlp_norm=weights["mlp_norm"],
            mlp_update_norm=weights.get("mlp_update_norm"),
            qkv_bias=weights.get("qkv_bias"),
            output_bias=weights.get("o_bias"),
            head_norms=norms,
            rope=rope,
            window=window,
            **linears,
        )

    def reset(self):
        """Fill the caches with NaN, but for the null block."""
        m = self.model
        shape = (self.num_blocks, m.block_size, m.kv_heads, m.head_dim)
        self.caches = [
            {name: torch.full(shape, torch.nan, dtype=m.cache) for name in "kv"} for _ in m.windows
        ]
        for planes in self.caches:
            for plane in planes.values():
                plane[0] = 0
        self.native.bind_cache(self.caches, [0] * len(self.caches))

    def run(self, x, batch):
        return decoder_layers(x.clone(), self.native, batch, lambda: None)


def make_tables(made, lengths, seed=3):
    """(1, ROWS, blocks): requests in the last rows, their blocks in any order."""
    size = made.model.block_size
    order = iter(
        (
            torch.randperm(made.num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        ).tolist()
    )
    tables = torch.zeros((1, ROWS, POSITIONS // size + 2), dtype=torch.int32)
    for request, length in enumerate(lengths):
        for place in range(-(-length // size)):
            tables[0, ROWS - 1 - request, place] = next(order)
    return tables


def make_batch(made, tables, parts, items=None):
    """Requests of (row, tokens before, new tokens), in this order."""
    size = made.model.block_size
    rows = [ROWS - 1 - request for request, _, _ in parts]
    at = [torch.arange(past, past + new) for _, past, new in parts]
    slots = [
        tables[0, row].long()[place // size] * size + place % size
        for row, place in zip(rows, at, strict=True)
    ]
    lens = [new for _, _, new in parts]
    ends = torch.tensor([0, *lens]).cumsum(0).int()
    return Batch(
        input_ids=torch.zeros(sum(lens), dtype=torch.int32),
        positions=torch.cat(at).int(),
        cu_seqlens_q=ends,
        seq_lens=torch.tensor([past + new for _, past, new in parts], dtype=torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32),
        logits_rows=torch.zeros(0, dtype=torch.int32),
        slot_mapping=torch.cat(slots)[None],
        block_tables=tables,
        query_lens=tuple(lens),
        context_lens=tuple(past + new for _, past, new in parts),
        num_tokens=sum(lens),
        num_reqs=len(parts),
        max_query_len=max(lens),
        max_seq_len=max(past + new for _, past, new in parts),
        items=items,
    )


def expect(made, x, seen_of=None, positions=None):
    """The oracle's residual of a request from its first token on."""
    m, count = made.model, len(x)
    at = torch.arange(count)
    empty = torch.zeros((0, m.kv_heads, m.head_dim))
    layers = [layer | {"keys": empty, "values": empty} for layer in made.layers]
    layers[0].pop("attn_update_norm", None)
    causal = at <= at[:, None] if seen_of is None else seen_of
    seen = [causal & (at > at[:, None] - w) if w else causal for w in m.windows]
    places = at if positions is None else positions
    return oracle.decoder_layers(
        x, layers, [rope[places] for rope in made.ropes], seen, EPS, m.head_dim**-0.5,
        activation=m.activation, rounds=m.rounds, cache_dtype=m.cache,
        last_update_norm=made.last_norm,
    )  # fmt: skip
