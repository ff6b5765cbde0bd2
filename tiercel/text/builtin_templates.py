"""Chat templates of architectures whose publisher brings none: DeepSeek-V4.

The publisher of DeepSeek-V4 describes its prompts by a Python program in the model's repository
(`encoding/encoding_dsv4.py`). `templates/deepseek4.jinja` writes the same prompts as a chat
template, so server, commands and parsers treat it like any other. Its choices where sources
disagree are in docs/deepseek_v4.md.

The template renders a role that it does not name as the program renders the developer role: as a
turn of the user. It does not contain that name, because the server then passes such a message as a
system message, which is the meaning that clients give to it.

Revisions from July 2026 on have three levels of effort instead of two, with other texts. They are
recognised by the program in the folder, or by the keys of their draft head in `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "templates"
_PROGRAM: Final = "encoding/encoding_dsv4.py"
_MAX_PROGRAM_BYTES: Final = 1 << 20
# Names in the publisher's program, of revisions with three levels and with two.
_THREE_LEVELS: Final = "REASONING_EFFORT_PROMPTS"
_TWO_LEVELS: Final = "REASONING_EFFORT_MAX"
_DRAFT_KEYS: Final = "dspark_"


def builtin_template(
    architecture: str, config: Mapping[str, object], folder: Path | None = None
) -> str | None:
    """The chat template of an architecture whose publisher brings none, or None.

    Args:
        architecture: name in the registry of models.
        config: content of ``config.json``, or keys of a GGUF file.
        folder: folder of the model; None for a GGUF file.
    """
    if architecture != "deepseek4":
        return None
    flag = "true" if _has_low_effort(config, folder) else "false"
    source = (_FOLDER / "deepseek4.jinja").read_text(encoding="utf-8")
    return f"{{%- set has_low_effort = {flag} -%}}\n{source}"


def _has_low_effort(config: Mapping[str, object], folder: Path | None) -> bool:
    """Whether the levels of effort are low, high and max; else high and max."""
    path = None if folder is None else folder / _PROGRAM
    if path is not None and path.is_file() and path.stat().st_size <= _MAX_PROGRAM_BYTES:
        program = path.read_text(encoding="utf-8", errors="replace")  # it is read, never run
        if _THREE_LEVELS in program:
            return True
        if _TWO_LEVELS in program:
            return False
    return any(key.startswith(_DRAFT_KEYS) for key in config)
