"""The sampling defaults that the publisher of a model put into its files.

A folder in Hugging Face layout has them in `generation_config.json`, a GGUF file in the metadata
keys `general.sampling.*` of llama.cpp. `do_sample` is not read, as in vLLM: many files leave it out
or contradict it with a temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from tiercel.errors import ArgumentError
from tiercel.params import SamplingDefaults, SamplingParams, shown

# The file's key -> field of `SamplingDefaults`.
HF_KEYS: Final[Mapping[str, str]] = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
GGUF_KEYS: Final[Mapping[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_FLOAT32_DIGITS: Final = 7
_LOG: Final = logging.getLogger(__name__)


def read_sampling_defaults(
    values: Mapping[str, Any], keys: Mapping[str, str], file: str
) -> SamplingDefaults:
    """Read the defaults; values out of range are left out and named in one warning.

    Args:
        values: of the file.
        keys: `HF_KEYS` or `GGUF_KEYS`.
        file: its name, for the warning.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for key, name in keys.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, float):
            value = float(f"{value:.{_FLOAT32_DIGITS}g}")  # GGUF holds 0.6 as 0.60000002
        given: dict[str, Any] = {name: value}
        try:
            SamplingParams(**given)
        except ArgumentError as error:
            wrong.append(f"{key} is {shown(value)}; {error.hint}")
        else:
            found |= given
    if wrong:
        _LOG.warning("%s: sampling defaults are ignored: %s", file, " ".join(wrong))
    return SamplingDefaults(**found)
