"""Formats of the small model's checkpoint: rounding in training, and the released files.

    experts                                          MXFP4, a scale per 32 columns
    attention, shared expert, indexer.wq_b, MTP      FP8 E4M3, a scale (E8M0) per 128 x 128 block
    mixes of streams, sinks, position and gate bias  F32
    hash tables                                      I64
    the rest                                         BF16

A step of training computes with rounded weights, and its gradients go to the float32 weights as if
nothing had been rounded (straight-through): so the files hold the very weights that were trained.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from tiercel.loader.safetensors_write import Entry, write_shard
from tiercel.ops import block_quantize_torch as torch_ops

BLOCK: Final = (128, 128)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_EXPERTS: Final = re.compile(r"(.+\.experts)\.(w[123])\.weight")
_FP8: Final = re.compile(
    r".+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts\.w[123]|[eh]_proj)\.weight"
)
_F32: Final = re.compile(r".*(hc_\w+|attn_sink|ape|gate\.bias)")
_DTYPES: Final = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


def stored_format(name: str) -> str:
    """``mxfp4``, ``fp8``, ``float32``, ``int64`` or ``bfloat16``, by the name of a parameter."""
    if _EXPERTS.fullmatch(name):
        return "mxfp4"
    if _FP8.fullmatch(name):
        return "fp8"
    if name.endswith("tid2eid"):
        return "int64"
    return "float32" if _F32.fullmatch(name) else "bfloat16"


class _StraightThrough(torch.autograd.Function):
    """Values of a format; the gradient passes as if they were not rounded."""

    @staticmethod
    def forward(_: Any, weight: Tensor, kind: str) -> Tensor:
        if kind == "mxfp4":
            return torch_ops.dequantize_fp4(*torch_ops.quantize_mxfp4(weight))
        if kind == "fp8":
            return torch_ops.dequantize_fp8(*torch_ops.quantize_fp8(weight, BLOCK, True), BLOCK)
        return weight.bfloat16().float()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def rounded_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as their formats hold them, for `torch.func.functional_call`."""
    return {
        name: _StraightThrough.apply(weight, stored_format(name))
        for name, weight in model.named_parameters()
        if stored_format(name) != "float32"
    }


def write_checkpoint(
    model: nn.Module, config: Mapping[str, Any], tokenizer: Path, folder: Path
) -> int:
    """Write a folder as released, over an earlier one.

    Args:
        model: a `SmallV4`, on any device.
        config: of `config.json`; without ``quantization_config`` all matrices are BF16, not rounded
            further.
        tokenizer: folder with the files of the tokenizer.
        folder: to write to.

    Returns:
        Bytes of all files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_plain = "quantization_config" not in config
    tensors = {
        stored: tensor
        for name, weight in model.state_dict().items()
        for stored, tensor in _stored(name, weight.detach().cpu(), is_plain=is_plain)
    }
    pieces = {name: _bytes(tensor) for name, (_, tensor) in tensors.items()}
    entries = [
        Entry(name, dtype, tuple(tensor.shape), len(pieces[name]))
        for name, (dtype, tensor) in tensors.items()
    ]
    partial, path = folder / "model.safetensors.part", folder / "model.safetensors"
    partial.unlink(missing_ok=True)
    write_shard(partial, entries, pieces.items())
    partial.replace(path)  # whole at any time: a run may be cut off
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if tokenizer.resolve() != folder.resolve():
            shutil.copyfile(tokenizer / name, folder / name)
    files = ("model.safetensors", "config.json", *TOKENIZER_FILES)
    return sum((folder / name).stat().st_size for name in files)


def _stored(
    name: str, weight: Tensor, *, is_plain: bool
) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """The file's tensors of a parameter: name, dtype of the header, values."""
    kind = stored_format(name)
    found = _EXPERTS.fullmatch(name)
    if found is not None:
        for expert, matrix in enumerate(weight):
            stem = f"{found[1]}.{expert}.{found[2]}"
            yield from _matrix(stem, matrix, "bfloat16" if is_plain else kind)
    elif kind == "fp8":
        yield from _matrix(name.removesuffix(".weight"), weight, "bfloat16" if is_plain else kind)
    else:
        tensor = weight.to(getattr(torch, kind))
        yield name, (_DTYPES[tensor.dtype], tensor)


def _matrix(stem: str, weight: Tensor, kind: str) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    if kind == "bfloat16":
        yield f"{stem}.weight", ("BF16", weight.bfloat16())
        return
    if kind == "mxfp4":
        q, scale = torch_ops.quantize_mxfp4(weight)
    else:
        q, scale = torch_ops.quantize_fp8(weight, BLOCK, True)
    yield f"{stem}.weight", ("I8" if kind == "mxfp4" else "F8_E4M3", q)
    yield f"{stem}.scale", ("F8_E8M0", scale)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()
