"""Reader of safetensors folders: one `model.safetensors`, or shards listed by an index file.

    0      u64 header length n, little-endian
    8      JSON object of n bytes: {"NAME": {"dtype": "BF16", "shape": [out, in],
           "data_offsets": [begin, end]}, ..., "__metadata__": {...}}
    8 + n  data; offsets count from here and cover every byte exactly once

The header is checked by the same rules as a GGUF file, and the result has the same interface. The
dtypes of `DTYPES` are read: floats, and the planes of block formats and tables of integers, which
only some models have. Files that need Python's pickle to open are refused by name and never
opened.

Source: the safetensors format document (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiercel.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiercel.loader.mapped import (
    FETCH_AGAIN,
    MAX_DIMS,
    MappedFile,
    MappedTensors,
    TensorInfo,
    check_dims,
    check_no_overlap,
    shown,
    shown_name,
)
from tiercel.quant_types import QuantType

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
# DeepSeek-V4-Pro has 145,116 tensors, about 80 bytes each; with NVFP4 experts twice as many.
MAX_INDEX_BYTES = 64 << 20
MAX_PARTS = 1024
# Each comma announces one JSON item, and a tensor has about five: this bounds the parser's memory.
MAX_COMMAS = 1 << 20
_READ = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64")
DTYPES = {name: QuantType[name] for name in _READ}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class SafetensorsFiles(MappedTensors):
    """A checked model in safetensors form; `path` is the folder, or the single file given."""


def read_safetensors(folder: Path) -> SafetensorsFiles:
    """Map and check the safetensors files of a model.

    Args:
        folder: folder with ``model.safetensors``, or ``model.safetensors.index.json`` and its
            shards. The path of one ``.safetensors`` file is accepted as well.

    Returns:
        The files with every tensor checked; no tensor data has been read.

    Raises:
        ModelNotFoundError: the path does not exist, or a shard is missing.
        ModelFormatError: a file breaks its format.
        UnsupportedModelError: pickle weights, or a tensor of another dtype.
    """
    _refuse_pickle(folder)
    if folder.suffix == ".safetensors" and not os.path.isdir(folder):
        return _read_shards(folder, [folder], None)
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    # os.path.exists is False where Path.exists raises: names too long, folders without permission.
    if os.path.exists(single):
        return _read_shards(folder, [single], None)
    if os.path.exists(index):
        weight_map = _read_index(index)
        _check_shards(folder, weight_map)
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        return _read_shards(folder, shards, weight_map)
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):
        names = []
    for name in names:
        _refuse_pickle(Path(name))
    raise ModelNotFoundError(
        f"{shown_name(folder)}: there is neither {SINGLE_NAME} nor {INDEX_NAME}.",
        hint="Give a folder that holds one of them.",
    )


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLE_SUFFIXES:
        raise UnsupportedModelError(
            f"{shown_name(path)}: {path.suffix} weights are Python pickles, which can run code.",
            hint="Use the safetensors or GGUF files of the model.",
        )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard name, every shard name a plain sibling."""
    file = MappedFile(path, 2)
    if file.size > MAX_INDEX_BYTES:
        raise file.error(
            f"the index has {file.size} bytes.", hint=f"At most {MAX_INDEX_BYTES} are read."
        )
    index = _parse_json(file, 0, file.size, "the index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise file.error("there is no object 'weight_map'.", hint="It maps tensor names to files.")
    for tensor, name in weight_map.items():
        is_sibling = isinstance(name, str) and name.endswith(".safetensors")
        if not is_sibling or set(name) & {"/", "\\", "\0"} or name.startswith("."):
            raise file.error(
                f"tensor {shown(tensor)} is said to be in {shown(name)}.",
                hint="A shard is the plain name of a .safetensors file in the same folder.",
            )
    if len(set(weight_map.values())) > MAX_PARTS:
        raise file.error("there are too many shards.", hint=f"At most {MAX_PARTS} are read.")
    return weight_map


def _check_shards(folder: Path, weight_map: Mapping[str, str]) -> None:
    for tensor, name in weight_map.items():
        if not os.path.lexists(folder / name):
            raise ModelNotFoundError(
                f"{shown_name(folder)}: the shard {shown(name)} is missing.",
                hint=f"{INDEX_NAME} says that it holds tensor {shown(tensor)}: fetch it.",
            )


def _read_shards(
    folder: Path, paths: list[Path], weight_map: dict[str, str] | None
) -> SafetensorsFiles:
    tensors: dict[str, TensorInfo] = {}
    files = tuple(MappedFile(path, 8 + 2) for path in paths)
    for part, file in enumerate(files):
        for info in _read_header(file, part):
            if weight_map is not None and weight_map.get(info.name) != file.path.name:
                raise file.error(
                    f"tensor {shown(info.name)} is not listed for this file in {INDEX_NAME}.",
                    hint="The shards and the index belong to different models: fetch them again.",
                )
            tensors[info.name] = info
    for name in weight_map or ():
        if name not in tensors:
            assert weight_map is not None
            raise ModelFormatError(
                f"{weight_map[name]}: tensor {shown(name)} of {INDEX_NAME} is missing.",
                hint="The shards and the index belong to different models: fetch them again.",
            )
    return SafetensorsFiles(folder, tensors, files)


def read_shapes(files: SafetensorsFiles) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors as the headers have them: () for a scalar, which has dims (1,)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files.parts:
        length: int = struct.unpack_from("<Q", file.buffer)[0]
        header = json.loads(file.buffer[8 : 8 + length].decode())  # checked by read_safetensors
        header.pop("__metadata__", None)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return shapes


def _read_header(file: MappedFile, part: int) -> list[TensorInfo]:
    length: int = struct.unpack_from("<Q", file.buffer)[0]
    limit = min(MAX_HEADER_BYTES, file.size - 8)
    if length > limit:
        raise file.error(
            f"header length at byte 0 is {length} but at most {limit} is possible.",
            hint=FETCH_AGAIN,
        )
    header = _parse_json(file, 8, length, "the header")
    if not isinstance(header, dict):
        raise file.error("the header is not a JSON object.", hint=FETCH_AGAIN)
    infos = [
        _read_entry(file, name, entry, 8 + length, part)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    check_no_overlap(file, infos)
    covered = 8 + length + sum(info.nbytes for info in infos)
    if covered != file.size:
        raise file.error(
            f"header and tensors take {covered} bytes but the file has {file.size}.",
            hint="The tensors must cover the data without gaps: fetch the file again.",
        )
    return infos


def _read_entry(
    file: MappedFile, name: str, entry: object, data_start: int, part: int
) -> TensorInfo:
    owner = f"tensor {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise file.error(
            f"{owner}: the header says {shown(entry)}.",
            hint="An entry is an object with dtype, shape and data_offsets.",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise file.unsupported(
            f"{owner}: dtype is {shown(dtype)}, which Tiercel does not run.",
            hint=f"Tiercel reads {', '.join(DTYPES)}; most models need F32, F16 or BF16.",
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise file.error(
            f"{owner}: shape is {shown(shape)}.", hint=f"It is a list of up to {MAX_DIMS} integers."
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise file.error(
            f"{owner}: data_offsets are {shown(offsets)}.", hint="They are [begin, end] in bytes."
        )
    dims = tuple(reversed(shape)) or (1,)
    nbytes = check_dims(
        dims,
        DTYPES[dtype],
        lambda fact, hint: file.error(f"{owner}: dimensions {fact}.", hint=hint),
    )
    begin, end = offsets
    if nbytes != end - begin:
        raise file.error(
            f"{owner}: data_offsets {offsets} span {end - begin} bytes but {dtype} of shape "
            f"{shown(shape)} has {nbytes}.",
            hint=FETCH_AGAIN,
        )
    if end > file.size - data_start:
        raise file.error(
            f"{owner} claims {nbytes} bytes at byte {data_start + begin} "
            f"but the file has {file.size}.",
            hint="The download is incomplete: fetch it again.",
        )
    return TensorInfo(name, dims, DTYPES[dtype], nbytes, part, data_start + begin)


def _are_sizes(value: object) -> bool:
    """Whether `value` is a list of integers of at least 0; bool does not count as an integer."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _parse_json(file: MappedFile, start: int, length: int, what: str) -> object:
    data = file.buffer[start : start + length]
    if data.count(b",") > MAX_COMMAS:
        raise file.error(f"{what} has too many items.", hint=f"At most {MAX_COMMAS} are read.")
    try:
        # Decoded here: json would guess UTF-16 and UTF-32 from the first bytes.
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        fact = f"is not JSON: {error.msg} at byte {start} + character {error.pos}"
    except RecursionError:
        fact = "is nested too deeply"
    except ValueError as error:
        fact = f"cannot be read: {shown(str(error))}"
    raise file.error(f"{what} {fact}.", hint=FETCH_AGAIN)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} occurs twice")
        found[name] = value
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
