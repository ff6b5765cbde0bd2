"""A conversation, from whichever API it came, to a generation request.

The chat template renders messages and tools, and the tokenizer makes the prompt ids. Tools and the
structured output become one grammar, which is checked before the engine gets it, and parsers that
split the output into reasoning, content and tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiercel.errors import ContextLengthError, ModelFormatError
from tiercel.grammar.spec import ThinkingForm
from tiercel.params import LIMITS, SamplingParams
from tiercel.serve.generation.chat_messages import (
    FunctionSpec,
    Message,
    check_tools,
    template_messages,
    template_tools,
)
from tiercel.serve.generation.generation import GenerationRequest
from tiercel.serve.generation.output_parser import Parsers
from tiercel.serve.generation.prompts import Conversation, encode_messages, request_template
from tiercel.serve.generation.reasoning_parser import (
    ThinkTagParser,
    prompt_tail,
    select_reasoning_format,
)
from tiercel.serve.generation.structured_output import OutputConstraints, compile_grammar
from tiercel.serve.generation.thinking_budget import make_thinking_budget
from tiercel.serve.generation.tools.tool_choice import ToolConstraints, make_tool_constraints
from tiercel.serve.generation.tools.tool_formats import select_tool_format
from tiercel.serve.generation.tools.tool_prompt import write_tools
from tiercel.serve.http.errors import client_error, unsupported_parameter
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState
from tiercel.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, and what the request says about its completions.

    Attributes:
        messages: messages of the request.
        tools: functions that the model may call.
        tool_choice: ``none``, ``auto`` or ``required``; None: ``auto``.
        tool_name: name of the one function that must be called.
        is_parallel: whether a completion may hold several tool calls.
        effort: reasoning effort, for templates that know it.
        template_kwargs: further variables of the template.
        template: chat template of the request, instead of the model's own.
        documents: texts that the model may use.
        has_generation_prompt: whether the prompt ends with the start of an assistant's turn; None:
            it does, unless the last message is continued.
        continues_final: whether the completion continues the last message, an assistant's.
        stops_in_reasoning: whether stop strings also end the reasoning.
        max_thinking: limit of the thinking in tokens; None: no limit.
        drops_oldest: whether the oldest turns are left out until the conversation fits the context.
        priority: scheduling priority; smaller goes first.
        param: request field that holds the messages.
        structured_param: request field that sets the structured output.
    """

    messages: Sequence[Message]
    tools: Sequence[FunctionSpec] = ()
    tool_choice: str | None = None
    tool_name: str | None = None
    is_parallel: bool = True
    effort: str | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    has_generation_prompt: bool | None = None
    continues_final: bool = False
    stops_in_reasoning: bool = False
    max_thinking: int | None = None
    drops_oldest: bool = False
    priority: int = 0
    param: str = "messages"
    structured_param: str = "response_format"


@dataclass(frozen=True, slots=True)
class PreparedTools:
    """The tools of a conversation, prepared for its model.

    Attributes:
        template: chat template of the request; None: the model's own.
        source: Jinja source of the template in use; None if there is none.
        constraints: tool calls that a completion may hold.
        is_text: whether messages of plain text describe the tools, because the template cannot.
    """

    template: ChatTemplate | None
    source: str | None
    constraints: ToolConstraints | None
    is_text: bool


async def prepare_chat(
    state: ServerState,
    model: ServedModel,
    chat: ChatInput,
    params: SamplingParams,
    sender: Sender,
) -> GenerationRequest:
    """The generation request of a conversation.

    Raises:
        InvalidRequestError: messages, tools, template or structure are wrong; it names which.
        ContextLengthError: its text cannot fit; nothing was rendered.
    """
    model.tokenizer.require_text(chat.param)
    structured = params.structured_outputs
    tools = prepare_tools(state, model, chat, is_structured=structured is not None)
    ids = await _fitting_ids(state, model, chat, tools)
    reasoning = select_reasoning_format(tools.source, state.settings.reasoning_parser)
    thinking = None if reasoning is None else reasoning.form(prompt_tail(model.tokenizer, ids))
    if thinking is not None and chat.continues_final and not thinking.is_open:
        thinking = None  # the visible text has begun already
    constraints = OutputConstraints(
        structured,
        tools.constraints,
        thinking,
        param=chat.structured_param if structured is not None else "tools",
        client=sender.client,
    )
    grammar = await compile_grammar(state, model, constraints)
    names = model.tokenizer.control_tokens
    parsers = ParserFactory(
        thinking=thinking,
        tools=tools.constraints,
        is_constrained=grammar is not None,
        stops_in_reasoning=chat.stops_in_reasoning,
        needs_special=(reasoning is not None and reasoning.needs_special(names))
        or (tools.constraints is not None and tools.constraints.needs_special(names)),
    )
    budget = await make_thinking_budget(state, model, constraints, chat.max_thinking)
    return GenerationRequest(
        prompts=(ids,),
        params=params,
        make_parsers=parsers,
        grammar=grammar,
        thinking=budget,
        sender=sender,
        priority=chat.priority,
        param=chat.param,
    )


@dataclass(frozen=True, slots=True)
class ParserFactory:
    """Factory of the parsers of each completion of one conversation; see `Parsers`."""

    thinking: ThinkingForm | None
    tools: ToolConstraints | None
    is_constrained: bool
    stops_in_reasoning: bool
    needs_special: bool

    def __call__(self) -> Parsers:
        """New parsers, for one completion."""
        tools = self.tools
        return Parsers(
            reasoning=None if self.thinking is None else ThinkTagParser(self.thinking),
            tools=None if tools is None else tools.parser(is_constrained=self.is_constrained),
            stops_in_reasoning=self.stops_in_reasoning,
            needs_special=self.needs_special,
        )


async def encode_chat_input(state: ServerState, model: ServedModel, chat: ChatInput) -> list[int]:
    """The prompt ids of a conversation alone.

    Raises:
        InvalidRequestError, ContextLengthError: as `prepare_chat`.
    """
    return await _encode(state, model, chat, prepare_tools(state, model, chat, is_structured=False))


def prepare_tools(
    state: ServerState, model: ServedModel, chat: ChatInput, *, is_structured: bool
) -> PreparedTools:
    """Check tools and choice against each other and the model.

    Raises:
        InvalidRequestError: naming the field.
    """
    check_tools(chat.tools, state.settings.limits)
    template = request_template(state, model, chat.template)
    source = template or model.template
    selected = select_tool_format(
        None if source is None else source.source,
        model.info.architecture,
        state.settings.tool_parser,
    )
    constraints = make_tool_constraints(
        selected,
        chat.tools,
        choice=chat.tool_choice or "auto",
        named=chat.tool_name,
        is_parallel=chat.is_parallel,
        is_structured=is_structured,
        max_tokens=model.info.max_model_len,
        limits=state.settings.limits,
    )
    return PreparedTools(
        template=template,
        source=None if source is None else source.source,
        constraints=constraints,
        is_text=selected is not None and not selected.is_in_template,
    )


async def _fitting_ids(
    state: ServerState, model: ServedModel, chat: ChatInput, tools: PreparedTools
) -> list[int]:
    """The prompt ids; with `drops_oldest` without the oldest turns that do not fit."""
    if not chat.drops_oldest:
        return await _encode(state, model, chat, tools)
    starts = [i for i, message in enumerate(chat.messages) if message.role == "user"]
    starts = [0, *starts[1:]]  # everything before the user's second turn goes with the first
    best: list[int] | None = None
    low, high = 0, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2 if low else 0  # whole conversations usually fit
        try:
            ids = await _encode(state, model, _from_turn(chat, starts[middle]), tools)
            model.inputs.check_length(len(ids))
        except ContextLengthError as error:
            low = middle + 1
            if low > high and best is None:
                error.param = chat.param
                raise
        else:
            best, high = ids, middle - 1
    assert best is not None, "else the last try has raised"
    return best


def _from_turn(chat: ChatInput, start: int) -> ChatInput:
    """The conversation from its turn at `start` on, with every system text before it."""
    kept = [m for m in chat.messages[:start] if m.role in ("system", "developer")]
    return replace(chat, messages=[*kept, *chat.messages[start:]])


async def _encode(
    state: ServerState, model: ServedModel, chat: ChatInput, tools: PreparedTools
) -> list[int]:
    conversation = make_conversation(state, model, chat, tools)
    try:
        return await encode_messages(state, model, conversation)
    except ModelFormatError as error:  # of the request: the model's own compiled at load
        raise client_error(400, "chat_template_error", str(error), param="chat_template") from None


def make_conversation(
    state: ServerState, model: ServedModel, chat: ChatInput, tools: PreparedTools
) -> Conversation:
    """The input of the chat template.

    Raises:
        InvalidRequestError: naming the message.
        ContextLengthError: its text cannot fit.
    """
    limits = state.settings.limits
    knows_developer = tools.source is not None and "developer" in tools.source
    messages = template_messages(
        chat.messages, limits, knows_developer=knows_developer, param=chat.param
    )
    check_text_length(model, messages, chat.param)
    functions = () if tools.constraints is None else chat.tools
    has_calls = any(m.role == "tool" or m.tool_calls for m in chat.messages)
    if tools.is_text and (functions or has_calls):
        messages, functions = write_tools(messages, functions), ()
    if chat.documents is not None and "documents" not in (tools.source or ""):
        raise unsupported_parameter("documents", "means nothing to this model's chat template")
    has_prompt = chat.has_generation_prompt
    return Conversation(
        messages=messages,
        tools=template_tools(functions) or None,
        documents=chat.documents,
        add_generation_prompt=not chat.continues_final if has_prompt is None else has_prompt,
        continues_final=chat.continues_final,
        template_kwargs=_template_kwargs(chat),
        template=tools.template,
    )


def _template_kwargs(chat: ChatInput) -> dict[str, object]:
    """Variables of the template; effort `none` also switches thinking off, where it can be."""
    kwargs: dict[str, object] = {}
    if chat.effort is not None:
        kwargs["reasoning_effort"] = chat.effort
        if chat.effort == "none":
            kwargs["enable_thinking"] = False
    return {**kwargs, **chat.template_kwargs}


def check_text_length(
    model: ServedModel, messages: Sequence[Mapping[str, object]], param: str
) -> None:
    """Refuse a conversation that cannot fit, however it is tokenized, before it is rendered.

    Raises:
        ContextLengthError: with both numbers.
    """
    size = sum(_num_bytes(message["content"]) for message in messages)
    context = model.info.max_model_len
    if size > context * LIMITS.max_prompt_bytes_per_token:
        raise ContextLengthError(
            f"{param} has {size} bytes of text but the context holds {context} tokens, answer"
            " included.",
            hint="Shorten it.",
            param=param,
        )


def _num_bytes(content: object) -> int:
    if isinstance(content, str):
        return len(content.encode())
    assert isinstance(content, list), "content is text or text parts"
    return sum(len(part["text"].encode()) for part in content)
