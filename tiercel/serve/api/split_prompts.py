"""Raw prompts of a request: one text, one list of token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.errors import ContextLengthError, InvalidRequestError
from tiercel.serve.http.body import TokenId
from tiercel.serve.served_model import ServedModel

Prompt = str | list[str | TokenId | list[TokenId]]


def split_prompts(prompt: Prompt, param: str) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids.

    Args:
        prompt: as it came.
        param: the field that holds it.

    Raises:
        InvalidRequestError: none, or a list of different kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        found = "is an empty list" if not prompt else "holds items of different kinds"
        raise InvalidRequestError(
            f"{param} {found}.",
            hint="Send a string, token ids, a list of strings, or a list of lists of token ids.",
            param=param,
        )
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def check_token_ids(model: ServedModel, ids: Sequence[int], param: str) -> None:
    """Refuse token ids that are too many, or beyond the vocabulary.

    Raises:
        ContextLengthError: the prompt does not fit, even without a completion.
        InvalidRequestError: an id beyond the vocabulary.
    """
    try:
        model.inputs.check_length(len(ids), 0)
    except ContextLengthError as error:
        error.param = param
        raise
    largest = max(ids, default=0)
    if largest >= model.tokenizer.vocab_size:
        raise InvalidRequestError(
            f"{param} holds the token id {largest}.",
            hint=f"Token ids are 0 to {model.tokenizer.vocab_size - 1}.",
            param=param,
        )
