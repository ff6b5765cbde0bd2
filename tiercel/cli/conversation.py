"""The state of a chat: messages, the commands that change them, files, figures of the last answer.

The history always alternates as the template expects: of a stopped answer the text so far is kept,
and a message whose answer failed is dropped.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiercel.cli.loading import check_answer
from tiercel.cli.terminal import (
    PromptLine,
    check_utf8,
    interrupt_asks,
    note,
    read_bounded,
    say,
    write,
)
from tiercel.errors import ArgumentError

if TYPE_CHECKING:
    from tiercel.llm import LLM
    from tiercel.params import SamplingParams

MAX_FILE_BYTES = 16 << 20
_ROLES = ("system", "user", "assistant")

HELP = """\
/help          this list
/reset         forget the conversation, keep the system message
/system TEXT   set the system message; without TEXT, show it
/save FILE     write the conversation to a file
/load FILE     continue a conversation from a file
/regen         answer the last message again
/stats         figures of the last answer
/quit          leave (also Ctrl-D)
A line that ends in \\ continues on the next; //text sends a message that begins with /."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message]


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Figures of one answer; the time to the first token includes processing the conversation."""

    num_tokens: int
    first_token_s: float
    total_s: float
    is_stopped: bool


class Conversation:
    """A conversation: its messages and the model that answers them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        messages: list[dict[str, str]],
        save_path: Path | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        self.messages = messages
        self.stats: AnswerStats | None = None
        self._llm = llm
        self._params = params
        self._save_path = save_path
        self._is_quiet = is_quiet
        self._num_tries = 0

    def set_system(self, text: str) -> None:
        """Set the first message to a system message, replacing an existing one."""
        check_utf8("the system message", text, ArgumentError)
        if self.messages and self.messages[0]["role"] == "system":
            self.messages.pop(0)
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def take(self, text: str) -> bool:
        """Act on one input: a command or a message.

        Returns:
            False if the user leaves.
        """
        if not text.strip():
            return True
        check_utf8("the message", text, ArgumentError)
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            return self._command(text)
        self._num_tries = 0
        self._answer([*self.messages, {"role": "user", "content": text}])
        return True

    def save(self, path: Path) -> None:
        """Write the messages as JSON; the file appears complete or not at all."""
        messages = [_Message(**message) for message in self.messages]
        data = msgspec.json.format(msgspec.json.encode(_File(messages)), indent=2)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data + b"\n")
            part.replace(path)
        except OSError as error:  # the error names the temporary file, which the user does not know
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            part.unlink(missing_ok=True)

    def _command(self, text: str) -> bool:
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP),
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save_command,
            "/load": self._load_command,
            "/regen": self._regenerate,
            "/stats": self._show_stats,
        }
        if name in ("/quit", "/exit"):
            return False
        if name in commands:
            commands[name](argument)
            return True
        nearest = difflib.get_close_matches(name, [*commands, "/quit"], n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else "/help lists the commands."
        say("error", f"{name[:40]}: no such command.", hint)
        return True

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Stream an answer to the last of `messages`; a failed one leaves the history unchanged."""
        pieces: list[str] = []
        num_tokens = 0
        first_s = 0.0
        is_stopped = False
        started_s = time.perf_counter()
        with interrupt_asks() as is_asked_to_stop, PromptLine(is_quiet=self._is_quiet) as line:
            for delta in self._llm.stream_chat(messages, self._next_params(), progress=line):
                line.erase()
                first_s = first_s or time.perf_counter() - started_s
                num_tokens += len(delta.token_ids)
                pieces.append(delta.text)
                write(delta.text)
                check_answer(delta)
                if is_asked_to_stop():
                    is_stopped = True
                    break  # the stream ends with its last reference; the engine drops the request
        write("\n")
        self.stats = AnswerStats(num_tokens, first_s, time.perf_counter() - started_s, is_stopped)
        self.messages[:] = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        if is_stopped:
            note("(stopped)")
        if self._save_path is not None:
            self.save(self._save_path)

    def _next_params(self) -> SamplingParams:
        """The parameters, with another random stream for each new attempt at one message."""
        if self._num_tries == 0 or self._params.seed is None:
            return self._params
        return replace(self._params, seed=self._params.seed + self._num_tries)

    def _reset(self, _argument: str) -> None:
        self.messages[:] = [m for m in self.messages[:1] if m["role"] == "system"]
        note("(the conversation is empty)")

    def _system(self, argument: str) -> None:
        if argument:
            self.set_system(argument)
        elif self.messages and self.messages[0]["role"] == "system":
            note(self.messages[0]["content"])
        else:
            note("(no system message)")

    def _save_command(self, argument: str) -> None:
        if not argument:
            raise ArgumentError("/save: no file was named.", hint="Write /save FILE.")
        self.save(Path(argument))
        note(f"(saved {len(self.messages)} messages to {argument})")

    def _load_command(self, argument: str) -> None:
        if not argument:
            raise ArgumentError("/load: no file was named.", hint="Write /load FILE.")
        self.messages[:] = load_messages(Path(argument))
        note(f"(loaded {len(self.messages)} messages)")

    def _regenerate(self, _argument: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ArgumentError("/regen: there is no answer yet.", hint="Send a message first.")
        self._num_tries += 1
        self._answer(self.messages[:-1])

    def _show_stats(self, _argument: str) -> None:
        if self.stats is None:
            note("(no answer yet)")
            return
        stats = self.stats
        rest_s = stats.total_s - stats.first_token_s
        speed = f", then {(stats.num_tokens - 1) / rest_s:.1f} tokens/s" if rest_s > 0 else ""
        ended = ", stopped" if stats.is_stopped else ""
        note(
            f"{stats.num_tokens} tokens{ended}; first after {stats.first_token_s:.2f} s{speed}; "
            f"{len(self.messages)} messages"
        )


def load_messages(path: Path) -> list[dict[str, str]]:
    """Read a saved conversation.

    Raises:
        ArgumentError: the file is not a saved conversation.
        OSError: it cannot be read.
    """
    data = read_bounded(path, MAX_FILE_BYTES)
    if data is None:
        raise ArgumentError(
            f"{path}: over {MAX_FILE_BYTES} bytes, and no more are read.",
            hint="Give a file that /save wrote.",
        )
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: not a saved conversation: {error!s:.120}.",
            hint="Give a file that /save wrote.",
        ) from error
    for index, message in enumerate(file.messages):
        if message.role not in _ROLES or (message.role == "system" and index > 0):
            raise ArgumentError(
                f"{path}: message {index} has role {message.role!r:.40}.",
                hint="Use user and assistant; system may come first.",
            )
    return [{"role": message.role, "content": message.content} for message in file.messages]
