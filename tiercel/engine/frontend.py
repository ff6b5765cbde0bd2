"""The common part of `LLM` and `AsyncLLM`: from the arguments of a call to its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiercel.engine.load import LoadedModel
from tiercel.params import SamplingParams
from tiercel.request.completions import Completion, make_completions, unit_vectors
from tiercel.request.request import Request
from tiercel.request.score_inputs import ScoreJob, Text
from tiercel.request.score_params import ScoreParams
from tiercel.text.chat_template import ChatTemplate, encode_chat


class Frontend:
    """Makes the requests of calls to one loaded model; it holds neither weights nor cache.

    Attributes:
        source: the checked file.
        config: the resolved options.
        tokenizer: tokenizer of the model.
        inputs: maker of single requests.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.source = loaded.source
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.inputs = loaded.inputs()
        self._score_inputs = loaded.score_inputs(self.inputs)
        self._matchers = loaded.matchers
        self._template = ChatTemplate.from_tokenizer(
            self.tokenizer, source=self.source.chat_template, name=self.source.path.name
        )

    def close(self) -> None:
        """End the chat template's process."""
        if self._template is not None:
            self._template.close()

    def free_device_memory(self) -> None:
        """Give freed memory of weights and cache back to the device."""
        if self.config.device.type == "cuda":
            torch.cuda.empty_cache()

    def default_sampling_params(self) -> SamplingParams:
        """`SamplingParams` with the sampling defaults of the model's file, if it has any."""
        return SamplingParams(**self.source.sampling_defaults.given())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        """Token ids of a conversation; user text never becomes a control token."""
        return encode_chat(
            self.tokenizer,
            self._template,
            messages,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )

    def make_completions(
        self, prompt_ids: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        """The completions of a call: `n` for each prompt; see `make_completions`."""
        return make_completions(self.inputs, self.tokenizer, prompt_ids, params)

    def set_matcher(self, request: Request) -> None:
        """Give a request the matcher of its grammar, if it has one."""
        request.matcher = self._matchers.make(request.grammar, request.stop_ids)

    def logits_request(self, token_ids: Sequence[int]) -> Request:
        """The request that computes the logits after each token of a sequence."""
        ids = self.inputs.prompt_ids({"prompt_token_ids": token_ids}, parse_special=False)
        return self.inputs.request(ids, SamplingParams(), 0, max_tokens=0, wants_logits=True)

    def embedding_requests(self, texts: str | Sequence[str]) -> list[Request]:
        """The requests that compute the vectors of texts."""
        listed = [texts] if isinstance(texts, str) else list(texts)
        return [self.inputs.embedding_request(text, self.source.pooling) for text in listed]

    def embeddings(self, requests: Sequence[Request]) -> npt.NDArray[np.float32]:
        """The vectors of finished requests, (texts, hidden_size), each of length 1."""
        return unit_vectors(requests, self.source.config.hidden_size)

    def score_job(self, query: Text, items: str | Sequence[Text], params: ScoreParams) -> ScoreJob:
        """The requests that score items; see `ScoreInputs.job`."""
        return self._score_inputs.job(query, items, params)
