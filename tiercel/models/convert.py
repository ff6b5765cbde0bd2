"""DeepSeek-V4 with NVFP4 experts, written from one with MXFP4 experts: `tiercel convert`.

Where the scales of a matrix fit E4M3 the values stay exactly the same; elsewhere small groups
are rounded and reported (`ops/block_quantize.py`). All matrices are checked before anything is
written: that reads the scales, 1/17 of the experts, and more only of matrices that must be rounded.
Then one tensor after the other is read, converted and written.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiercel.errors import ArgumentError, ModelFormatError
from tiercel.loader.mapped import shown, shown_name
from tiercel.loader.safetensors_write import Entry, write_index, write_shard
from tiercel.loader.store import part_path
from tiercel.models.convert_plan import CONFIG_NAME, ConversionPlan
from tiercel.models.source import open_source
from tiercel.models.weight_planes import check_scales
from tiercel.ops.block_quantize import (
    MAX_EXACT_SPAN,
    mxfp4_span,
    mxfp4_to_nvfp4,
    mxfp4_to_nvfp4_rounded,
)
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

Report = Callable[[str, int, int], None]  # (what is done, bytes done, total bytes)


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix whose scales E4M3 does not hold.

    Attributes:
        tensor: the file's, of its values.
        span: powers of two from the least to the largest scale in use.
        max_error: largest change of a value.
        relative_error: root of the sum of squared changes, by that of squared values.
    """

    tensor: str
    span: int
    max_error: float
    relative_error: float


def find_rounded(plan: ConversionPlan, report: Report) -> list[RoundedMatrix]:
    """Find the matrices that NVFP4 holds only rounded.

    Raises:
        ModelFormatError: a scale is NaN; names the tensor.
    """
    rounded = []
    for number, (values, scale) in enumerate(plan.matrices.items()):
        report("Checking scales", number, len(plan.matrices))
        info, data = plan.source.tensors[scale], plan.source.data(scale)
        check_scales(data, info, "scale", plan.source.path.name)
        blocks = _read_matrix(plan, values)
        if _fits(blocks):
            continue
        weight = dequantize(blocks, torch.float32).double()
        change = dequantize(mxfp4_to_nvfp4_rounded(blocks), torch.float32).double() - weight
        relative = float(change.norm() / weight.norm())
        if relative != 0:  # other nibbles may have made up for the range
            span, largest = int(mxfp4_span(blocks)), float(change.abs().max())
            rounded.append(RoundedMatrix(values, span, largest, relative))
    return rounded


def check_rounded(plan: ConversionPlan, rounded: Sequence[RoundedMatrix], max_error: float) -> None:
    """Refuse matrices whose relative error is above `max_error`.

    Raises:
        ArgumentError: names the worst of them.
    """
    refused = [matrix for matrix in rounded if not matrix.relative_error <= max_error]
    if refused:
        worst = max(refused, key=lambda matrix: matrix.relative_error)
        raise ArgumentError(
            f"{shown_name(plan.source.path)}: tensor {shown(worst.tensor)} would have a relative "
            f"error of {worst.relative_error:.2g} (scales span {worst.span} powers of two), the "
            f"most of {len(refused)} above {max_error:g}.",
            hint="Raise --max-error to accept it; nothing was written.",
        )


def write_model(plan: ConversionPlan, report: Report) -> int:
    """Write the converted model; unless all of it could be, nothing stays.

    Returns:
        Bytes of the weights written.

    Raises:
        OSError: a file cannot be written.
        ModelFormatError: what was written does not read as NVFP4.
    """
    total = sum(entry.nbytes for shard in plan.shards.values() for entry in shard)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report("Writing", done, total)

    plan.partial.mkdir()
    try:
        for name, entries in plan.shards.items():
            write_shard(plan.partial / name, entries, _pieces(plan, entries, count))
        write_index(plan.partial, plan.shards)
        config = json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n"
        (plan.partial / CONFIG_NAME).write_text(config, encoding="utf-8")
        for path in plan.copied:
            (plan.partial / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plan.source.path / path, plan.partial / path)
        _check_written(plan)
        _publish(plan)
    finally:
        shutil.rmtree(plan.partial, ignore_errors=True)  # there is none after a success
    return total


def _pieces(
    plan: ConversionPlan, entries: Sequence[Entry], count: Callable[[int], None]
) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """The bytes of a file's tensors, one after the other."""
    converted = [entry.name for entry in entries if entry.name in plan.matrices]
    made = {name + end for name in converted for end in ("_scale", "_scale_2")}
    for entry in entries:
        if entry.name in plan.matrices:
            blocks = _read_matrix(plan, entry.name)
            planes = (mxfp4_to_nvfp4 if _fits(blocks) else mxfp4_to_nvfp4_rounded)(blocks).planes
            for end, plane in (("", "q"), ("_scale", "scale"), ("_scale_2", "global_scale")):
                data = planes[plane].contiguous().reshape(-1).view(torch.uint8).numpy()
                yield entry.name + end, data
                count(len(data))
        elif entry.name not in made:
            yield entry.name, plan.source.data(entry.name).reshape(-1)
            count(entry.nbytes)


def _fits(blocks: QuantTensor) -> bool:
    """Whether E4M3 holds the scales in use; values are read only if it does not hold them all."""
    least, largest = blocks.planes["scale"].aminmax()
    is_narrow = int(largest) - int(least) < MAX_EXACT_SPAN
    return is_narrow or int(mxfp4_span(blocks)) <= MAX_EXACT_SPAN


def _read_matrix(plan: ConversionPlan, values: str) -> QuantTensor:
    """A matrix in MXFP4; its planes are views of the file."""
    planes = {"q": _view(plan, values), "scale": _view(plan, plan.matrices[values])}
    rows, packed = planes["q"].shape
    return QuantTensor(QuantType.MXFP4, Layout.BLOCKS, (rows, 2 * packed), planes)


def _view(plan: ConversionPlan, tensor: str) -> torch.Tensor:
    with warnings.catch_warnings():
        # The map is read-only and stays so: these views are only ever read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(plan.source.data(tensor))


def _check_written(plan: ConversionPlan) -> None:
    """Read the headers of what was written as loading does."""
    written = open_source(plan.partial)
    experts = {
        tensor
        for weight in written.stored.values()
        if weight.qtype is QuantType.NVFP4
        for tensor in weight.planes["q"]
    }
    missing = plan.matrices.keys() - experts
    if missing:
        raise ModelFormatError(
            f"{shown_name(plan.out)}: tensor {shown(min(missing))} was written and is not NVFP4.",
            hint="This is a fault of tiercel convert: report it.",
        )


def _publish(plan: ConversionPlan) -> None:
    """Give the complete folder its name; one to replace goes once the new one has it."""
    if not plan.is_replacing:
        plan.partial.rename(plan.out)  # over an empty folder, never over another
        return
    old = part_path(plan.out)
    plan.out.rename(old)
    try:
        plan.partial.rename(plan.out)
    finally:
        if not plan.out.exists():
            old.rename(plan.out)
    shutil.rmtree(old)
