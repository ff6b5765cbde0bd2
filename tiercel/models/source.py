"""A model file that was checked as a whole before anything heavy is imported.

`open_source` reads headers only: the container, every hyperparameter, the tokenizer's fields, the
name and shape of each tensor. What it accepts, `LLM` loads; what it refuses, nothing loads. Free of
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tiercel import env
from tiercel.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiercel.loader import names as tensor_names
from tiercel.loader.gguf import GGUFFile, read_gguf
from tiercel.loader.hub import resolve
from tiercel.loader.mapped import TensorInfo
from tiercel.loader.safetensors import SafetensorsFiles, read_safetensors
from tiercel.loader.verify import find_nonfinite
from tiercel.models import registry
from tiercel.models.config import Architecture, ModelConfig, from_gguf, from_hf
from tiercel.models.sampling_defaults import GGUF_KEYS, HF_KEYS, read_sampling_defaults
from tiercel.models.stored import StoredWeight
from tiercel.models.tensors import check_tensors
from tiercel.params import SamplingDefaults
from tiercel.text.builtin_templates import builtin_template
from tiercel.text.tokenizer import Tokenizer
from tiercel.text.tokenizer_data import TokenizerData

MAX_JSON_BYTES = 16 * 2**20
EMBEDDING = "token_embd.weight"
# Pooling by the first token and by a ranking head are for models that Tiercel does not run.
_GGUF_POOLING = {1: "mean", 3: "last"}
_HF_TEXT_FILES = ("*.json", "*.jinja", "1_Pooling/*.json")
_HF_POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checked model.

    Attributes:
        path: the file or folder.
        format: ``gguf`` or ``hf``.
        family: what its architecture does differently.
        config: hyperparameters.
        metadata: every key of a GGUF file, or `config.json`.
        names: our tensor name -> the file's.
        is_interleaved: rows of q and k are stored for rotation of adjacent pairs.
        norm_offset: what the file leaves out of RMSNorm weights.
        chat_template: Jinja source, of the files or our own for the architecture; or None.
        sampling_defaults: of the publisher, for requests that do not say.
        stored: our name -> where the weight is, for families with `Architecture.find_weights`; they
            have no `names`.
    """

    path: Path
    format: str
    family: Architecture
    config: ModelConfig
    metadata: Mapping[str, Any]
    names: Mapping[str, str]
    is_interleaved: bool
    norm_offset: float
    chat_template: str | None
    sampling_defaults: SamplingDefaults
    files: GGUFFile | SafetensorsFiles
    tokenizer_data: TokenizerData | Mapping[str, Any]
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    _tokenizers: list[Tokenizer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensor table, by the file's names."""
        return self.files.tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the file."""
        if self.stored:
            return sum(weight.nbytes for weight in self.stored.values())
        return sum(self.tensors[name].nbytes for name in self.names.values())

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """(out, row_bytes) uint8, a read-only view of the file."""
        return self.files.data(name)

    def tokenizer(self, cache_dir: Path | None = None) -> Tokenizer:
        """The tokenizer, built in the first call; `cache_dir` keeps one that is slow to build."""
        if not self._tokenizers:
            self._tokenizers.append(self._build_tokenizer(cache_dir))
        return self._tokenizers[0]

    def _build_tokenizer(self, cache_dir: Path | None) -> Tokenizer:
        if isinstance(self.tokenizer_data, TokenizerData):
            return Tokenizer.from_gguf(
                self.tokenizer_data, cache_dir=cache_dir, cache_key=self.file_key
            )
        if not self.has_text:
            return Tokenizer.without_text(
                self.path.name,
                self.config.vocab_size,
                self.metadata,
                self.tokenizer_data["generation_config"],
            )
        return Tokenizer.from_file(
            self.path / "tokenizer.json",
            self.tokenizer_data["tokenizer_config"],
            self.tokenizer_data["generation_config"],
            vocab_size=self.config.vocab_size,
        )

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer; a folder without one takes token ids alone."""
        return self.format == "gguf" or (self.path / "tokenizer.json").is_file()

    def verify(self, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Scan all weights; yields one line per tensor that holds NaN or infinity."""
        return (str(found) for found in find_nonfinite(self.files, progress))

    @property
    def pooling(self) -> str | None:
        """How an embedding model joins its hidden states, ``mean`` or ``last``; else None."""
        if self.format == "gguf":
            arch = self.metadata.get("general.architecture")
            kind = self.metadata.get(f"{arch}.pooling_type")
            return _GGUF_POOLING.get(kind) if isinstance(kind, int) else None
        modes = _read_json(self.path / "1_Pooling" / "config.json")
        for key, name in _HF_POOLING.items():
            if modes.get(key) is True:
                return name
        return None

    @property
    def file_paths(self) -> tuple[Path, ...]:
        """Every file that the model is made of, those with weights first."""
        weights = tuple(part.path for part in self.files.parts)
        if self.format == "gguf":
            return weights
        others = (path for kind in _HF_TEXT_FILES for path in self.path.glob(kind))
        return (*weights, *sorted(others))

    @property
    def file_key(self) -> str:
        """A name for the content of the file: it changes when the file does."""
        status = self.path.stat()
        return f"{self.path.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def find_source(
    model: str | Path | None,
    *,
    offline: bool | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> ModelSource:
    """Find a model, fetching it if need be, and check it.

    Args:
        model: path or name; None for the default model.
        offline: never download; None to follow ``TIERCEL_OFFLINE``.
        report: called with (what, done, total) in bytes while fetching.

    Raises:
        ModelNotFoundError, ModelFormatError, UnsupportedModelError: see `resolve`, `open_source`.
    """
    is_offline = env.is_offline() if offline is None else offline
    return open_source(resolve(model, offline=is_offline, report=report))


def open_source(path: Path) -> ModelSource:
    """Check a model file or folder.

    Args:
        path: a `.gguf` file (the first of a split one), or a folder in Hugging Face layout.

    Raises:
        ModelNotFoundError: the path does not exist.
        ModelFormatError: it breaks its format; the message names file, field, value and rule.
        UnsupportedModelError: a sound model that Tiercel does not run.
    """
    if path.is_dir():
        return _open_folder(path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelSource:
    files = read_gguf(path)
    name = path.name
    arch = files.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFormatError(
            f"{name}: general.architecture is {arch!r:.60}.",
            hint="It must be text naming the architecture.",
        )
    family = registry.architecture(arch, name)
    if EMBEDDING not in files.tensors:
        raise ModelFormatError(
            f"{name}: the tensor {EMBEDDING!r} is missing.",
            hint="The file is incomplete: fetch it again.",
        )
    vocab_size = files.tensors[EMBEDDING].shape[0]
    mapped: dict[str, str] = {}
    stored: Mapping[str, StoredWeight] = {}
    if family.read_gguf is None:
        config = from_gguf(family, files.metadata, name, vocab_size)
        mapped = _map_names(files.tensors, tensor_names.from_gguf, name)
        config = replace(config, tie_embeddings="head.weight" not in mapped)
        _check(config, mapped, files.tensors, name, tensor_names.to_gguf)
    else:
        config = family.read_gguf(files.metadata, name, files.tensors)
        find = registry.find_weights(family)
        config, stored = find(config, files.tensors, name, is_gguf=True)
    tokenizer = TokenizerData.from_gguf(files.metadata, name)
    if len(tokenizer.tokens) > vocab_size:
        raise ModelFormatError(
            f"{name}: tokenizer.ggml.tokens has {len(tokenizer.tokens)} entries.",
            hint=f"The embedding table has {vocab_size} rows; there must be a row for each token.",
        )
    return ModelSource(
        path=path,
        format="gguf",
        family=family,
        config=config,
        metadata=files.metadata,
        names=mapped,
        is_interleaved=family.interleaved_gguf,
        norm_offset=0.0,
        chat_template=tokenizer.chat_template or builtin_template(family.name, files.metadata),
        sampling_defaults=read_sampling_defaults(files.metadata, GGUF_KEYS, name),
        files=files,
        tokenizer_data=tokenizer,
        stored=stored,
    )


def _open_folder(folder: Path) -> ModelSource:
    values = _read_json(folder / "config.json", is_required=True)
    name = f"{folder.name}/config.json"
    names = values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise ModelFormatError(
            f"{name}: architectures is {names!r:.60}.", hint="It must be a list of names."
        )
    family = registry.hf_architecture(names, name)
    mapped: Mapping[str, str] = {}
    stored: Mapping[str, StoredWeight] = {}
    if family.read_hf is None:
        config, mapped, files = _open_dense_folder(folder, family, values)
    else:
        config = family.read_hf(values, name)
        files = read_safetensors(folder)
        find = registry.find_weights(family)
        config, stored = find(config, files.tensors, folder.name, is_gguf=False)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    return ModelSource(
        path=folder,
        format="hf",
        family=family,
        config=config,
        metadata=values,
        names=mapped,
        is_interleaved=False,
        norm_offset=family.hf_norm_offset,
        chat_template=(
            _folder_template(folder, tokenizer_config)
            or builtin_template(family.name, values, folder)
        ),
        sampling_defaults=read_sampling_defaults(
            generation, HF_KEYS, f"{folder.name}/generation_config.json"
        ),
        files=files,
        tokenizer_data={"tokenizer_config": tokenizer_config, "generation_config": generation},
        stored=stored,
    )


def _open_dense_folder(
    folder: Path, family: Architecture, values: Mapping[str, Any]
) -> tuple[ModelConfig, Mapping[str, str], SafetensorsFiles]:
    """The config, our names of tensors and the files of a dense decoder."""
    name = f"{folder.name}/config.json"
    if values.get("quantization_config"):
        raise UnsupportedModelError(
            f"{name}: the folder holds quantised weights.",
            hint="Use float weights, or a GGUF file.",
        )
    config = from_hf(family, values, name)
    files = read_safetensors(folder)
    mapped = _map_names(
        files.tensors,
        lambda tensor: tensor_names.from_hf(tensor, family.hf_names_override),
        folder.name,
    )
    if config.tie_embeddings:
        mapped.pop("head.weight", None)  # a copy of the embedding
    config = replace(config, tie_embeddings="head.weight" not in mapped)
    _check(
        config,
        mapped,
        files.tensors,
        folder.name,
        lambda tensor: tensor_names.to_hf(tensor, family.hf_names_override),
    )
    return config, mapped, files


def _read_json(path: Path, *, is_required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if is_required:
            raise ModelNotFoundError(
                f"{path.parent.name}: the folder has no {path.name}.",
                hint="Give a .gguf file, or a folder in Hugging Face layout.",
            )
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFormatError(
            f"{path.parent.name}/{path.name}: {path.stat().st_size} bytes.",
            hint=f"At most {MAX_JSON_BYTES} are read.",
        )
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFormatError(
            f"{path.parent.name}/{path.name}: {error!s:.120}.", hint="It must be a JSON object."
        ) from None
    return values


def _folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    template = folder / "chat_template.jinja"
    if template.is_file() and template.stat().st_size <= MAX_JSON_BYTES:
        return template.read_text(encoding="utf-8", errors="replace")
    inline = tokenizer_config.get("chat_template")
    return inline if isinstance(inline, str) else None


def _map_names(
    tensors: Mapping[str, TensorInfo], rename: Callable[[str], str | None], file: str
) -> dict[str, str]:
    mapped: dict[str, str] = {}
    for name, info in tensors.items():
        if info.qtype.is_storage:
            raise UnsupportedModelError(
                f"{file}: tensor {name!r:.80}: dtype is {info.qtype.name!r}, which Tiercel does "
                "not run in a dense decoder.",
                hint="Use a model in F32, F16 or BF16, or a GGUF file.",
            )
        ours = rename(name)
        if ours is None:
            raise ModelFormatError(
                f"{file}: tensor {name!r:.80} is unknown.",
                hint="A dense decoder has token_embd, output_norm, output and blk.N tensors only.",
            )
        if ours in mapped:
            raise ModelFormatError(
                f"{file}: tensors {name!r:.80} and {mapped[ours]!r:.80} mean the same.",
                hint="Each tensor may appear once.",
            )
        mapped[ours] = name
    return mapped


def _check(
    config: ModelConfig,
    mapped: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    file: str,
    file_name_of: Callable[[str], str],
) -> None:
    for name in mapped.values():
        if len(tensors[name].dims) > 2:
            raise ModelFormatError(
                f"{file}: tensor {name!r:.80} has {len(tensors[name].dims)} dimensions.",
                hint="A dense decoder has vectors and matrices only.",
            )
    found = {ours: (name, tensors[name].shape) for ours, name in mapped.items()}
    check_tensors(config, found, file, file_name_of)
