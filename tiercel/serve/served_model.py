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
    """The loaded model in the HTTP process; it is kept while the engine restarts.

    Attributes:
        names: names that requests may use; responses carry the first.
        info: description of the model and its engine.
        tokenizer: tokenizer of the model.
        template: chat template; None if the model has none.
        inputs: factory of the engine's requests.
        grammars: checker of grammars; None for a model without text or an end token, whose output
            cannot be constrained.
        sampling: sampling defaults, from the server's options and the model's file.
        created: Unix time in seconds at which the model was first ready.
        num_engines: engines that answer with it; `info` is that of the smallest.
    """

    names: tuple[str, ...]
    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    inputs: InputProcessor
    grammars: GrammarChecker | None
    sampling: SamplingDefaults
    created: int
    num_engines: int = 1

    @property
    def name(self) -> str:
        """The name in responses."""
        return self.names[0]

    @property
    def num_rows(self) -> int:
        """Requests that run together in all engines."""
        return self.info.max_num_seqs * self.num_engines

    def check_name(self, name: str) -> None:
        """Compare the `model` field of a request; it is a name, never a path.

        Raises:
            ModelNotFoundError: 404, another model.
        """
        if name not in self.names:
            raise ModelNotFoundError(
                f"the model '{escaped(name, 100)}' does not exist.",
                hint=f"This server has: {', '.join(self.names)}.",
            )
