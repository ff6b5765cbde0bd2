"""The thinking budget: how many tokens a model may think for before it must answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiercel.grammar.spec import GrammarSpec
from tiercel.serve.generation.structured_output import OutputConstraints, compile_grammar
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit of the thinking. At the limit the server closes the thinking, and the model goes on.

    Attributes:
        max_tokens: tokens of the thinking, its opening marker included.
        closing: text that closes it.
        closing_ids: tokens of `closing`; the prompt of the rest ends with them.
        grammar: grammar that the rest must match.
    """

    max_tokens: int
    closing: str
    closing_ids: tuple[int, ...]
    grammar: GrammarSpec | None


async def make_thinking_budget(
    state: ServerState,
    model: ServedModel,
    constraints: OutputConstraints,
    max_tokens: int | None,
) -> ThinkingBudget | None:
    """The thinking budget of a completion; None without a limit or without thinking.

    Raises:
        InvalidRequestError: as `compile_grammar`.
    """
    if constraints.thinking is None or max_tokens is None:
        return None
    closing = f"\n{constraints.thinking.closing}\n\n"
    return ThinkingBudget(
        max_tokens=max_tokens,
        closing=closing,
        closing_ids=tuple(model.tokenizer.encode(closing, parse_special=True)),
        grammar=await compile_grammar(state, model, replace(constraints, thinking=None)),
    )
