"""Monitors the engine: makes the served model when the engine is ready, and reports throughput."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Final

import msgspec

from tiercel import env
from tiercel.errors import TiercelError
from tiercel.grammar.matcher import read_token_table
from tiercel.ipc.client import EngineClient
from tiercel.ipc.messages import EngineInfo
from tiercel.ipc.supervisor import EngineState
from tiercel.ipc.tokenizer_wire import unpack_tokenizer
from tiercel.loader.hub import CATALOGUE
from tiercel.params import SamplingDefaults
from tiercel.request.inputs import InputProcessor
from tiercel.serve.grammar_check import GrammarChecker
from tiercel.serve.http.object_fields import created_now
from tiercel.serve.lifecycle.throughput import Throughput
from tiercel.serve.lifecycle.warmup import MakeApp, warm_up
from tiercel.serve.served_model import ServedModel
from tiercel.serve.settings import ServeSettings
from tiercel.serve.state import ServerState
from tiercel.text.chat_template import ChatTemplate
from tiercel.text.tokenizer import Tokenizer

_LOG: Final = logging.getLogger("tiercel.serve")
_TICK_SECONDS: Final = 1.0
_REPORT_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Engine:
    """One engine that accepts requests.

    Attributes:
        client: client of it.
        throughput: reader of its counters.
        info: description of the process that was ready last.
        num_restarts: number of restarts that were noticed.
    """

    client: EngineClient
    throughput: Throughput
    info: EngineInfo | None
    num_restarts: int


class EngineMonitor:
    """Monitor of the engines, with two tasks: one waits for them, one reports."""

    def __init__(
        self,
        state: ServerState,
        make_app: MakeApp,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Set up.

        Args:
            state: state of the server.
            make_app: makes the routes of another state, for warm-up requests.
            clock: clock in seconds, for rates.
        """
        self._state = state
        self._make_app = make_app
        self._clock = clock
        self._startup = state.startup
        self._engines: list[_Engine] = []  # none until requests are accepted
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks."""
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._report())]

    async def stop(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, TiercelError):
                await task
        self._startup.end()

    async def _follow(self) -> None:
        """Serve the model until the engine ends; the state holds the reason."""
        try:
            await self._serve_model()
        except Exception as error:
            self._state.failure = error
            raise
        finally:
            self._state.is_over = True

    async def _serve_model(self) -> None:
        state = self._state
        # All take the same time; the stages of one tell how far they are.
        state.client.replicas[0].on_progress = self._startup.on_progress
        await state.client.start()
        info = await state.client.wait_ready()
        model = await state.run_in_thread(make_model, state, info)
        if state.settings.warms_up:
            await warm_up(state, model, self._make_app, self._startup.on_warmup)
        for number, client in enumerate(state.client.replicas):
            client.on_stats = partial(state.metrics.take_stats, engine=number)
            state.metrics.set_model(model.name, client.info or info, number)
            throughput = Throughput(self._clock())
            self._engines.append(_Engine(client, throughput, client.info, client.num_restarts))
        state.model = model
        self._startup.end()
        _log_ready(
            model,
            state.settings.url,
            needs_key=bool(state.settings.access.key_digests),
        )
        await state.client.wait_ended()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._renew()
            for number, engine in enumerate(self._engines):
                self._log_throughput(number, engine)

    def _renew(self) -> None:
        """Take over the description of a restarted engine: its cache may have another size."""
        state, model = self._state, self._state.model
        for number, engine in enumerate(self._engines):
            client, info = engine.client, engine.client.info
            if client.num_restarts != engine.num_restarts:
                engine.num_restarts = client.num_restarts
                state.metrics.forget_engine(number)
                engine.throughput.forget_engine()
            if model is None or info is None or client.state is not EngineState.READY:
                continue
            if info is not engine.info:
                engine.info = info
                state.metrics.set_model(model.name, info, number)
                self._startup.end()
                _LOG.info("%s is ready again", self._name(number) or "the engine")
        smallest = state.client.info
        if model is None or smallest is None or state.client.state is not EngineState.READY:
            return
        if smallest is not model.info:
            state.model = replace(model, info=smallest)

    def _name(self, number: int) -> str:
        """The name of an engine in the log if there are several."""
        return f"engine {number}" if len(self._engines) > 1 else ""

    def _log_throughput(self, number: int, engine: _Engine) -> None:
        client = engine.client
        rates = engine.throughput.take(client.stats, self._clock(), _REPORT_SECONDS)
        if rates is not None:
            fields: dict[str, object] = {"engine": number} if len(self._engines) > 1 else {}
            fields |= {
                "prompt_tokens_per_s": rates.prompt,
                "generation_tokens_per_s": rates.generation,
                "running": client.num_running,
                "waiting": client.num_waiting,
                "kv_cache_percent": client.stats.kv_cache_usage * 100,
            }
            _LOG.info("throughput", extra={"fields": fields})


def default_names(file_name: str) -> tuple[str, ...]:
    """Default names of a model: the catalogue's, the file name without and with its extension."""
    stem = file_name.removesuffix(".gguf")
    listed = [entry.name for entry in CATALOGUE if entry.member.endswith(f"/{file_name}")]
    return tuple(dict.fromkeys((*listed, stem, file_name)))


def make_model(state: ServerState, info: EngineInfo) -> ServedModel:
    """Build tokenizer and template; takes up to a second.

    Raises:
        ModelFormatError: the chat template has a syntax error.
    """
    tokenizer = unpack_tokenizer(info.tokenizer, env.cache_dir() / "tokenizers")
    template = ChatTemplate.from_tokenizer(
        tokenizer, source=info.chat_template, worker=state.template_workers, name=info.model_name
    )
    if template is not None:
        template.check()
    return ServedModel(
        names=state.settings.served_names or default_names(info.model_name),
        info=info,
        tokenizer=tokenizer,
        template=template,
        inputs=InputProcessor(
            tokenizer,
            vocab_size=info.vocab_size,
            max_position=info.max_position,
            max_model_len=info.max_model_len,
            seed=info.seed,
        ),
        grammars=make_checker(state, tokenizer, info.vocab_size),
        sampling=_defaults(state.settings, info),
        created=created_now(),
        num_engines=len(state.client.replicas),
    )


def _defaults(settings: ServeSettings, info: EngineInfo) -> SamplingDefaults:
    """Sampling defaults; options of the server override the model's file."""
    if not settings.has_model_defaults:
        return settings.sampling
    return settings.sampling.over(info.sampling_defaults)


def make_checker(
    state: ServerState, tokenizer: Tokenizer, vocab_size: int
) -> GrammarChecker | None:
    """The checker of grammars for a model; None for a model without text or an end token."""
    if not tokenizer.has_text or not tokenizer.stop_ids:
        return None
    checker = GrammarChecker(
        read_token_table(tokenizer, vocab_size),
        seconds=state.settings.limits.max_grammar_seconds,
        max_wait_s=state.settings.limits.max_queue_seconds,
    )
    if state.settings.has_warm_workers:
        checker.start()
    return checker


def _log_ready(model: ServedModel, url: str, *, needs_key: bool) -> None:
    fields = {
        "url": url,
        "model": model.name,
        "context_tokens": model.info.max_model_len,
        "kv_cache_tokens": model.info.capacity_tokens,
        "device": model.info.device,
    }
    if model.info.tensor_parallel_size > 1:
        fields["ranks"] = model.info.tensor_parallel_size
    if model.num_engines > 1:
        fields["engines"] = model.num_engines
    _LOG.info("ready", extra={"fields": fields})
    key = " -H 'authorization: Bearer '$TIERCEL_API_KEY" if needs_key else ""
    path = "chat/completions"
    question: dict[str, object] = {
        "model": model.name,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    if not model.tokenizer.has_text:
        path, question = "completions", {"model": model.name, "prompt": [1, 2, 3]}
    _LOG.info(
        "try: curl %s/v1/%s%s -H 'content-type: application/json' -d %s",
        url,
        path,
        key,
        shlex.quote(msgspec.json.encode(question).decode()),
    )
