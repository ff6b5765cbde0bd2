"""Chat templates: check messages, render the model's template, encode the prompt safely.

A template is a program from a model file. It runs in a child process (`template_worker.py`) that
can be killed; an error or an overrun of its limits costs one request.

A user's text must not become a control token. Before rendering, each control token inside a message
is replaced by a sentinel of random digits, so that every control token in the rendered text was
written by the template. The text is cut at these, sentinels become text again, and each part is
encoded plainly. The last characters of a string that could begin a control token are replaced too,
so that two strings that the template joins cannot form one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from tiercel.errors import InternalError, InvalidRequestError, ModelFormatError
from tiercel.text.child_client import WorkerLostError
from tiercel.text.shield import ControlFinder, Shield
from tiercel.text.template_client import TemplateWorker, TemplateWorkers
from tiercel.text.tokenizer import Tokenizer

MAX_SOURCE_CHARS: Final = 1 << 20
RENDER_SECONDS: Final = 2.0
CPU_SECONDS: Final = 3  # for a child whose parent was killed: no other process would end it
MAX_MESSAGES: Final = 2048
MAX_DEPTH: Final = 64
MIN_OUTPUT_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 64 << 20
OUTPUT_PER_INPUT: Final = 4
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_NAMES: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "self",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
# Text with which a template may end the prompt, for models that always think.
_THINKING: Final = "<think>"
_THINKING_ENDS: Final = "</think>"
_NO_TEMPLATE: Final = "this model has no chat template, so it cannot take messages."

Message = Mapping[str, object]


class ChatTemplate:
    """A model's chat template.

    Args:
        source: Jinja, as Hugging Face writes it.
        bos_token: text of BOS, or "".
        eos_token: text of EOS, or "".
        worker: the process to render in; None: a new one.
        name: name in messages of the file that the template is from.

    Raises:
        ModelFormatError: the source is longer than `MAX_SOURCE_CHARS`.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        worker: TemplateWorker | TemplateWorkers | None = None,
        name: str = "chat template",
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFormatError(
                f"{name}: the chat template has {len(source)} characters; the limit is"
                f" {MAX_SOURCE_CHARS}."
            )
        self.source = source
        self._globals = {"bos_token": bos_token, "eos_token": eos_token}
        self._worker = worker if worker is not None else TemplateWorker()
        self._name = name

    @staticmethod
    def from_tokenizer(
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        worker: TemplateWorker | TemplateWorkers | None = None,
        name: str = "chat template",
    ) -> ChatTemplate | None:
        """The template that came with a tokenizer, or None.

        Args:
            tokenizer: tokenizer with the texts of BOS and EOS.
            source: Jinja from a file next to the tokenizer; None: the tokenizer's own.
            worker: see the class.
            name: see the class.

        Raises:
            ModelFormatError: the source is too long.
        """
        source = source or tokenizer.chat_template
        if source is None:
            return None
        bos, eos = (
            "" if i is None else tokenizer.token_text(i)
            for i in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return ChatTemplate(source, bos, eos, worker=worker, name=name)

    def check(self) -> None:
        """Compile the template, when a model is loaded.

        Raises:
            ModelFormatError: a syntax error, with its line; or compiling takes too long.
        """
        try:
            self._ask(None, MIN_OUTPUT_CHARS)
        except InvalidRequestError as error:
            raise ModelFormatError(f"{self._name}: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Render the messages to text.

        Args:
            messages: as the template expects them; see `check_messages`.
            tools: tool descriptions, or None.
            documents: texts that the answer may use, or None.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            template_kwargs: further variables; `RESERVED_NAMES` are refused.

        Raises:
            InvalidRequestError: the template refused the messages, failed, or overran its limits
                (code "chat_template_error"); or an argument is not JSON or a reserved name.
            ModelFormatError: a syntax error in the template, with its line.

        Source: the variables and filters of docs/source/en/chat_templating.md in
        github.com/huggingface/transformers.
        """
        extra = dict(template_kwargs or {})
        reserved = sorted(RESERVED_NAMES & extra.keys())
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs holds {reserved[0]!r}, which Tiercel sets itself.",
                param="chat_template_kwargs",
            )
        context = {
            **extra,
            **self._globals,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if documents is not None:
            context["documents"] = list(documents)
        num_chars = OUTPUT_PER_INPUT * (_json_size(context) + len(self.source))
        return self._ask(context, min(MAX_OUTPUT_CHARS, MIN_OUTPUT_CHARS + num_chars))

    def close(self) -> None:
        """End the child process; a later call starts a new one."""
        self._worker.close()

    def _ask(self, context: Mapping[str, object] | None, max_chars: int) -> str:
        request = {
            "source": self.source,
            "context": context,
            "max_chars": max_chars,
            "cpu_seconds": CPU_SECONDS,
        }
        try:
            answer = self._worker.request(request, RENDER_SECONDS)
        except WorkerLostError as error:
            spent = f"{RENDER_SECONDS:g} s" if error.is_timeout else "the memory or time it may use"
            raise _template_error(f"the chat template took more than {spent}.") from None
        kind, message = answer.get("error"), str(answer.get("message"))
        if kind == "syntax":
            raise ModelFormatError(
                f"{self._name}: the chat template has a syntax error in line {answer.get('line')}:"
                f" {message}"
            )
        if kind == "raised":
            raise _template_error(message)
        if kind is not None:
            raise _template_error(f"the chat template failed: {message}")
        text = answer.get("text")
        if not isinstance(text, str):
            raise InternalError("the chat template process gave no text.")
        return text


def _template_error(message: str) -> InvalidRequestError:
    error = InvalidRequestError(message, param="messages")
    error.code = "chat_template_error"
    return error


def _json_size(context: Mapping[str, object]) -> int:
    try:
        return len(json.dumps(context))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(
            "the messages, tools or chat_template_kwargs contain a value that is not JSON.",
            param="messages",
        ) from None


def check_messages(messages: object) -> list[dict[str, object]]:
    """Check chat messages and bring their content to strings.

    Args:
        messages: a list of objects with `role` and `content`. Content is a string or a list of text
            parts, which are joined by newlines; an assistant with `tool_calls` may have none. The
            arguments of a call may be the text of a JSON object, as in the OpenAI API: they become
            the object. Other fields stay as they are.

    Returns:
        New messages; the argument is not changed.

    Raises:
        InvalidRequestError: naming the message and field.
    """
    if not isinstance(messages, list | tuple):
        raise _field_error("messages", "must be a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise _field_error(
            "messages", f"holds {len(messages)} messages; 1 to {MAX_MESSAGES} is right"
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _field_error(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {rule}.", param=param)


def _check_message(message: object, param: str) -> dict[str, object]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise _field_error(param, "must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else f"a {type(role).__name__}"
        raise _field_error(f"{param}.role", f"is {shown}; it must be one of {', '.join(ROLES)}")
    checked = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        checked["tool_calls"] = [_with_decoded_arguments(call) for call in calls]
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        checked["content"] = ""
    elif isinstance(content, list | tuple):
        checked["content"] = "\n".join(
            _part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content)
        )
    elif not isinstance(content, str):
        found = "is missing" if content is None else f"is a {type(content).__name__}"
        raise _field_error(
            f"{param}.content", f"{found}; it must be a string or a list of text parts"
        )
    return checked


def _with_decoded_arguments(call: object) -> object:
    """A tool call whose arguments are an object, which templates expect, if its text is one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    if not isinstance(text, str):
        return call
    try:
        arguments = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _part_text(part: object, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        shown = repr(kind[:40]) if isinstance(kind, str) else "none"
        raise _field_error(param, f"has the type {shown}; this model takes text parts only")
    text = part.get("text")
    if not isinstance(text, str):
        raise _field_error(f"{param}.text", "must be a string")
    return text


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: object,
    *,
    tools: Sequence[Message] | None = None,
    documents: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    continues_final: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
) -> list[int]:
    """Turn messages into prompt ids; no string in them becomes a control token.

    Args:
        tokenizer: tokenizer of the model.
        template: template of the model; None is refused.
        messages: see `check_messages`.
        tools: see `ChatTemplate.render`.
        documents: see `ChatTemplate.render`.
        add_generation_prompt: see `ChatTemplate.render`.
        continues_final: whether the prompt ends with the text of the last message, an assistant's,
            so that the answer continues it.
        template_kwargs: see `ChatTemplate.render`.

    Returns:
        Ids, with one BOS where the model wants it, whether the template writes it or not.

    Raises:
        InvalidRequestError: a wrong message, no template, or the template failed.
        ModelFormatError: a syntax error in the template.
    """
    rendering = _Rendering(tokenizer, messages, is_open=continues_final)
    if template is not None and tools and "tools" not in template.source:
        error = _template_error("this model's chat template takes no tools.")
        error.hint = "Describe them in a system message, or ask `tiercel serve`, which does so."
        raise error
    rendered = rendering.text(
        template,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs,
    )
    if continues_final:
        if rendering.messages[-1]["role"] != "assistant":
            raise _field_error("messages", "must end with the assistant's, to be continued")
        rendered, _ = rendering.split(rendered)
    return tokenizer.with_bos(rendering.ids(rendered))


def encode_around(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: object,
    *,
    template_kwargs: Mapping[str, object] | None = None,
) -> tuple[list[int], list[int]]:
    """Prompt ids before and after the end of the last message, whose text ends otherwise.

    Thinking that the template opens for the answer is closed.

    Args:
        tokenizer: tokenizer of the model.
        template: template of the model; None is refused.
        messages: see `check_messages`.
        template_kwargs: see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: as `encode_chat`.
    """
    rendering = _Rendering(tokenizer, messages, is_open=True)
    before, after = rendering.split(rendering.text(template, template_kwargs=template_kwargs))
    if after.rstrip().endswith(_THINKING):
        after = f"{after.rstrip()}\n\n{_THINKING_ENDS}\n\n"
    return tokenizer.with_bos(rendering.ids(before)), rendering.ids(after, is_inner=True)


class _Rendering:
    """Messages on their way through a template, with their control tokens covered by sentinels."""

    def __init__(self, tokenizer: Tokenizer, messages: object, *, is_open: bool) -> None:
        """Cover the messages; `is_open` marks the end of the last one."""
        tokenizer.require_text("messages")
        self.messages = check_messages(messages)
        self._tokenizer = tokenizer
        self._finder = ControlFinder(tokenizer.control_tokens)
        self._shield = Shield(self._finder)
        self._covered = [_mapped(message, self._shield.cover) for message in self.messages]
        if is_open:
            last = self._covered[-1]
            last["content"] = f"{last['content']}{self._shield.end_mark}"

    def text(
        self,
        template: ChatTemplate | None,
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The output of the template, still with sentinels."""
        if template is None:
            error = _template_error(_NO_TEMPLATE)
            error.hint = (
                "Send a raw prompt: POST /v1/completions, `tiercel generate` or `LLM.generate`."
            )
            raise error
        cover = self._shield.cover
        return template.render(
            self._covered,
            tools=None if tools is None else [_mapped(tool, cover) for tool in tools],
            documents=None if documents is None else [_mapped(d, cover) for d in documents],
            add_generation_prompt=add_generation_prompt,
            template_kwargs=_mapped(template_kwargs or {}, cover),
        )

    def split(self, rendered: str) -> tuple[str, str]:
        """The text before the marked end, and after it."""
        before, mark, after = rendered.rpartition(self._shield.end_mark)
        if not mark:
            raise _template_error("the chat template does not show the last message.")
        return before, after

    def ids(self, rendered: str, *, is_inner: bool = False) -> list[int]:
        """Token ids of rendered text; `is_inner` if it follows other tokens."""
        return _encode_parts(
            self._tokenizer, self._finder, rendered, self._shield, is_inner=is_inner
        )


def _encode_parts(
    tokenizer: Tokenizer, finder: ControlFinder, rendered: str, shield: Shield, *, is_inner: bool
) -> list[int]:
    ids: list[int] = []
    position = 0
    trims_left = False
    for start, end in [*finder.find_all(rendered), (len(rendered), len(rendered))]:
        text = shield.uncover(rendered[position:start])
        control_id = tokenizer.control_tokens.get(rendered[start:end])
        takes_before, takes_after = tokenizer.trimming.get(
            -1 if control_id is None else control_id, (False, False)
        )
        text = text.lstrip() if trims_left else text
        text = text.rstrip() if takes_before else text
        if text:
            ids += tokenizer.encode_inner(text) if position or is_inner else tokenizer.encode(text)
        if control_id is not None:
            ids.append(control_id)
        position, trims_left = end, takes_after
    return ids


def _mapped(value: Mapping[str, object], change: Callable[[str], str]) -> dict[str, object]:
    """The JSON object with every string in it, keys too, changed."""
    return {change(key): _map_strings(item, change, MAX_DEPTH) for key, item in value.items()}


def _map_strings(value: object, change: Callable[[str], str], depth: int) -> object:
    if depth == 0:
        raise InvalidRequestError(
            f"the messages are nested deeper than {MAX_DEPTH}.", param="messages"
        )
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: _map_strings(item, change, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, depth - 1) for item in value]
    return value
