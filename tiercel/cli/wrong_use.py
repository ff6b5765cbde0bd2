"""Messages for usage errors, in our own words where those of cyclopts are misleading."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError

MAX_SUGGESTIONS = 3
CUTOFF = 0.7  # of difflib: --temprature is --temperature, --temp is not --stop


def describe_wrong_use(error: CycloptsError) -> tuple[str, str]:
    """Describe what is wrong with a command line, and what would be right.

    Returns:
        The message and the hint.
    """
    words = error.command_chain or ()
    chain = " ".join(["tiercel", *words])
    hint = f"See {chain} --help."
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        rest = " ".join(error.unused_tokens)
        if words[-1:] == ("generate",):
            message = f"{chain}: the prompt is followed by {rest!r:.80}."
            return message, "Quote a prompt of several words."
        return f"{chain}: too many arguments: {rest!r:.80}.", hint
    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        name = (error.token.keyword or error.token.value).partition("=")[0]
        known = [n for a in error.argument_collection for n in a.names if n.startswith("--")]
        if name in known:
            return f"{chain}: {name} follows '--', after which all is text.", "Put it before '--'."
        matches = suggest(name, known)
        question = f" Did you mean {' or '.join(matches)}?" if matches else ""
        return f"{chain}: unknown option: {name}.{question}", hint
    text = str(error)
    text = text if text.endswith((".", "?")) else f"{text}."
    return f"{chain}: {text[:1].lower()}{text[1:]}", hint


def suggest(name: str, known: Sequence[str]) -> list[str]:
    """Options that begin with `name`, else the nearest one."""
    begun = sorted(option for option in known if option.startswith(name))[:MAX_SUGGESTIONS]
    return begun or difflib.get_close_matches(name, known, 1, CUTOFF)
