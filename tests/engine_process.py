"""Engine processes on the tiny model, for tests of the client and its supervisor."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from time import perf_counter

from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA, greedy
from tiercel.config import LoadOptions
from tiercel.ipc.client import EngineClient
from tiercel.ipc.supervisor import EngineState, SupervisorSettings
from tiercel.ipc.tokenizer_wire import unpack_tokenizer
from tiercel.request.inputs import InputProcessor

# The tiny model gains nothing from a second thread, and loses much where others use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine may keep an engine from its steps for long; tests of the watchdog set a heartbeat.
QUICK = SupervisorSettings(first_delay_s=0.05, heartbeat_s=4 * PATIENCE_S, exit_grace_s=2.0)


def make_client(model=LLAMA, *, max_waiting=512, settings=QUICK, **options):
    merged = {"device": "cpu", "dtype": "float32", **options}
    loaded = LoadOptions(model=None if model is None else str(model), **merged)
    return EngineClient(loaded, max_waiting=max_waiting, settings=settings)


async def open_client(model=LLAMA, **options):
    client = make_client(model, **options)
    await client.start()
    await client.wait_ready()
    return client


class Maker:
    """Makes requests for the model of a client."""

    def __init__(self, info):
        self.tokenizer = unpack_tokenizer(info.tokenizer)
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=info.vocab_size,
            max_position=info.max_position,
            max_model_len=info.max_model_len,
            seed=info.seed,
        )

    def __call__(self, prompt="the thin man", params=None, *, stream=0):
        if not isinstance(prompt, str):
            prompt = {"prompt_token_ids": prompt}
        ids = self.inputs.prompt_ids(prompt, parse_special=True)
        return self.inputs.request(ids, params or greedy(), stream)


async def read(stream):
    """All updates of a stream."""
    return [update async for update in stream]


def read_now(stream):
    """All updates of a stream that has ended: nothing more of it is waited for."""
    try:
        read(stream).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the stream has not ended")


@contextlib.contextmanager
def halted(pid):
    """What is sent to a process meanwhile comes together, however slow the sender is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def wait_until(condition, seconds=PATIENCE_S):
    deadline = perf_counter() + seconds
    while not condition():
        assert perf_counter() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def wait_idle(client, make):
    """Wait until the engine says that nothing is in it and every block is free.

    Earlier messages are handled when a last request is; only a later message counts.
    """
    before = client.stats
    await read(client.submit(make("a", greedy(1))))
    await wait_until(
        lambda: (
            client.stats.num_steps > before.num_steps
            and client.stats.num_running == client.stats.num_waiting == 0
        )
    )
    assert client.stats.kv_cache_usage == 0.0


async def wait_restarted(client, num_restarts):
    await wait_until(
        lambda: client.num_restarts == num_restarts and client.state is EngineState.READY
    )


def is_alive(pid):
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descriptors():
    return len(os.listdir("/proc/self/fd"))
