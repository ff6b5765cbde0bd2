"""What `tiercel convert` will write, or why it cannot: decided from headers. Free of PyTorch.

Routed experts of the main layers in MXFP4 become NVFP4. Everything else is copied byte by byte, as
in the published NVFP4 checkpoints: attention, shared experts, routers, and the experts of the MTP
block. Names of tensors stay; an expert's scales are renamed with their format:

    layers.0.ffn.experts.3.w1.weight      .scale or .weight_scale_inv       MXFP4
    layers.0.ffn.experts.3.w1.weight      .weight_scale, .weight_scale_2    NVFP4
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tiercel.errors import ArgumentError, UnsupportedModelError
from tiercel.loader.mapped import TensorInfo, shown, shown_name
from tiercel.loader.safetensors import INDEX_NAME, SafetensorsFiles, read_shapes
from tiercel.loader.safetensors_write import Entry, split_shards
from tiercel.models.source import ModelSource, open_source
from tiercel.models.stored import StoredWeight
from tiercel.quant_types import FP4_GROUPS, QuantType

CONFIG_NAME: Final = "config.json"
_EXPERTS: Final = re.compile(r"(layers\.\d+\.ffn\.experts)\.w[123]\.weight")
_NVFP4_GROUP: Final = FP4_GROUPS[QuantType.NVFP4]
# Tokenizer, generation settings, templates, licence. The names not copied are written anew, or tell
# of a quantisation that is no more.
_COPIED: Final = re.compile(r"(.+\.(json|jinja|txt|model)|LICENSE.*)")
_NOT_COPIED: Final = (CONFIG_NAME, INDEX_NAME, "hf_quant_config.json")
_ENCODING: Final = "encoding"  # the publisher's program that writes prompts
_OTHER_MODULES: Final = ("embed", "head", "*.attn.*", "*.ffn.gate", "*.shared_experts.*", "mtp.*")
_SPARE_BYTES: Final = 1 << 20  # of file systems, for names and rounding


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """A conversion that nothing known from headers speaks against.

    Attributes:
        source: the model to convert.
        out: the folder to write, resolved.
        shards: tensors to write, by the name of their file.
        matrices: tensor of values -> tensor of E8M0 scales, of each matrix that becomes NVFP4.
        copied: other files, relative to the source's folder.
        config: the new `config.json`.
        is_replacing: whether `out` is there and holds a model, which is to go.
    """

    source: ModelSource
    out: Path
    shards: Mapping[str, Sequence[Entry]]
    matrices: Mapping[str, str]
    copied: Sequence[Path]
    config: Mapping[str, Any]
    is_replacing: bool

    @property
    def partial(self) -> Path:
        """The folder that becomes `out` once it is complete."""
        return partial_folder(self.out)


def partial_folder(out: Path) -> Path:
    """Where a conversion to `out` is written."""
    return out.with_name(out.name + ".partial")


def plan_conversion(folder: Path, out: Path, *, can_replace: bool) -> ConversionPlan:
    """Decide what to write.

    Args:
        folder: of the model.
        out: folder to write, which must not be in `folder`.
        can_replace: whether a folder `out` that holds a model may be replaced.

    Raises:
        ModelNotFoundError, ModelFormatError: see `open_source`.
        UnsupportedModelError: not a folder of DeepSeek-V4 with MXFP4 experts in single matrices.
        ArgumentError: `out` cannot be written, or the disk has too little space.
    """
    folder, out = Path(os.path.realpath(folder)), Path(os.path.realpath(out))
    source = open_source(folder)
    weights = _find_experts(source)
    matrices = {
        values: scale
        for weight in weights.values()
        for values, scale in zip(weight.planes["q"], weight.planes["scale"], strict=True)
    }
    is_replacing = _check_out(folder, out, can_replace=can_replace)
    shards = split_shards(_new_entries(source, matrices))
    copied = _other_files(folder)
    needed = sum(entry.file_bytes for shard in shards.values() for entry in shard)
    needed += sum((folder / path).stat().st_size for path in copied) + _SPARE_BYTES
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise ArgumentError(
            f"{shown_name(out)}: the conversion takes {needed / 1e9:.1f} GB and the disk has "
            f"{free / 1e9:.1f} GB left.",
            hint="Free space, or name a folder on another disk.",
        )
    config = _new_config(source, weights)
    return ConversionPlan(source, out, shards, matrices, copied, config, is_replacing)


def is_model_file(name: str) -> bool:
    """Whether a folder of a model has files, or a folder, of this name."""
    return name == _ENCODING or name.endswith(".safetensors") or bool(_COPIED.fullmatch(name))


def _find_experts(source: ModelSource) -> dict[str, StoredWeight]:
    """The stacks of routed experts in MXFP4 of the main layers, by our name."""
    name = shown_name(source.path)
    if source.format != "hf" or source.family.name != "deepseek4":
        kind = "a GGUF file" if source.format == "gguf" else "a folder"
        raise UnsupportedModelError(
            f"{name}: this is {kind} of the architecture {source.family.name!r}.",
            hint="Only safetensors folders of DeepSeek-V4 can be converted.",
        )
    experts = {ours: w for ours, w in source.stored.items() if _EXPERTS.fullmatch(ours)}
    found = {ours: w for ours, w in experts.items() if w.qtype is QuantType.MXFP4}
    if not found:
        types = ", ".join(sorted({weight.qtype.name for weight in experts.values()}))
        raise UnsupportedModelError(
            f"{name}: the experts are {types}.", hint="Only experts in MXFP4 can be converted."
        )
    for weight in found.values():
        for tensor in weight.planes["q"]:
            if len(source.tensors[tensor].dims) > 2 or not tensor.endswith(".weight"):
                raise UnsupportedModelError(
                    f"{name}: tensor {shown(tensor)} is not one expert's matrix under its "
                    "released name.",
                    hint="Convert the folder as it was released.",
                )
    return found


def _check_out(folder: Path, out: Path, *, can_replace: bool) -> bool:
    """Refuse a folder to write, else whether it must be replaced; both paths are resolved."""
    name = shown_name(out)
    if out == folder or folder in out.parents or out in folder.parents:
        raise ArgumentError(
            f"{name}: the folder to write and that of the model must not hold each other.",
            hint="Name a new folder beside the model's.",
        )
    if not out.parent.is_dir():
        raise ArgumentError(
            f"{name}: there is no folder {shown_name(out.parent)} to write it in.",
            hint="Make that folder first.",
        )
    if os.path.lexists(partial_folder(out)):
        raise ArgumentError(
            f"{name}: {shown_name(partial_folder(out))} is there: another conversion writes it, "
            "or one was killed.",
            hint="Remove it if no conversion is running.",
        )
    if not out.exists():
        return False
    if not out.is_dir():
        raise ArgumentError(f"{name}: this is a file.", hint="Name a folder to write.")
    names = sorted(os.listdir(out))
    if names and not can_replace:
        raise ArgumentError(
            f"{name}: the folder is not empty.", hint="Name a new one, or give --force to replace."
        )
    for other in names:
        if not is_model_file(other):
            raise ArgumentError(
                f"{name}: the folder holds {shown(other)}, which is no file of a model.",
                hint="--force replaces only folders that hold a model alone.",
            )
    return bool(names)


def _new_entries(source: ModelSource, matrices: Mapping[str, str]) -> Iterator[tuple[Entry, ...]]:
    """The tensors to write, in the source's order; those that share a file together."""
    assert isinstance(source.files, SafetensorsFiles)
    shapes = read_shapes(source.files)
    dropped = set(matrices.values())
    for info in sorted(source.tensors.values(), key=lambda info: (info.part, info.offset)):
        if info.name in matrices:
            yield _nvfp4_entries(info)
        elif info.name not in dropped:
            yield (Entry(info.name, info.qtype.name, shapes[info.name], info.nbytes),)


def _nvfp4_entries(info: TensorInfo) -> tuple[Entry, Entry, Entry]:
    """Values, E4M3 scales and global scale of one matrix, of the values in MXFP4."""
    rows, packed = info.shape
    scales = (rows, 2 * packed // _NVFP4_GROUP)
    return (
        Entry(info.name, "U8", info.shape, info.nbytes),
        Entry(info.name + "_scale", "F8_E4M3", scales, scales[0] * scales[1]),
        Entry(info.name + "_scale_2", "F32", (), 4),
    )


def _other_files(folder: Path) -> list[Path]:
    """The files to copy, relative to the folder."""
    top = [
        path
        for path in folder.iterdir()
        if _COPIED.fullmatch(path.name) and path.name not in _NOT_COPIED
    ]
    below = list((folder / _ENCODING).rglob("*"))
    return sorted(path.relative_to(folder) for path in (*top, *below) if path.is_file())


def _new_config(source: ModelSource, weights: Mapping[str, StoredWeight]) -> dict[str, Any]:
    """The config with NVFP4 experts; FP8's settings stay, they are of the other matrices."""
    others: dict[str, None] = {}
    for ours, weight in source.stored.items():
        experts = _EXPERTS.fullmatch(ours)
        if experts and ours not in weights and weight.qtype is not QuantType.NVFP4:
            others[f"{experts[1]}.*"] = None
    quantization = {
        **(source.metadata.get("quantization_config") or {}),
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": _NVFP4_GROUP,
        "ignore": [*_OTHER_MODULES, *others],
    }
    return {**source.metadata, "quantization_config": quantization}
