"""The tensors that a DeepSeek-V4 file must have: found by name, their formats by their own types.

The format is a property of each weight, never of the model: a checkpoint may have FP8 attention,
MXFP4 experts in some layers and NVFP4 ones in others. It is told by the type of the values and of
the scales beside them:

    values            scales beside them                           format
    F8_E4M3           [ceil(out/b0), ceil(in/b1)] F8_E8M0 or F32   FP8_BLOCK
    I8, U8 [.., in/2] [out, in/32] F8_E8M0 or U8                   MXFP4
    I8, U8 [.., in/2] [out, in/16] F8_E4M3, and a F32 factor       NVFP4
                      (`weight_scale_2`) or divisor (`weight_global_scale`)
    floats, GGML      none                                         themselves

Free of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from tiercel.errors import ModelFormatError
from tiercel.loader.mapped import TensorInfo
from tiercel.models import deepseek_v4_names as tensor_names
from tiercel.models.config import ModelConfig
from tiercel.models.deepseek_v4 import (
    CSA_RATIO,
    NO_DSPARK,
    DeepseekV4Config,
    check_fp4_columns,
)
from tiercel.models.stored import StoredWeight
from tiercel.quant_types import FP4_GROUPS, QuantType

_INCOMPLETE: Final = "The file is incomplete or of another architecture: fetch it again."
_BYTES: Final = (QuantType.I8, QuantType.U8)
_E8M0: Final = (QuantType.F8_E8M0, QuantType.U8)


@dataclass(frozen=True, slots=True)
class Need:
    """A weight of the model.

    Attributes:
        name: ours.
        shape: (n,), (out, in) or (experts, out, in).
        kind: ``matrix`` (any format), ``floats`` (floats, GGML types too) or ``integers``.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of a file that belong to one weight: part -> expert (None: all) -> tensor."""

    parts: dict[str, dict[int | None, TensorInfo]] = field(default_factory=dict)


def find_weights(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], file: str, *, is_gguf: bool
) -> tuple[DeepseekV4Config, Mapping[str, StoredWeight]]:
    """Find every weight of a file; see `models/stored.py:FindWeights`."""
    assert isinstance(config, DeepseekV4Config)
    has_dspark = any(tensor_names.is_dspark(name) for name in tensors)
    if has_dspark or config.no_draft_head:
        config = replace(_without_mtp(config), no_draft_head=NO_DSPARK)
        tensors = {
            name: info
            for name, info in tensors.items()
            if not name.removeprefix("model.").startswith("mtp.")
        }
    groups = _group(config, tensors, file, is_gguf=is_gguf)
    if not any(name.startswith("mtp.") for name in groups):
        config = _without_mtp(config)
    finder = _Finder(config, tensors, groups, file, is_gguf=is_gguf)
    stored = {need.name: finder.find(need) for need in needed(config)}
    for name, group in groups.items():
        if name not in finder.used:
            info = next(iter(next(iter(group.parts.values())).values()))
            raise ModelFormatError(
                f"{file}: tensor {info.name!r:.80} does not belong to a DeepSeek-V4 model of this "
                "shape.",
                hint=_shape_hint(config),
            )
    return config, stored


def _without_mtp(config: DeepseekV4Config) -> DeepseekV4Config:
    ratios = config.compress_ratios[: config.num_layers]
    return replace(config, num_mtp_layers=0, compress_ratios=ratios)


def _shape_hint(config: DeepseekV4Config) -> str:
    draft = "an MTP block" if config.num_mtp_layers else "no MTP block"
    layers = f"{config.num_layers} layers of {config.num_experts} experts"
    return f"Its hyperparameters say {layers} and {draft}."


def needed(config: DeepseekV4Config) -> Iterator[Need]:
    """Yield every weight of the model."""
    hidden, streams = config.hidden_size, config.num_streams
    yield Need("embed.weight", (config.vocab_size, hidden))
    yield Need("norm.weight", (hidden,), "floats")
    yield Need("head.weight", (config.vocab_size, hidden))
    yield from _head_mix("", hidden, streams)
    for i in range(config.num_layers):
        prefix, ratio = f"layers.{i}.", config.compress_ratios[i]
        yield from _block(config, prefix, ratio)
        if i < config.num_hash_layers:
            shape = (config.vocab_size, config.num_experts_per_tok)
            yield Need(prefix + "ffn.gate.tid2eid", shape, "integers")
        else:
            yield Need(prefix + "ffn.gate.bias", (config.num_experts,), "floats")
    if config.num_mtp_layers:
        prefix = "mtp.0."
        yield from _block(config, prefix, 0)
        yield Need(prefix + "ffn.gate.bias", (config.num_experts,), "floats")
        yield Need(prefix + "e_proj.weight", (hidden, hidden))
        yield Need(prefix + "h_proj.weight", (hidden, hidden))
        for part in ("enorm", "hnorm", "norm"):
            yield Need(f"{prefix}{part}.weight", (hidden,), "floats")
        yield from _head_mix(prefix, hidden, streams)


def _head_mix(prefix: str, hidden: int, streams: int) -> Iterator[Need]:
    yield Need(prefix + "hc_head_fn", (streams, streams * hidden), "floats")
    yield Need(prefix + "hc_head_base", (streams,), "floats")
    yield Need(prefix + "hc_head_scale", (1,), "floats")


def _block(config: DeepseekV4Config, prefix: str, ratio: int) -> Iterator[Need]:
    hidden, inner, streams = config.hidden_size, config.intermediate_size, config.num_streams
    mixes = (2 + streams) * streams
    for part in ("attn", "ffn"):
        yield Need(f"{prefix}{part}_norm.weight", (hidden,), "floats")
        yield Need(f"{prefix}hc_{part}_fn", (mixes, streams * hidden), "floats")
        yield Need(f"{prefix}hc_{part}_base", (mixes,), "floats")
        yield Need(f"{prefix}hc_{part}_scale", (3,), "floats")
    yield from _attention(config, prefix + "attn.", ratio)
    yield Need(prefix + "ffn.gate.weight", (config.num_experts, hidden))
    for expert, count in (("experts", (config.num_experts,)), ("shared_experts", ())):
        for part in ("w1", "w3"):
            yield Need(f"{prefix}ffn.{expert}.{part}.weight", (*count, inner, hidden))
        yield Need(f"{prefix}ffn.{expert}.w2.weight", (*count, hidden, inner))


def _attention(config: DeepseekV4Config, prefix: str, ratio: int) -> Iterator[Need]:
    hidden, q_rank, head_dim = config.hidden_size, config.q_lora_rank, config.head_dim
    width, groups = config.num_heads * head_dim, config.num_output_groups
    yield Need(prefix + "wq_a.weight", (q_rank, hidden))
    yield Need(prefix + "q_norm.weight", (q_rank,), "floats")
    yield Need(prefix + "wq_b.weight", (width, q_rank))
    yield Need(prefix + "wkv.weight", (head_dim, hidden))
    yield Need(prefix + "kv_norm.weight", (head_dim,), "floats")
    yield Need(prefix + "attn_sink", (config.num_heads,), "floats")
    yield Need(prefix + "wo_a.weight", (groups * config.o_lora_rank, width // groups))
    yield Need(prefix + "wo_b.weight", (hidden, groups * config.o_lora_rank))
    if not ratio:
        return
    yield from _compressor(prefix + "compressor.", hidden, head_dim, ratio)
    if ratio == CSA_RATIO:
        heads, index_dim = config.index_num_heads, config.index_head_dim
        yield Need(prefix + "indexer.wq_b.weight", (heads * index_dim, q_rank))
        yield Need(prefix + "indexer.weights_proj.weight", (heads, hidden))
        yield from _compressor(prefix + "indexer.compressor.", hidden, index_dim, ratio)


def _compressor(prefix: str, hidden: int, width: int, ratio: int) -> Iterator[Need]:
    rows = 2 * width if ratio == CSA_RATIO else width  # CSA: entries overlap
    yield Need(prefix + "wkv.weight", (rows, hidden))
    yield Need(prefix + "wgate.weight", (rows, hidden))
    yield Need(prefix + "ape", (ratio, rows), "floats")
    yield Need(prefix + "norm.weight", (width,), "floats")


def _group(
    config: DeepseekV4Config, tensors: Mapping[str, TensorInfo], file: str, *, is_gguf: bool
) -> dict[str, _Group]:
    """The tensors of each weight by our name of it."""
    groups: dict[str, _Group] = {}
    for name, info in tensors.items():
        if tensor_names.is_passed_over(name):
            continue
        found = (
            tensor_names.from_gguf(name, config.num_layers)
            if is_gguf
            else tensor_names.from_hf(name)
        )
        if found is None:
            raise ModelFormatError(
                f"{file}: tensor {name!r:.80} is unknown.",
                hint="DeepSeek-V4 has no tensor of this name.",
            )
        part = groups.setdefault(found.weight, _Group()).parts.setdefault(found.part, {})
        other = part.get(found.expert)
        if other is None and part and (found.expert is None or None in part):
            other = next(iter(part.values()))  # one for all, and one of an expert
        if other is not None:
            raise ModelFormatError(
                f"{file}: tensors {name!r:.80} and {other.name!r:.80} mean the same.",
                hint="Each tensor may appear once.",
            )
        part[found.expert] = info
    return groups


class _Finder:
    """Finds the weights of one file, one after the other, and remembers the groups it used."""

    def __init__(
        self,
        config: DeepseekV4Config,
        tensors: Mapping[str, TensorInfo],
        groups: Mapping[str, _Group],
        file: str,
        *,
        is_gguf: bool,
    ) -> None:
        self.used: set[str] = set()
        self._config = config
        self._groups = groups
        self._file = file
        self._is_gguf = is_gguf
        self._names = frozenset(tensors)

    def find(self, need: Need) -> StoredWeight:
        """Where a weight is, once its tensors fit."""
        name, rows, cols, shape = need.name, None, None, need.shape
        if name not in self._groups:
            half, joined = name.rpartition(".")[0].rpartition(".")[2], ""
            if half in ("w1", "w3") and ".experts." in name:
                joined = name.replace(f".{half}.", ".w1w3.")
            elif half in ("e_proj", "h_proj"):
                joined = name.replace(half, "eh_proj")
            if joined in self._groups:
                axis = -2 if half in ("w1", "w3") else -1
                size = shape[axis]
                part = (0, size) if half in ("w1", "e_proj") else (size, 2 * size)
                rows, cols = (part, None) if axis == -2 else (None, part)
                shape = (*shape[:axis], 2 * size, *shape[axis:][1:])
                name = joined
            elif self._is_gguf and name.startswith("mtp.0.") and _is_shared(name):
                # llama.cpp's files leave the mix of the draft block's streams to the main one.
                name = name.removeprefix("mtp.0.")
        group = self._groups.get(name)
        if group is None:
            self._missing(need.name)
        self.used.add(name)
        stored = self._read_group(Need(need.name, shape, need.kind), group)
        if rows is not None or cols is not None:
            self._check_cut(need.name, stored, rows or cols or (0, 0))
            stored = replace(
                stored, shape=need.shape, nbytes=stored.nbytes // 2, rows=rows, cols=cols
            )
        return stored

    def _missing(self, name: str) -> NoReturn:
        """The error for a weight without values; `name` may have an expert's number."""
        if ".experts.w" in name and not self._is_gguf and not self._has_stacks():
            name = name.replace(".experts.", ".experts.0.")
        theirs = tensor_names.file_name(
            name, self._names, self._config.num_layers, is_gguf=self._is_gguf
        )
        raise ModelFormatError(f"{self._file}: tensor {theirs!r:.80} is missing.", hint=_INCOMPLETE)

    def _has_stacks(self) -> bool:
        return any(name.endswith(".experts.down_proj") for name in self._names)

    def _check_cut(self, name: str, stored: StoredWeight, part: tuple[int, int]) -> None:
        """Halves of a tensor must be whole blocks of its format."""
        is_rows = ".experts." in name
        if stored.qtype is QuantType.FP8_BLOCK:
            unit = stored.block[0 if is_rows else 1]
        else:
            unit = 1 if is_rows else FP4_GROUPS.get(stored.qtype, stored.qtype.block_weights)
        if part[1] % unit:
            tensor = next(iter(stored.planes.values()))[0]
            raise ModelFormatError(
                f"{self._file}: tensor {tensor!r:.80} joins two weights inside a block of {unit}.",
                hint="Store the two weights as tensors of their own.",
            )

    def _read_group(self, need: Need, group: _Group) -> StoredWeight:
        parts = group.parts
        values = parts.get("weight")
        if values is None:
            owner = next(iter(next(iter(parts.values())).values()))
            raise ModelFormatError(
                f"{self._file}: tensor {owner.name!r:.80} is there without the values it scales.",
                hint=_INCOMPLETE,
            )
        if need.kind != "matrix":
            (info,) = values.values()
            scales = {part: found[None] for part, found in parts.items() if part != "weight"}
            self._check_no_more(info, scales, ())
            return self._plain(need, info)
        experts = self._experts(need, values)
        weights = [
            self._matrix(need, group, expert, is_stack=expert is None and len(need.shape) == 3)
            for expert in experts
        ]
        first = weights[0]
        for weight, expert in zip(weights, experts, strict=True):
            if weight.qtype is not first.qtype or weight.planes.keys() != first.planes.keys():
                raise ModelFormatError(
                    f"{self._file}: tensor {values[expert].name!r:.80} is {_words(weight)}, and "
                    f"{values[experts[0]].name!r:.80} {_words(first)}.",
                    hint="The experts of a layer must be stored alike.",
                )
        if len(weights) == 1:
            return replace(first, shape=need.shape)
        planes = {key: tuple(w.planes[key][0] for w in weights) for key in first.planes}
        nbytes = sum(weight.nbytes for weight in weights)
        return replace(first, shape=need.shape, planes=planes, nbytes=nbytes)

    def _experts(self, need: Need, values: Mapping[int | None, TensorInfo]) -> list[int | None]:
        """Keys of the values in their order; each expert must be there once."""
        if None in values:
            return [None]
        count = need.shape[0] if len(need.shape) == 3 else 0
        for expert in range(count):
            if expert not in values:
                self._missing(need.name.replace(".experts.", f".experts.{expert}."))
        for number, info in values.items():
            if number is not None and number >= count:
                raise ModelFormatError(
                    f"{self._file}: tensor {info.name!r:.80} does not belong to a DeepSeek-V4 "
                    "model of this shape.",
                    hint=_shape_hint(self._config),
                )
        return list(range(count))

    def _plain(self, need: Need, info: TensorInfo) -> StoredWeight:
        """A weight without scales: floats or integers."""
        if need.kind == "integers":
            is_right, types = info.qtype in (QuantType.I64, QuantType.I32), "I64 or I32"
        else:
            # GGUF files may pack what multiplies; vectors are floats everywhere.
            is_packed = self._is_gguf and len(need.shape) == 2 and info.qtype.is_ggml
            is_right, types = info.qtype.is_float or is_packed, "F32, BF16 or F16"
        if not is_right or _shape(info) != need.shape:
            self._refuse(info, f"{list(need.shape)} {types}")
        limit = self._config.num_experts if need.kind == "integers" else 0
        planes = {"data": (info.name,)}
        return StoredWeight(info.qtype, need.shape, planes, info.nbytes, limit=limit)

    def _matrix(
        self, need: Need, group: _Group, expert: int | None, *, is_stack: bool
    ) -> StoredWeight:
        """One matrix, or a stack in one tensor, with its scales."""
        shape = need.shape if is_stack or len(need.shape) == 2 else need.shape[1:]
        info = group.parts["weight"][expert]
        scales = {
            part: found[expert]
            for part, found in group.parts.items()
            if part not in ("weight", "input_scale") and expert in found
        }
        packed = (*shape[:-1], shape[-1] // 2)
        if info.qtype is QuantType.F8_E4M3 and _shape(info) == shape:
            return self._fp8(shape, info, scales)
        if info.qtype in _BYTES and _shape(info) == packed:
            if ".experts." in need.name:
                check_fp4_columns(self._config, self._file)
            return self._fp4(shape, info, scales)
        is_plain = info.qtype.is_float or (self._is_gguf and info.qtype.is_ggml)
        if not is_plain or _shape(info) != shape:
            types = "a type of GGML" if self._is_gguf else "F8_E4M3, BF16, F16 or F32"
            fp4 = "" if self._is_gguf else f", or {list(packed)} I8 or U8"
            self._refuse(info, f"{list(shape)} {types}{fp4}")
        self._check_no_more(info, scales, ())
        return StoredWeight(info.qtype, shape, {"data": (info.name,)}, info.nbytes)

    def _fp8(
        self, shape: tuple[int, ...], info: TensorInfo, scales: dict[str, TensorInfo]
    ) -> StoredWeight:
        block = self._config.fp8_block
        size = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        scale = self._scale(info, scales, size, (*_E8M0, QuantType.F32))
        self._check_no_more(info, scales, ("scale",))
        planes = {"q": (info.name,), "scale": (scale.name,)}
        nbytes = info.nbytes + scale.nbytes
        return StoredWeight(QuantType.FP8_BLOCK, shape, planes, nbytes, block=block)

    def _fp4(
        self, shape: tuple[int, ...], info: TensorInfo, scales: dict[str, TensorInfo]
    ) -> StoredWeight:
        found = scales.get("scale")
        is_nvfp4 = found is not None and found.qtype is QuantType.F8_E4M3
        qtype = QuantType.NVFP4 if is_nvfp4 else QuantType.MXFP4
        columns = FP4_GROUPS[qtype]
        if shape[-1] % columns:
            raise ModelFormatError(
                f"{self._file}: tensor {info.name!r:.80} has rows of {shape[-1]} FP4 weights.",
                hint=f"They must be whole groups of {columns}.",
            )
        size = (*shape[:-1], shape[-1] // columns)
        types = (QuantType.F8_E4M3,) if is_nvfp4 else _E8M0
        planes, used = {"q": info}, ["scale"]
        planes["scale"] = self._scale(info, scales, size, types)
        if is_nvfp4:
            key = "divisor" if "divisor" in scales else "global_scale"
            factor = scales.get(key)
            if factor is None:
                raise ModelFormatError(
                    f"{self._file}: tensor {info.name!r:.80} is NVFP4 and has no global scale.",
                    hint="There must be a weight_scale_2 or weight_global_scale of F32 beside it.",
                )
            # A scalar of a file is shown as one number.
            if factor.qtype is not QuantType.F32 or math.prod(factor.dims) != math.prod(shape[:-2]):
                self._misfit(factor, info, f"{list(shape[:-2]) or [1]} F32")
            planes[key] = factor
            used.append(key)
        self._check_no_more(info, scales, tuple(used))
        nbytes = sum(plane.nbytes for plane in planes.values())
        names = {key: (plane.name,) for key, plane in planes.items()}
        return StoredWeight(qtype, shape, names, nbytes)

    def _scale(
        self,
        info: TensorInfo,
        scales: Mapping[str, TensorInfo],
        size: tuple[int, ...],
        types: tuple[QuantType, ...],
    ) -> TensorInfo:
        """The scales of a tensor's blocks, which must be of that size and one of those types."""
        words = f"{list(size)} {' or '.join(qtype.name for qtype in types)}"
        scale = scales.get("scale")
        if scale is None:
            raise ModelFormatError(
                f"{self._file}: tensor {info.name!r:.80} is {info.qtype.name} and has no scale.",
                hint=f"There must be a tensor of {words} beside it.",
            )
        if scale.qtype not in types or _shape(scale) != size:
            self._misfit(scale, info, words)
        return scale

    def _misfit(self, scale: TensorInfo, info: TensorInfo, words: str) -> NoReturn:
        raise ModelFormatError(
            f"{self._file}: tensor {scale.name!r:.80} is {_found(scale)}, which does not fit "
            f"{info.name!r:.80}, {_found(info)}.",
            hint=f"It must be {words}.",
        )

    def _check_no_more(
        self, info: TensorInfo, scales: Mapping[str, TensorInfo], used: tuple[str, ...]
    ) -> None:
        for part, scale in scales.items():
            if part not in used:
                raise ModelFormatError(
                    f"{self._file}: tensor {scale.name!r:.80} does not fit {info.name!r:.80}, "
                    f"{_found(info)}.",
                    hint="A weight of this format has no such scale.",
                )

    def _refuse(self, info: TensorInfo, words: str) -> NoReturn:
        raise ModelFormatError(
            f"{self._file}: tensor {info.name!r:.80}: expected {words}, found {_found(info)}.",
            hint="The file and its hyperparameters do not belong together: fetch it again.",
        )


def _is_shared(name: str) -> bool:
    """Whether a draft block of a GGUF file without this weight uses that of the main model."""
    return name.rpartition(".")[2].startswith("hc_head_") or name == "mtp.0.norm.weight"


def _shape(info: TensorInfo) -> tuple[int, ...]:
    return tuple(reversed(info.dims))


def _found(info: TensorInfo) -> str:
    return f"{list(_shape(info))} {info.qtype.name}"


def _words(weight: StoredWeight) -> str:
    return f"{weight.qtype.name} of {', '.join(weight.planes)}"
