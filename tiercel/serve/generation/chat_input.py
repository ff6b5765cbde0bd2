"""One conversation, however it was written on the wire, to a generation request.

Messages and tools go through the model's template to prompt ids. Tools and the form of the answer
become one grammar, which is checked before the engine hears of it, and the parsers that take the
answer apart again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiercel.errors import ContextLengthError, ModelFormatError
from tiercel.grammar.spec import ThinkingForm
from tiercel.params import LIMITS, SamplingParams
from tiercel.serve.generation.answer_form import AnswerForm, bound_thinking, compile_grammar
from tiercel.serve.generation.answer_text import Parsers
from tiercel.serve.generation.chat_messages import (
    FunctionSpec,
    Message,
    check_tools,
    template_messages,
    template_tools,
)
from tiercel.serve.generation.generation import GenerationRequest
from tiercel.serve.generation.prompts import Conversation, encode_messages, request_template
from tiercel.serve.generation.reasoning import (
    ReasoningSplitter,
    prompt_tail,
    select_reasoning_format,
)
from tiercel.serve.generation.tools.tool_prompt import write_tools
from tiercel.serve.generation.tools.tools import ToolUse, make_tool_use, select_tool_format
from tiercel.serve.http.errors import refusal, unsupported
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import Sender, ServerState
from tiercel.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation and what is asked of its answer.

    Attributes:
        messages: as they came.
        tools: functions that the model may call.
        tool_choice: ``none``, ``auto``, ``required``; None: ``auto``.
        tool_name: the one function that must be called.
        is_parallel: whether an answer may hold several calls.
        effort: how much the model should think, for templates that know it.
        template_kwargs: further variables of the template.
        template: instead of the model's own.
        documents: texts that the answer may draw on.
        has_generation_prompt: whether the prompt ends where an answer begins; None: it does,
            unless the last message is continued.
        continues_final: the answer continues the last message, which is the assistant's.
        stops_in_reasoning: stop strings also end the reasoning.
        max_thinking: tokens that the model may think for; None: as many as it likes.
        drops_oldest: turns from the start are left out until the rest fits the context.
        priority: smaller goes first.
        param: the field that holds the messages.
        form_param: the field that says what form the answer must have.
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
    form_param: str = "response_format"


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """What a conversation's tools become for its model.

    Attributes:
        template: that renders it; None: the model's own.
        source: Jinja of either; None if there is none.
        use: the calls that the answer may hold.
        is_text: the template knows no tools, so messages of plain text tell the model of them.
    """

    template: ChatTemplate | None
    source: str | None
    use: ToolUse | None
    is_text: bool


async def prepare_chat(
    state: ServerState,
    model: ServedModel,
    chat: ChatInput,
    params: SamplingParams,
    sender: Sender,
) -> GenerationRequest:
    """What a conversation asks of the engine.

    Raises:
        InvalidRequestError: naming what is wrong with messages, tools, template or form.
        ContextLengthError: its text cannot fit; nothing was rendered.
    """
    outputs = params.structured_outputs
    chosen = choose_tools(state, model, chat, has_form=outputs is not None)
    ids = await _fitting_ids(state, model, chat, chosen)
    reasoning = select_reasoning_format(chosen.source, state.settings.reasoning_parser)
    thinking = None if reasoning is None else reasoning.form(prompt_tail(model.tokenizer, ids))
    if thinking is not None and chat.continues_final and not thinking.is_open:
        thinking = None  # the answer has begun already
    param = chat.form_param if outputs is not None else "tools"
    form = AnswerForm(outputs, chosen.use, thinking, param, sender.client)
    grammar = await compile_grammar(state, model, form)
    names = model.tokenizer.control_tokens
    parsers = ParserMaker(
        thinking=thinking,
        use=chosen.use,
        is_constrained=grammar is not None,
        stops_in_reasoning=chat.stops_in_reasoning,
        needs_special=(reasoning is not None and reasoning.needs_special(names))
        or (chosen.use is not None and chosen.use.needs_special(names)),
    )
    bound = await bound_thinking(state, model, form, chat.max_thinking)
    return GenerationRequest(
        prompts=(ids,),
        params=params,
        make_parsers=parsers,
        grammar=grammar,
        thinking=bound,
        sender=sender,
        priority=chat.priority,
        param=chat.param,
    )


@dataclass(frozen=True, slots=True)
class ParserMaker:
    """Makes the parsers of each answer to one conversation; see `Parsers`."""

    thinking: ThinkingForm | None
    use: ToolUse | None
    is_constrained: bool
    stops_in_reasoning: bool
    needs_special: bool

    def __call__(self) -> Parsers:
        """New parsers, for one answer."""
        use = self.use
        return Parsers(
            reasoning=None if self.thinking is None else ReasoningSplitter(self.thinking),
            tools=None if use is None else use.parser(is_constrained=self.is_constrained),
            stops_in_reasoning=self.stops_in_reasoning,
            needs_special=self.needs_special,
        )


async def encode_chat_input(state: ServerState, model: ServedModel, chat: ChatInput) -> list[int]:
    """The prompt ids of a conversation alone.

    Raises:
        InvalidRequestError, ContextLengthError: as `prepare_chat`.
    """
    return await _encode(state, model, chat, choose_tools(state, model, chat, has_form=False))


def choose_tools(
    state: ServerState, model: ServedModel, chat: ChatInput, *, has_form: bool
) -> ChosenTools:
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
    use = make_tool_use(
        selected,
        chat.tools,
        choice=chat.tool_choice or "auto",
        named=chat.tool_name,
        is_parallel=chat.is_parallel,
        has_form=has_form,
        max_tokens=model.info.max_model_len,
        limits=state.settings.limits,
    )
    return ChosenTools(
        template=template,
        source=None if source is None else source.source,
        use=use,
        is_text=selected is not None and not selected.is_in_template,
    )


async def _fitting_ids(
    state: ServerState, model: ServedModel, chat: ChatInput, chosen: ChosenTools
) -> list[int]:
    """The prompt; if asked for, without as many of its oldest turns as do not fit."""
    if not chat.drops_oldest:
        return await _encode(state, model, chat, chosen)
    starts = [i for i, message in enumerate(chat.messages) if message.role == "user"]
    starts = [0, *starts[1:]]  # what stands before the second turn of the user goes with the first
    best: list[int] | None = None
    low, high = 0, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2 if low else 0  # whole conversations usually fit
        try:
            ids = await _encode(state, model, _from_turn(chat, starts[middle]), chosen)
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
    state: ServerState, model: ServedModel, chat: ChatInput, chosen: ChosenTools
) -> list[int]:
    conversation = make_conversation(state, model, chat, chosen)
    try:
        return await encode_messages(state, model, conversation)
    except ModelFormatError as error:  # the model's own template compiled when it was loaded
        raise refusal(400, "chat_template_error", str(error), param="chat_template") from None


def make_conversation(
    state: ServerState, model: ServedModel, chat: ChatInput, chosen: ChosenTools
) -> Conversation:
    """What the template renders.

    Raises:
        InvalidRequestError: naming the message.
        ContextLengthError: its text cannot fit.
    """
    limits = state.settings.limits
    is_known = chosen.source is not None and "developer" in chosen.source
    messages = template_messages(chat.messages, limits, knows_developer=is_known, param=chat.param)
    check_text_length(model, messages, chat.param)
    tools = () if chosen.use is None else chat.tools
    if chosen.is_text and (tools or any(m.role == "tool" or m.tool_calls for m in chat.messages)):
        messages, tools = write_tools(messages, tools), ()
    if chat.documents is not None and "documents" not in (chosen.source or ""):
        raise unsupported("documents", "means nothing to this model's chat template")
    has_prompt = chat.has_generation_prompt
    return Conversation(
        messages=messages,
        tools=template_tools(tools) or None,
        documents=chat.documents,
        add_generation_prompt=not chat.continues_final if has_prompt is None else has_prompt,
        continues_final=chat.continues_final,
        template_kwargs=_template_kwargs(chat),
        template=chosen.template,
    )


def _template_kwargs(chat: ChatInput) -> dict[str, object]:
    """Variables of the template; no effort at all also means not to think, where that is one."""
    kwargs: dict[str, object] = {}
    if chat.effort is not None:
        kwargs["reasoning_effort"] = chat.effort
        if chat.effort == "none":
            kwargs["enable_thinking"] = False
    return {**kwargs, **chat.template_kwargs}


def check_text_length(
    model: ServedModel, messages: Sequence[Mapping[str, object]], param: str
) -> None:
    """Refuse what cannot fit, whatever its tokens, before a template renders it.

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
