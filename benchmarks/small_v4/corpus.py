"""The text that the small model learns: this repository, and the library of the running Python.

Files are listed in the order of their labels, so a machine with the same files has the same text.
One file in 64 is held out: the model never sees it, and perplexity and acceptance are measured
there. A document is the BOS token, the tokens of a file, and the EOS token.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).parents[2]
# Patterns of the repository's own text; the folders of tests/data hold no text.
OWN_FILES = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/**/*.py",
    "tests/**/*.py",
    "tiercel/**/*.py",
    "tiercel/kernels/**/*.cu",
    "tiercel/kernels/**/*.cuh",
    "tiercel/kernels/**/*.c",
    "tiercel/kernels/**/*.h",
)
FOREIGN_FOLDERS = frozenset(("site-packages", "dist-packages", "__pycache__"))
HELD_OUT = 64
MAX_FILE_BYTES = 400_000  # larger ones are tables
BOS, EOS = 0, 1


@dataclass(frozen=True, slots=True)
class Document:
    """A file: its label, such as ``python/abc.py``, and its text."""

    label: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether the model must not see it."""
        return zlib.crc32(self.label.encode()) % HELD_OUT == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of both kinds, and those that are skipped.

    Attributes:
        train: what the model learns.
        held_out: what it is measured with.
        num_skipped: files that are too large or not UTF-8.
        digest: SHA-256 of all labels and texts.
    """

    train: Sequence[Document]
    held_out: Sequence[Document]
    num_skipped: int
    digest: str


def read_corpus(own: Path = ROOT, library: Path | None = None) -> Corpus:
    """Read all files.

    Args:
        own: this repository.
        library: folder of Python's library; None for that of the running Python.
    """
    library = Path(sysconfig.get_paths()["stdlib"]) if library is None else library
    files = {f"tiercel/{path.relative_to(own)}": path for p in OWN_FILES for path in own.glob(p)}
    for path in library.rglob("*.py"):
        part = path.relative_to(library)
        if FOREIGN_FOLDERS.isdisjoint(part.parts):
            files[f"python/{part}"] = path
    documents, num_skipped, digest = [], 0, hashlib.sha256()
    for label, path in sorted(files.items()):
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = ""
        if not text.strip() or len(data) > MAX_FILE_BYTES:
            num_skipped += 1
            continue
        documents.append(Document(label, text))
        digest.update(f"{label}\0{text}\0".encode())
    return Corpus(
        [document for document in documents if not document.is_held_out],
        [document for document in documents if document.is_held_out],
        num_skipped,
        digest.hexdigest(),
    )


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Tensor:
    """Tokens of all documents, one after the other, (tokens,) int32."""
    tokenizer.encode_special_tokens = True  # sources that name such tokens are plain text
    parts = tokenizer.encode_batch_fast([d.text for d in documents], add_special_tokens=False)
    ids = [torch.tensor([BOS, *part.ids, EOS], dtype=torch.int32) for part in parts]
    return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int32)
