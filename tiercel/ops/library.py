"""DeepSeek-V4's operators as `torch.ops.tiercel.*`, for other frameworks, graphs and compilers.

    import tiercel.ops.library
    ids, weights = torch.ops.tiercel.moe_route(logits, bias, 6, 2.5)

Importing the module registers them; nothing in Tiercel does, because a call through PyTorch's
dispatcher takes several microseconds. Each has the arguments of the function of the same name,
which documents shapes, dtypes and errors, in a form that a schema can say:

    weights        a list of planes, the name of their type, and the block of FP8 scales ([1, 1] for
                   other types). F32, F16, BF16: one matrix or stack. Types of GGUF files: their
                   bytes, (..., out, row bytes) uint8. Block formats: q and scale; NVFP4 has the
                   global scale too, a factor
    paged keys     keys, scales, block tables and the row of each token, one after the other
    parts of keys  lists of caches, scales (empty tensors for floats) and slots

Results never alias arguments. Mutated arguments are declared, and returned by none. Fake
implementations make results of the right shape without data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import block_matvec as block_op
from tiercel.ops import grouped_linear as grouped_linear_op
from tiercel.ops import indexer_topk as indexer_op
from tiercel.ops import kv_compress as compress_op
from tiercel.ops import latent_rope as rope_op
from tiercel.ops import linear as linear_op
from tiercel.ops import mhc_mix as mhc_op
from tiercel.ops import moe_experts as experts_op
from tiercel.ops import moe_route as route_op
from tiercel.ops import sparse_attention as attention_op
from tiercel.ops.indexer_topk_torch import PagedKeys
from tiercel.ops.kv_compress_torch import Terms
from tiercel.ops.linear import LinearWeight
from tiercel.ops.moe_experts_torch import Experts
from tiercel.ops.sparse_attention_torch import SlottedKV
from tiercel.quant import QuantTensor
from tiercel.quant_types import FP4_GROUPS, Layout, QuantType

_LIBRARY: Final = torch.library.Library("tiercel", "FRAGMENT")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PLANES: Final = ("q", "scale", "global_scale")


def _register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of every device, and the shapes of its results."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tiercel::{name}", fake, lib=_LIBRARY)


def weight_of(planes: list[Tensor], kind: str, block: list[int]) -> Tensor | QuantTensor:
    """Weights of a list of planes; see the module.

    Raises:
        ArgumentError: no such type, or not its number of planes.
    """
    if kind in _FLOATS:
        _check_planes(kind, planes, 1)
        return planes[0]
    qtype = QuantType.__members__.get(kind)
    is_block = qtype is QuantType.FP8_BLOCK or qtype in FP4_GROUPS
    if qtype is None or not (qtype.is_ggml or is_block):
        raise ArgumentError(
            f"there are no weights of type {kind!r}.",
            hint="Pass F32, F16, BF16, a GGML type such as Q2_K, FP8_BLOCK, MXFP4 or NVFP4.",
        )
    if qtype.is_ggml and (not is_block or len(planes) == 1):
        _check_planes(kind, planes, 1)
        *stack, row_bytes = planes[0].shape
        cols = row_bytes // qtype.block_bytes * qtype.block_weights
        return QuantTensor(qtype, Layout.FILE, (*stack, cols), {"data": planes[0]})
    _check_planes(kind, planes, 3 if qtype is QuantType.NVFP4 else 2)
    *stack, width = planes[0].shape
    cols = width if qtype is QuantType.FP8_BLOCK else 2 * width
    named = dict(zip(_PLANES, planes, strict=False))
    return QuantTensor(qtype, Layout.BLOCKS, (*stack, cols), named, (block[0], block[1]))


def _check_planes(kind: str, planes: list[Tensor], count: int) -> None:
    if len(planes) != count:
        raise ArgumentError(
            f"{kind} weights with {len(planes)} planes.",
            hint=f"Pass {count}; see tiercel/ops/library.py.",
        )


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor],
    w3: list[Tensor],
    w2: list[Tensor],
    gate_up_kind: str,
    down_kind: str,
    block: list[int],
    limit: float | None,
) -> Tensor:
    gate, up = (weight_of(planes, gate_up_kind, block) for planes in (w1, w3))
    experts = Experts(gate, up, weight_of(w2, down_kind, block))
    return experts_op.moe_experts(x, ids, weights, experts, limit=limit)


def _grouped_linear(
    x: Tensor, weight: list[Tensor], kind: str, block: list[int], num_groups: int
) -> Tensor:
    return grouped_linear_op.grouped_linear(x, weight_of(weight, kind, block), num_groups)


def _linear(
    x: Tensor, weight: list[Tensor], kind: str, block: list[int], is_wide: bool = False
) -> Tensor:
    made = weight_of(weight, kind, block)
    segment = made.to(x.dtype) if isinstance(made, Tensor) else made
    reads_blocks = not block_op.device_refusal(x.device)
    rows, columns = segment.shape
    prepared = LinearWeight((segment,), (rows, columns), reads_blocks=reads_blocks)
    out_dtype = torch.float32 if is_wide else x.dtype
    return linear_op.linear(x.contiguous(), prepared, out_dtype=out_dtype)


def _kv_compress_step(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    phase: Tensor,
    stored_kv: Tensor,
    stored_gate: Tensor,
    slot_mapping: Tensor,
    entries: Tensor,
    fresh: Tensor,
    stored: Tensor,
    weight: Tensor,
    table: Tensor,
    eps: float,
) -> Tensor:
    planes, terms = (stored_kv, stored_gate), Terms(entries, fresh, stored)
    return compress_op.kv_compress_step(
        (kv, gate), bias, phase, planes, slot_mapping, terms, weight, table, eps=eps
    )


def _indexer_topk(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_ids: Tensor,
    visible: Tensor,
    topk: int,
    max_entries: int,
) -> Tensor:
    paged = PagedKeys(keys, scales, block_tables, seq_ids)
    return indexer_op.indexer_topk(q, weights, paged, visible, topk=topk, max_entries=max_entries)


def _sparse_attention(
    q: Tensor,
    caches: list[Tensor],
    scales: list[Tensor],
    slots: list[Tensor],
    rotary_dim: int,
    sink: Tensor | None,
    scale: float,
) -> Tensor:
    if not len(caches) == len(scales) == len(slots):
        raise ArgumentError(
            f"sparse_attention: {len(caches)} caches, {len(scales)} scales, {len(slots)} slots.",
            hint="Pass one of each for every part; an empty tensor where there are no scales.",
        )
    parts = tuple(
        SlottedKV(cache, listed, of_cache if of_cache.numel() else None, rotary_dim)
        for cache, of_cache, listed in zip(caches, scales, slots, strict=True)
    )
    return attention_op.sparse_attention(q, parts, sink, scale)


def _latent_rope(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
    has_hadamard: bool = False,
) -> Tensor:
    return rope_op.latent_rope(
        x, positions, table, eps=eps, weight=weight, inverse=inverse, has_hadamard=has_hadamard
    )


def _latent_write(
    x: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
    rotary_dim: int,
    positions: Tensor | None = None,
    table: Tensor | None = None,
    eps: float | None = None,
    weight: Tensor | None = None,
) -> None:
    if (positions is None) != (table is None):
        raise ArgumentError(
            "latent_write: positions without a table, or a table without positions.",
            hint="Pass both to rotate, or neither.",
        )
    rotation = None if positions is None or table is None else (positions, table)
    norm = None if eps is None else (eps, weight)
    rope_op.latent_write(
        x, (cache, scales), slot_mapping, rotary_dim=rotary_dim, rotation=rotation, norm=norm
    )


def _index_key_write(x: Tensor, cache: Tensor, scales: Tensor, slot_mapping: Tensor) -> None:
    rope_op.index_key_write(x, (cache, scales), slot_mapping)


def _mhc_mix_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return mhc_op.mhc_mix_pre(
        streams,
        fn,
        scale,
        base,
        rms_eps=rms_eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )


def _mhc_mix_collapse(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    return mhc_op.mhc_mix_collapse(streams, fn, scale, base, rms_eps=rms_eps, hc_eps=hc_eps)


def _moe_route(logits: Tensor, bias: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    ids, weights = route_op.moe_route(logits, bias, topk=topk, scale=scale)
    return ids.contiguous(), weights


def _moe_route_hash(
    logits: Tensor, table: Tensor, token_ids: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return route_op.moe_route_hash(logits, table, token_ids, scale=scale)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _nothing(*_: Any) -> None:
    return None


def _routes(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], topk)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def _mixed(streams: Tensor, fn: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, hidden = streams.shape
    return (
        streams.new_empty((tokens, hidden)),
        fn.new_empty((tokens, n)),
        fn.new_empty((tokens, n, n)),
    )


_WEIGHT: Final = "Tensor[] weight, str kind, int[2] block"
_register(
    "mhc_mix_pre(Tensor streams, Tensor fn, Tensor scale, Tensor base, float rms_eps, "
    "float hc_eps, int sinkhorn_iters, Tensor? norm_weight=None, float norm_eps=0.0) "
    "-> (Tensor, Tensor, Tensor)",
    _mhc_mix_pre,
    _mixed,
)
_register(
    "mhc_mix_post(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor",
    mhc_op.mhc_mix_post,
    _like,
)
_register(
    "mhc_mix_collapse(Tensor streams, Tensor fn, Tensor scale, Tensor base, float rms_eps, "
    "float hc_eps) -> Tensor",
    _mhc_mix_collapse,
    lambda streams, *_: streams.new_empty((streams.shape[0], streams.shape[2])),
)
_register(
    "latent_rope(Tensor x, Tensor positions, Tensor table, float? eps=None, Tensor? weight=None, "
    "bool inverse=False, bool has_hadamard=False) -> Tensor",
    _latent_rope,
    _like,
)
_register(
    "latent_write(Tensor x, Tensor(a!) cache, Tensor(b!)? scales, Tensor slot_mapping, "
    "int rotary_dim, Tensor? positions=None, Tensor? table=None, float? eps=None, "
    "Tensor? weight=None) -> ()",
    _latent_write,
    _nothing,
)
_register(
    "index_key_write(Tensor x, Tensor(a!) cache, Tensor(b!) scales, Tensor slot_mapping) -> ()",
    _index_key_write,
    _nothing,
)
_register(
    "indexer_topk(Tensor q, Tensor weights, Tensor keys, Tensor? scales, Tensor block_tables, "
    "Tensor seq_ids, Tensor visible, int topk, int max_entries) -> Tensor",
    _indexer_topk,
    lambda q, *rest: q.new_empty((q.shape[0], rest[-2]), dtype=torch.int32),
)
_register(
    "sparse_attention(Tensor q, Tensor[] caches, Tensor[] scales, Tensor[] slots, "
    "int rotary_dim, Tensor? sink, float scale) -> Tensor",
    _sparse_attention,
    _like,
)
_register(
    "moe_route(Tensor logits, Tensor bias, int topk, float scale) -> (Tensor, Tensor)",
    _moe_route,
    lambda logits, bias, topk, scale: _routes(logits, topk),  # noqa: ARG005
)
_register(
    "moe_route_hash(Tensor logits, Tensor table, Tensor token_ids, float scale) "
    "-> (Tensor, Tensor)",
    _moe_route_hash,
    lambda logits, table, token_ids, scale: _routes(logits, table.shape[1]),  # noqa: ARG005
)
_register(
    "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor[] w1, Tensor[] w3, Tensor[] w2, "
    "str gate_up_kind, str down_kind, int[2] block, float? limit) -> Tensor",
    _experts,
    _like,
)
_register(
    f"linear(Tensor x, {_WEIGHT}, bool is_wide=False) -> Tensor",
    _linear,
    lambda x, weight, kind, block, is_wide=False: x.new_empty(  # noqa: ARG005
        (x.shape[0], weight[0].shape[0]), dtype=torch.float32 if is_wide else x.dtype
    ),
)
_register(
    "kv_compress_step(Tensor kv, Tensor gate, Tensor bias, Tensor phase, Tensor(a!) stored_kv, "
    "Tensor(b!) stored_gate, Tensor slot_mapping, Tensor entries, Tensor fresh, Tensor stored, "
    "Tensor weight, Tensor table, float eps) -> Tensor",
    _kv_compress_step,
    lambda kv, *rest: kv.new_empty(  # entries are the eighth argument, the norm's weight the 11th
        (rest[6].shape[0], rest[9].shape[0]), dtype=torch.float32
    ),
)
_register(
    f"grouped_linear(Tensor x, {_WEIGHT}, int num_groups) -> Tensor",
    _grouped_linear,
    lambda x, weight, kind, block, num_groups: x.new_empty(  # noqa: ARG005
        (x.shape[0], num_groups * (weight[0].shape[0] // num_groups))
    ),
)
