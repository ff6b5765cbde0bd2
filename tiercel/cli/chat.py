"""`tiercel chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tiercel.cli.loading import loaded, make_params, with_model_defaults
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName, SamplingOptions
from tiercel.cli.terminal import note, say, say_os_error
from tiercel.errors import TiercelError

if TYPE_CHECKING:
    from tiercel.cli.conversation import Conversation

_GROUP = Group("Conversation", sort_key=1)
_PROMPT = "> "
_PASTE_GAP_S = 0.03  # lines that follow each other faster than this were pasted, not typed


def chat(
    model: ModelName = None,
    *,
    system: Annotated[
        str | None, Parameter(group=_GROUP, help="Instruction before the conversation.")
    ] = None,
    load: Annotated[
        Path | None, Parameter(group=_GROUP, help="Continue a saved conversation.")
    ] = None,
    save: Annotated[
        Path | None, Parameter(group=_GROUP, help="Save the conversation after each answer.")
    ] = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Talk with a model; Ctrl-C stops an answer, Ctrl-D ends."""
    from tiercel.cli.conversation import Conversation, load_messages

    messages = load_messages(load) if load is not None else []
    params = make_params(sampling, max_tokens=None)
    is_terminal = sys.stdin.isatty()
    with loaded(model, engine, sampling, common) as llm:
        params = with_model_defaults(params, sampling, llm)
        conversation = Conversation(llm, params, messages, save_path=save, is_quiet=common.quiet)
        if system is not None:
            conversation.set_system(system)
        if is_terminal and not common.quiet:
            note("Type a message. /help lists the commands; Ctrl-D ends.")
        if is_terminal:
            _talk(conversation)
        else:
            _read_pipe(conversation)
    return 0


def _talk(conversation: Conversation) -> None:
    """Answer until the user leaves; an error costs one answer, not the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    while True:
        try:
            text = _read_message()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /quit ends the conversation.)")
            continue
        try:
            if not conversation.take(text):
                return
        except TiercelError as error:
            say("error", str(error), error.hint)
        except OSError as error:
            say_os_error(error)
        except KeyboardInterrupt:  # the second Ctrl-C within one answer
            note("\n(stopped)")


def _read_message() -> str:
    """Read one message: a line, the lines of a paste, or lines that end in a backslash."""
    lines = [input(_PROMPT)]
    while True:
        if lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  "))
        elif _has_more_input():
            lines.append(input())
        else:
            return "\n".join(lines)


def _has_more_input() -> bool:
    try:
        ready, _, _ = select.select([sys.stdin], [], [], _PASTE_GAP_S)
    except (OSError, ValueError):  # a system whose select supports only sockets
        return False
    return bool(ready)


def _read_pipe(conversation: Conversation) -> None:
    """Each line is a message or a command; the first error ends the program."""
    for line in sys.stdin:
        if not conversation.take(line.removesuffix("\n").removesuffix("\r")):
            return
        if conversation.stats is not None and conversation.stats.is_stopped:
            raise KeyboardInterrupt
