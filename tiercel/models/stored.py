"""Where the weights of a checked file are: the format of each, and the tensors that hold it.

A weight of ours may be several tensors of a file (values and scales; one tensor per expert), or a
part of one (the rows of gate in a stack of gate and up). Free of PyTorch; `WeightReader.weight`
makes a `QuantTensor` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tiercel.loader.mapped import TensorInfo
from tiercel.models.config import ModelConfig
from tiercel.quant_types import QuantType


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a file.

    Attributes:
        qtype: its format: a float or GGML type, a block format, I32 or I64.
        shape: (n,), (out, in) or (experts, out, in), logically.
        planes: the file's tensors of each plane of layout BLOCKS, or of ``data``: one, or one for
            each expert. A GGUF file has MXFP4 as ``data``.
        nbytes: of it in the file.
        rows: [start, stop) of each matrix of the tensors, if they hold more.
        cols: the same of columns.
        experts: [start, stop) of the matrices, if one tensor holds more.
        block: FP8_BLOCK: rows and columns of a scale.
        file_block: FP8_BLOCK: the same in the file, where a part has smaller ones; None: equal.
        limit: I32 and I64: every entry must be below it, and those of a row distinct.
    """

    qtype: QuantType
    shape: tuple[int, ...]
    planes: Mapping[str, tuple[str, ...]]
    nbytes: int
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    block: tuple[int, int] = (1, 1)
    file_block: tuple[int, int] | None = None
    limit: int = 0


class FindWeights(Protocol):
    """Checks the tensor table of a file against a config; of `Architecture.find_weights`."""

    def __call__(
        self, config: ModelConfig, tensors: Mapping[str, TensorInfo], file: str, *, is_gguf: bool
    ) -> tuple[ModelConfig, Mapping[str, StoredWeight]]:
        """Find every weight.

        Args:
            config: as the file's hyperparameters say.
            tensors: of the file, by its names.
            file: its name, for errors.
            is_gguf: whether names are those of GGUF.

        Returns:
            The config, without what the tensors do not bear out, and each weight by our name.

        Raises:
            ModelFormatError: a tensor is missing, doubled, unknown or does not fit.
        """
