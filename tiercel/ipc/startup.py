"""The start-up of an engine process: load a model, rehearse, report that it is ready.

The warm-up runs an engine's steps; the Python code between the socket and the steps then still runs
for the first time: decoders of messages, the loop, the encoders of updates. So some requests come
in as frames, through a session of their own whose messages are dropped. The rehearsal is part of
each engine process, also of one that replaces a process that died, when the server itself
(`serve/lifecycle/warmup.py`) has long answered others.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Final

import msgspec

from tiercel.config import LoadOptions
from tiercel.engine.load import LoadedModel, Report
from tiercel.engine.options import dtype_name
from tiercel.engine.peers import OnFailure
from tiercel.ipc.knock import Listener
from tiercel.ipc.load import load_ranks
from tiercel.ipc.messages import (
    LENGTH_BYTES,
    EngineInfo,
    FromEngine,
    NewRequest,
    Outputs,
    Ready,
    Refused,
    decode_to_engine,
    encode,
    plain_text,
)
from tiercel.ipc.session import EngineSession, Send
from tiercel.ipc.tokenizer_wire import pack_tokenizer
from tiercel.models.source import ModelSource
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.request.score_params import ScoreParams

# On a GPU, whose steps are short, the interpreter's adaptive specialisation counts too.
ROUNDS: Final = {"cpu": 1, "cuda": 4}
_PROMPT_TOKENS: Final = 100
_NUM_NEW: Final = 3  # tokens


def start_session(
    source: ModelSource,
    options: LoadOptions,
    report: Report,
    send: Send,
    on_failure: OnFailure | None = None,
    listener: Listener | None = None,
) -> EngineSession:
    """Load a model, start its session, and report that it is ready.

    Args:
        source: the checked file.
        options: options of the load.
        report: called with the progress.
        send: sends messages to the client.
        on_failure: called when another rank has failed.
        listener: see `load_ranks`.

    Raises:
        TiercelError: see `load_ranks`.
    """
    started_s = perf_counter()
    options = msgspec.structs.replace(options, warm_up=True, timed_steps=True)
    loaded = load_ranks(source, options, report, on_failure, listener)
    loaded.matchers.prepare()
    if not options.enable_fault_injection:  # faults count steps from the first on
        rehearse(loaded, report)
    session = EngineSession(loaded, send)
    send(Ready(describe(loaded, perf_counter() - started_s)))
    return session


def rehearse(loaded: LoadedModel, report: Report) -> None:
    """Run some requests one after the other; nothing of them is kept or counted.

    Args:
        loaded: a model with nothing to do.
        report: called with the number of requests that are done.
    """
    requests = list(_requests(loaded))
    frames = [encode(NewRequest.of(key, request)) for key, request in enumerate(requests, 1)]
    frames.reverse()

    def hand_over() -> None:
        report("Rehearsing", len(requests) - len(frames), len(requests))
        frame = frames.pop() if frames else None
        if frame is None:
            session.loop.shutdown()
        else:
            session.handle(decode_to_engine(frame[LENGTH_BYTES:]))

    def take(message: FromEngine) -> None:
        encode(message)
        has_ended = isinstance(message, Outputs) and any(d.finish_reason for d in message.deltas)
        if has_ended or isinstance(message, Refused):
            hand_over()

    session = EngineSession(loaded, take)
    hand_over()
    session.loop.run()
    loaded.engine.forget()


def _requests(loaded: LoadedModel) -> Iterator[Request]:
    """The requests of answers and scores; each round has another prompt."""
    inputs = loaded.inputs()
    scores = loaded.score_inputs(inputs)
    most = min(loaded.config.max_model_len, loaded.engine.scheduler.capacity)
    length = min(_PROMPT_TOKENS, most - _NUM_NEW)
    if length < 1:
        return
    for number in range(ROUNDS[loaded.config.device.type]):
        prompt = [number] * length
        for logprobs in (None, 1):
            params = SamplingParams(max_tokens=_NUM_NEW, ignore_eos=True, logprobs=logprobs)
            yield inputs.request(prompt, params, 0)
        job = scores.job(prompt, [[0], [1]], ScoreParams(label_token_ids=[0, 1]))
        yield from job.requests


def describe(loaded: LoadedModel, load_seconds: float) -> EngineInfo:
    """Describe a loaded model to another process."""
    source, config = loaded.source, loaded.config
    template = source.chat_template
    return EngineInfo(
        model_name=plain_text(source.path.name),
        architecture=source.family.name,
        file_format=source.format,
        vocab_size=source.config.vocab_size,
        hidden_size=source.config.hidden_size,
        max_position=source.config.max_position,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs * config.num_schedulers,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=loaded.engine.scheduler.num_blocks,
        device=str(config.device),
        dtype=dtype_name(config.dtype),
        seed=config.seed,
        spec=config.spec.method,
        num_spec_tokens=config.spec.max_drafts,
        has_prefix_cache=config.prefix_cache,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tokenizer=pack_tokenizer(source),
        chat_template=None if template is None else plain_text(template),
        pooling=source.pooling,
        sampling_defaults=source.sampling_defaults,
        load_seconds=load_seconds,
        packs_items=config.packs_items,
        tensor_parallel_size=config.tensor_parallel_size,
    )
