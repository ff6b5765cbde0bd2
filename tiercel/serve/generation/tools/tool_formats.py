"""Tool-call formats: every parser by its name, and the choice of one by the chat template.

A template that knows no tools gets Hermes' format, explained by a system text (`tool_prompt.py`),
so that tools work with any chat model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tiercel.errors import ArgumentError
from tiercel.serve.generation.tools.parsers.deepseek import DeepSeekFormat
from tiercel.serve.generation.tools.parsers.format import ToolFormat
from tiercel.serve.generation.tools.parsers.gemma import GemmaFormat
from tiercel.serve.generation.tools.parsers.json_calls import HermesFormat, Llama3Format
from tiercel.serve.generation.tools.parsers.pythonic import PythonicFormat
from tiercel.serve.generation.tools.parsers.tagged_calls import DsmlFormat, QwenCoderFormat

_BAR: Final = "\uff5c"  # the full-width bar of DeepSeek's tokens
HERMES: Final = HermesFormat()
_ALL: Final[tuple[ToolFormat, ...]] = (
    HERMES,
    QwenCoderFormat(),
    Llama3Format(),
    PythonicFormat(),
    GemmaFormat("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    DeepSeekFormat(is_fenced=True),
    DeepSeekFormat(is_fenced=False),
    DsmlFormat("deepseek_v32", "function_calls"),
    DsmlFormat("deepseek_v4", "tool_calls"),
)
FORMATS: Final = MappingProxyType({entry.name: entry for entry in _ALL})
# Markers that a template must hold, in order of preference. Markers of the template's own example
# of a call come first, since a template may also mention markers that it only reads.
_BY_TEMPLATE: Final = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    ((f"<{_BAR}tool▁calls▁begin{_BAR}>", "```json"), "deepseek_v3"),
    ((f"<{_BAR}tool▁calls▁begin{_BAR}>",), "deepseek_v31"),
    ((f"{_BAR}DSML{_BAR}", "function_calls"), "deepseek_v32"),
    ((f"{_BAR}DSML{_BAR}",), "deepseek_v4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("func_name1(params_name1=",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (('{"name": function name, "parameters"',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)
# Markers of unknown formats that look like one of these.
_FOREIGN: Final = ("<arg_key>",)
_BY_ARCHITECTURE: Final = MappingProxyType({"deepseek4": "deepseek_v4", "llama4": "pythonic"})


@dataclass(frozen=True, slots=True)
class SelectedFormat:
    """The tool-call format of a model.

    Attributes:
        format: format of the calls.
        is_in_template: whether the model's chat template renders tools and calls; else the template
            gets none, and `tool_prompt.py` writes them into the messages.
    """

    format: ToolFormat
    is_in_template: bool


def select_tool_format(
    template: str | None, architecture: str, name: str | None
) -> SelectedFormat | None:
    """Choose the format of a model's tool calls; pure.

    Args:
        template: source of the chat template; None if the model has none.
        architecture: architecture in the model file.
        name: `--tool-parser`: a format's name, ``none``, or None to choose by the model.

    Returns:
        None if tools are switched off, or the model cannot take messages.

    Raises:
        ArgumentError: no format has that name.
    """
    if name == "none" or template is None:
        return None
    if name is not None and name not in FORMATS:
        raise ArgumentError(
            f"tool_parser={name!r:.40} is unknown.", hint=f"Use none, {', '.join(FORMATS)}."
        )
    found = _BY_ARCHITECTURE.get(architecture)
    if not any(mark in template for mark in _FOREIGN):
        matches = (n for words, n in _BY_TEMPLATE if all(word in template for word in words))
        found = next(matches, found)
    takes_tools = "tools" in template
    if name is None and found is not None and takes_tools:
        return SelectedFormat(FORMATS[found], is_in_template=True)
    # Tools in a format that is unknown here would not be recognised in the answer.
    is_in_template = takes_tools and name is not None
    return SelectedFormat(FORMATS[name or HERMES.name], is_in_template=is_in_template)
