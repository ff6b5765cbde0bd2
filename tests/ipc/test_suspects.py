"""Requests that were in the last step of one engine that died, and of another one."""

import asyncio
import logging
import os
import random
import signal
from dataclasses import replace

import pytest

from tests.engine_process import Maker, open_client, read, wait_restarted
from tests.patience import PATIENCE_S
from tests.tiny_llm import greedy
from tiercel.errors import EngineDeadError, EngineDiedTwiceError
from tiercel.ipc.suspects import Suspects, content_digest
from tiercel.params import SamplingParams
from tiercel.request.request import Request


def make(number=0, **changes):
    made = {"request_id": f"req_{random.random()}", "prompt_token_ids": [number, 2], "seed": 1,
            "params": SamplingParams(), "stream": 0, "stop_ids": frozenset({5, 70, 900}),
            "max_tokens": 9}  # fmt: skip
    return Request(**made | changes)


def test_content_names_a_request():
    assert content_digest(make()) == content_digest(make(seed=2, client="other"))
    others = [
        make(1),
        make(stream=1),
        make(params=SamplingParams(temperature=0.5)),
        make(max_tokens=8),
        make(stop_ids=frozenset({5})),
        make(pooling="mean"),
    ]
    digests = {content_digest(request) for request in [make(), *others]}
    assert len(digests) == 7


def test_the_second_death_within_the_window_counts():
    suspects = Suspects(600.0)
    assert suspects.note_death([make(0), make(1)], 0.0) == []
    second = [make(1), make(2)]
    assert suspects.note_death(second, 600.0) == second[:1]
    assert suspects.note_death([make(0)], 601.0) == [], "too long ago"
    assert len(suspects.note_death([make(1)], 900.0)) == 1


def test_an_answer_acquits():
    suspects = Suspects(600.0)
    suspects.note_answer(make(0))
    suspects.note_death([make(0), make(1)], 0.0)
    suspects.note_answer(make(0))
    found = suspects.note_death([make(0), make(1)], 1.0)
    assert [request.prompt_token_ids[0] for request in found] == [1]


@pytest.mark.reliability
def test_a_request_of_two_deaths_gets_a_final_error_and_the_others_do_not(caplog):
    async def main():
        client = await open_client(max_num_seqs=2)
        maker = Maker(client.info)
        ended = []
        for death in range(2):
            # Two run, and the third waits; the second is another one each time.
            prompts = ("the thin man", f"b{death}", "c")
            streams = []
            for number, prompt in enumerate(prompts):
                request = maker(prompt, replace(greedy(1500), seed=None))
                request.request_id = f"req_{death}{number}"
                streams.append(client.submit(request))
            for stream in streams[:2]:
                await anext(stream)
            os.kill(client.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises((EngineDeadError, EngineDiedTwiceError)) as caught:
                    await asyncio.wait_for(read(stream), PATIENCE_S)
                ended.append(type(caught.value))
            await wait_restarted(client, death + 1)
        await client.close()
        return ended

    with caplog.at_level(logging.ERROR):
        ended = asyncio.run(main())
    assert ended == [EngineDeadError] * 3 + [EngineDiedTwiceError] + [EngineDeadError] * 2
    lines = [r.getMessage() for r in caplog.records if "last step" in r.getMessage()]
    assert lines == [
        "requests of the engine's last step: req_00, req_01",
        "requests of the engine's last step: req_10, req_11",
        "of these, seen in the last step of another engine: req_10",
    ]
