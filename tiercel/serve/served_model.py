"""The loaded model as the HTTP process knows it."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.errors import ModelNotFoundError
from tiercel.ipc.messages import EngineInfo
from tiercel.params import SamplingDefaults
from tiercel.request.inputs import InputProcessor
from tiercel.serve.grammar_check import GrammarChecker
from tiercel.serve.http.errors import escaped
from tiercel.text.chat_template import ChatTemplate
from tiercel.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model as the HTTP process knows it; kept while the engine restarts.

    Attributes:
        names: names that requests may use; answers carry the first.
        info: what the engine said of it.
        tokenizer: the model's.
        template: None where the model has none.
        inputs: makes requests for it.
        grammars: finds out whether a form can be enforced; None: none can, the model has no token
            that ends an answer.
        sampling: defaults of requests, by the server's options and the model's file.
        created: Unix seconds at which it was first ready.
    """

    names: tuple[str, ...]
    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    inputs: InputProcessor
    grammars: GrammarChecker | None
    sampling: SamplingDefaults
    created: int

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_name(self, name: str) -> None:
        """Compare the `model` field of a request; it is never more than a name.

        Raises:
            ModelNotFoundError: 404, another model.
        """
        if name not in self.names:
            raise ModelNotFoundError(
                f"the model '{escaped(name, 100)}' does not exist.",
                hint=f"This server has: {', '.join(self.names)}.",
            )
