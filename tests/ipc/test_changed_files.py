"""A model whose files change while an engine serves it."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal

import pytest

from tests.engine_process import (
    QUICK,
    Maker,
    is_alive,
    make_client,
    read,
    wait_restarted,
    wait_until,
)
from tests.patience import PATIENCE_S
from tests.tiny_llm import DATA, LLAMA, greedy
from tiercel.errors import EngineDeadError
from tiercel.ipc.supervisor import EngineState

pytestmark = pytest.mark.reliability


def truncate(path):
    os.truncate(path, 1000)


def replace(path):
    """By another valid model."""
    other = path.with_name("other.gguf")
    shutil.copy(DATA / "qwen3-tiny.gguf", other)
    other.replace(path)


def delete(path):
    path.unlink()


@contextlib.asynccontextmanager
async def serving(path):
    client = make_client(path, settings=QUICK)
    await client.start()
    await client.wait_ready()
    try:
        yield client, client.submit(Maker(client.info)("a", greedy(1500)))
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate, "it had 161888 bytes and has 1000 now"),
        pytest.param(replace, "it had 161888 bytes and has ", marks=pytest.mark.slow),
        (delete, "it was removed"),
    ],
)
def test_no_engine_is_started_on_a_changed_file(change, words, tmp_path, caplog):
    path = tmp_path / "m.gguf"
    shutil.copy(LLAMA, path)

    async def main():
        async with serving(path) as (client, stream):
            await anext(stream)
            change(path)
            os.kill(client.pid, signal.SIGBUS)  # as the kernel does under a truncated mapping
            with pytest.raises(EngineDeadError, match=f"m.gguf changed since the start: {words}"):
                await asyncio.wait_for(read(stream), PATIENCE_S)
            assert stream.request.stop_reason == "engine_dead"
            await asyncio.wait_for(client.wait_ended(), PATIENCE_S)
            assert client.state is EngineState.DEAD
            assert client.num_restarts == 0
            with pytest.raises(EngineDeadError, match=r"m\.gguf changed") as caught:
                client.check_room()
            assert caught.value.is_final

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    lines = [r.getMessage() for r in caplog.records if "m.gguf" in r.getMessage()]
    begins = "the engine is given up after 0 restarts: it was ended by signal SIGBUS, and m.gguf"
    assert len(lines) == 1
    assert lines[0].startswith(begins)
    assert "Traceback" not in caplog.text
    assert str(tmp_path) not in caplog.text


def test_a_file_that_came_back_is_served_again(tmp_path):
    path = tmp_path / "m.gguf"
    shutil.copy(LLAMA, path)

    async def main():
        async with serving(path) as (client, stream):
            path.rename(tmp_path / "elsewhere")
            await anext(stream)
            (tmp_path / "elsewhere").rename(path)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="under way"):
                await asyncio.wait_for(read(stream), PATIENCE_S)
            await wait_restarted(client, 1)

    asyncio.run(main())


def test_a_file_that_changes_just_before_the_next_engine_opens_it(tmp_path):
    """What the check at the death cannot see."""
    path = tmp_path / "m.gguf"
    shutil.copy(LLAMA, path)

    async def main():
        async with serving(path) as (client, _stream):
            old = client.pid
            os.kill(old, signal.SIGKILL)
            await wait_until(lambda: client.state is EngineState.RESTARTING)
            replace(path)
            await asyncio.wait_for(client.wait_ended(), PATIENCE_S)
            assert client.state is EngineState.DEAD
            assert client.num_restarts == 1
            assert "m.gguf changed since the start" in client.failure
            assert not is_alive(old)

    asyncio.run(main())
