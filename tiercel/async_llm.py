"""The Python API for asyncio: a model in this process, its loop on a thread of its own.

    async with AsyncLLM("model.gguf") as llm:
        async for delta in llm.stream("The capital of France is"):
            print(delta.text, end="")

Calls of any number of tasks run together. Cancelling a task, or leaving a stream, ends its requests
before the engine's next step.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tiercel.config import LoadOptions
from tiercel.engine.frontend import Frontend
from tiercel.engine.loop import EngineLoop
from tiercel.errors import InvalidRequestError
from tiercel.ipc.asyncio_bridge import AsyncioBridge
from tiercel.ipc.load import load_ranks
from tiercel.ipc.streams import TokenStream
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
from tiercel.request.request import Request
from tiercel.request.score_inputs import ScoreOutput, Text
from tiercel.request.score_params import ScoreParams

T = TypeVar("T")
INLINE_CHARS: Final = 4096  # longer texts are tokenized off the event loop


class AsyncLLM:
    """A model, its cache and its requests; see `LLM` for what each call takes and gives."""

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
        """Find, check and load a model; the arguments and errors are those of `LLM`.

        It takes seconds. Where an event loop runs already, make it with
        ``await asyncio.to_thread(AsyncLLM, ...)``.
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
            timed_steps=True,
        )
        loaded = load_ranks(model, options, progress)
        self._frontend = Frontend(loaded)
        self._inputs = self._frontend.inputs
        self.source, self.config = loaded.source, loaded.config
        self.tokenizer = loaded.tokenizer
        self._pid = os.getpid()
        self._bridge: AsyncioBridge | None = AsyncioBridge(loaded.engine, loaded.faults)
        self._thread = threading.Thread(target=self._bridge.run, name="tiercel-engine", daemon=True)
        self._thread.start()
        # Also at the end of the program: PyTorch must not run while the interpreter is taken down.
        self._finalizer = weakref.finalize(
            self, _end, self._bridge.loop, self._thread, loaded.peers.close
        )

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give weights and cache back; open streams end with an error."""
        self._frontend.close()
        await asyncio.to_thread(self._finalizer)
        self._bridge = None
        self._frontend.free_device_memory()

    async def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text; see `Tokenizer.encode`."""
        return await _off_loop(
            len(text),
            lambda: self.tokenizer.encode(
                text, parse_special=parse_special, add_special_tokens=add_special_tokens
            ),
        )

    async def default_sampling_params(self) -> SamplingParams:
        """`SamplingParams` with the sampling defaults of the model's file, if it has any."""
        return self._frontend.default_sampling_params()

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; see `Tokenizer.decode`."""
        self.tokenizer.require_text()
        return await _off_loop(
            len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw prompts, all together; see `LLM.generate`."""
        listed, every = list_prompts(prompts, params)
        ids = [await self._prompt_ids(prompt, parse_special=parse_special) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return await self._run(ids, texts, every)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template; see `LLM.chat`."""
        ids = await self.encode_chat(
            messages, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        return (
            await self._run([ids], [None], [pick_params(params, SamplingParams(max_tokens=None))])
        )[0]

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; user text never becomes a control token."""
        return await asyncio.to_thread(
            self._frontend.encode_chat,
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        parse_special: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """Continue a raw prompt delta by delta; leaving the loop early ends the request.

        `progress` is called with (prompt tokens computed, prompt tokens), at most four times a
        second, as long as the prompt is computed.
        """
        ids = await self._prompt_ids(prompt, parse_special=parse_special)
        wanted = pick_params(params, SamplingParams())
        async with aclosing(self._stream(ids, wanted, progress)) as deltas:
            async for delta in deltas:
                yield delta

    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """Answer a conversation delta by delta; `progress` as in `stream`."""
        ids = await self.encode_chat(
            messages, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        wanted = pick_params(params, SamplingParams(max_tokens=None))
        async with aclosing(self._stream(ids, wanted, progress)) as deltas:
            async for delta in deltas:
                yield delta

    async def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits after each token of a given sequence; see `LLM.logits`."""
        request = self._frontend.logits_request(token_ids)
        bridge = self._open()
        bridged = bridge.submit(request)
        try:
            async for _ in bridged.stream:
                pass
        finally:
            bridge.abort(request)
        return await asyncio.to_thread(np.concatenate, bridged.engine_request.prompt_logits)

    async def embed(self, texts: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Compute the vectors of texts with an embedding model; see `LLM.embed`."""
        requests = self._frontend.embedding_requests(texts)
        await self._read_to_end(requests)
        return self._frontend.embeddings(requests)

    async def score(
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
    ) -> ScoreOutput:
        """Score items after a query, each as if it were alone with it; see `LLM.score`."""
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
        job = await asyncio.to_thread(self._frontend.score_job, query, items, params)
        await self._read_to_end(job.requests)
        return job.output()

    async def _read_to_end(self, requests: Sequence[Request]) -> None:
        """Run requests to their end, without their updates; being cancelled ends them."""
        bridge = self._open()
        try:
            for bridged in [bridge.submit(request) for request in requests]:
                async for _ in bridged.stream:
                    pass
        finally:
            for request in requests:
                bridge.abort(request)

    def _open(self) -> AsyncioBridge:
        if self._bridge is None:
            raise InvalidRequestError("this AsyncLLM is closed.", hint="Make a new one.")
        if os.getpid() != self._pid:  # a fork has no engine thread: no call would end
            raise InvalidRequestError(
                "this AsyncLLM belongs to the process that forked.", hint="Make a new one."
            )
        return self._bridge

    async def _prompt_ids(self, prompt: Prompt, *, parse_special: bool) -> list[int]:
        size = len(prompt) if isinstance(prompt, str) else 0
        return await _off_loop(
            size, lambda: self._inputs.prompt_ids(prompt, parse_special=parse_special)
        )

    async def _run(
        self,
        prompt_ids: Sequence[list[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        completions = self._frontend.make_completions(prompt_ids, params)
        await self._read_all(completions, lambda _: None)
        return collect_outputs(texts, completions)

    async def _stream(
        self,
        ids: list[int],
        params: SamplingParams,
        progress: Callable[[int, int], None] | None,
    ) -> AsyncGenerator[StreamDelta]:
        completions = self._frontend.make_completions([ids], [params])
        ready: asyncio.Queue[StreamDelta | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_all(completions, ready.put_nowait, progress))
        reading.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (delta := await ready.get()) is not None:
                yield delta
            await reading
        finally:
            reading.cancel()

    async def _read_all(
        self,
        completions: Sequence[Completion],
        take: Callable[[StreamDelta], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run requests to their end; being cancelled ends them."""
        bridge = self._open()
        start_s = perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            for completion in completions:
                request = completion.request
                if request.grammar is not None:
                    await asyncio.to_thread(self._frontend.set_matcher, request)
            streams = [bridge.submit(completion.request).stream for completion in completions]
            if progress is not None:  # all completions have one prompt
                num_tokens = len(completions[0].request.prompt_token_ids)
                streams[0].on_progress = lambda computed: progress(computed, num_tokens)
            for completion, stream in zip(completions, streams, strict=True):
                tasks.append(asyncio.create_task(_read(bridge, completion, stream, start_s, take)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # after a failure, the other tasks would wait for ever
            for completion in completions:
                bridge.abort(completion.request)


async def _read(
    bridge: AsyncioBridge,
    completion: Completion,
    stream: TokenStream,
    start_s: float,
    take: Callable[[StreamDelta], None],
) -> None:
    """Read one completion to its end, or to its stop string."""
    async for update in stream:
        new_text = completion.text.push(update.new_token_ids)
        if completion.text.matched is not None:
            bridge.stop(completion.request, completion.text.matched)
        completion.note_time(perf_counter() - start_s, has_tokens=bool(update.new_token_ids))
        take(completion.delta(new_text, update.new_token_ids))


async def _off_loop(size: int, function: Callable[[], T]) -> T:
    """Call a function, in a thread if there is much to do."""
    return function() if size <= INLINE_CHARS else await asyncio.to_thread(function)


def _end(loop: EngineLoop, thread: threading.Thread, end_ranks: Callable[[], None]) -> None:
    loop.shutdown()
    if thread is not threading.current_thread():  # the last reference may end on any thread
        thread.join()
    end_ranks()
