"""Result files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of figures from a model in this process; `switches` are the toggles that are set."""

    command: str
    utc: str
    label: str
    versions: dict[str, str]
    hardware: dict[str, str]
    switches: dict[str, str]
    model: str
    dtype: str


def save(report: msgspec.Struct, path: Path) -> None:
    """Write a result as JSON; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
