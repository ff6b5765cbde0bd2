"""`LLM` with several ranks: the answers of one, and the end of all when one is lost."""

import contextlib
import errno
import gc
import os
import signal
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine_process import is_alive
from tests.gguf_files import tiny_model
from tests.patience import wait_for
from tests.tiny_llm import PROMPTS, greedy, ids_of, open_tiny
from tiercel.engine import load
from tiercel.errors import ArgumentError, EngineDeadError, RankLostError
from tiercel.ipc import lockstep, ranks
from tiercel.ipc.rank_messages import Agreed, Value
from tiercel.parallel import Group
from tiercel.params import SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("forked_engines")]


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose heads and widths 4 ranks can share."""
    return tiny_model(tmp_path_factory.mktemp("ranks") / "tiny.gguf", head_dim=32, context=2048)


def open_ranks(model, size=2, **options):
    return open_tiny(model, tensor_parallel_size=size, threads=1, **options)


def pids_of(llm):
    return llm._engine._ranks.pids


def answers(llm):
    """Answers of every kind, in a row: token ids, and values."""
    sampled = SamplingParams(max_tokens=30, seed=7, n=2, top_p=0.9, logprobs=1)
    form = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "minItems": 3})
    shaped = SamplingParams(max_tokens=30, seed=3, structured_outputs=form)
    stopped = greedy(40, stop=["e"])
    mixed = [greedy(90), sampled, shaped, stopped, greedy(5)]
    deltas = []
    for delta in llm.stream(PROMPTS[0], greedy(20)):
        deltas += delta.token_ids
        if len(deltas) > 7:
            break  # its request is aborted on every rank
    found = (
        ids_of(llm.generate(PROMPTS, mixed)),
        ids_of(llm.generate(PROMPTS * 2, greedy(70))),  # found in the prefix cache
        deltas,
    )
    scores = llm.score("the thin man", ["ran", "sat"], label_token_ids=[5, 6])
    return found, [llm.logits([3, 4, 5, 6]), scores.logprobs]


def test_ranks_answer_as_one_does(model):
    options = {"spec": "ngram", "max_num_batched_tokens": 32}
    with open_tiny(model, threads=1, **options) as alone:
        expected, expected_values = answers(alone)
    llm = open_ranks(model, **options)
    pids, peers = pids_of(llm), llm._engine._ranks
    found, values = answers(llm)
    assert found == expected
    for mine, alone in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(mine, alone, atol=2e-5)  # sums of parts are rounded otherwise
    assert len(pids) == 1
    wait_for(lambda: peers._others[0].num_steps == peers._num_steps)
    assert peers._num_steps >= lockstep.WORD_STEPS
    assert not peers._words._words, "those of both ranks were compared"
    llm.close()
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_four_ranks_answer_as_one_does(model):
    with open_tiny(model, threads=1) as alone:
        expected = ids_of(alone.generate(PROMPTS, greedy(90)))
    for _ in range(2):  # this process may meet others again
        with open_ranks(model, 4) as llm:
            assert ids_of(llm.generate(PROMPTS, greedy(90))) == expected
            assert len(pids_of(llm)) == 3


def assert_over(llm, pids, words):
    """Every call fails before a step of it, and no process is left."""
    llm._engine.runner.launch = lambda _: pytest.fail("a step was launched")
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=words):
            llm.generate("a", greedy(2))
    wait_for(lambda: not any(map(is_alive, pids)))
    llm.close()


def test_a_rank_that_is_killed_ends_the_call_under_way(model):
    llm = open_ranks(model)
    pids = pids_of(llm)
    stream = llm.stream("the thin man", greedy(1900))
    next(stream)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 was ended by signal SIGKILL"):
        deque(stream, maxlen=0)
    assert_over(llm, pids, "rank 1 was ended by signal SIGKILL")


@pytest.mark.parametrize(
    ("name", "changed"),
    [("__version__", "0.0"), ("describe_library", lambda threads: "another one")],
    ids=["version", "library"],
)
def test_a_rank_that_differs_is_named_before_it_loads(model, monkeypatch, name, changed):
    monkeypatch.setattr(load, name, changed)
    known = set(children())
    facts = {"__version__": "Tiercel: .*, not 0.0", "describe_library": "native library: "}
    with pytest.raises(
        ArgumentError, match=f"rank 1 differs from rank 0 in {facts[name]}"
    ) as caught:
        open_ranks(model)
    assert caught.value.hint.startswith("All ranks must run the same code")
    assert "\n" not in str(caught.value)
    wait_for(lambda: set(children()) <= known)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"device": "NVIDIA H100"}, "in device: NVIDIA H100, not NVIDIA H200"),
        ({"device": "NVIDIA H200", "m.gguf": "5 bytes"}, r"in m\.gguf: 5 bytes, not none"),
        ({}, "in device: none, not NVIDIA H200"),
    ],
    ids=["another kind of GPU", "another file", "an older rank"],
)
def test_what_differs_is_named_with_both_values(theirs, words, monkeypatch):
    peers = object.__new__(ranks.Ranks)
    peers._others = [SimpleNamespace(rank=1), SimpleNamespace(rank=2)]
    answers = {1: {"device": "NVIDIA H200"}, 2: theirs}
    monkeypatch.setattr(
        ranks.Ranks, "_answer", lambda self, other, what: Value(what, facts=answers[other.rank])
    )
    with pytest.raises(ArgumentError, match=f"rank 2 differs from rank 0 {words}"):
        peers.check({"device": "NVIDIA H200"})


def test_ranks_that_agree_go_on(monkeypatch):
    sent = []
    peers = object.__new__(ranks.Ranks)
    peers._others = [SimpleNamespace(rank=1)]
    monkeypatch.setattr(
        ranks.Ranks, "_answer", lambda self, other, what: Value(what, facts={"device": "cpu"})
    )
    monkeypatch.setattr(ranks.Ranks, "_send", lambda self, message: sent.append(message))
    peers.check({"device": "cpu"})
    assert sent == [Agreed("facts")]


def test_without_peer_access_nccl_adds_all_and_it_is_said(monkeypatch, caplog):
    group = Group(0, 2, object())
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "ones", lambda count, device: torch.full((count,), 1.0))
    monkeypatch.setattr(Group, "all_reduce", lambda self, x: 2 * x)
    monkeypatch.setattr(ranks, "connect", lambda *_: group)
    reason = "GPU 0 cannot access GPU 1 (rank 0)"
    monkeypatch.setattr(ranks, "make_small_all_reduce", lambda *_: reason)
    with caplog.at_level("INFO"):
        assert ranks.join_group(0, 2, device, "file:///x").small_sums is None
    assert f"NCCL adds small tensors too: {reason}." in caplog.text


def test_without_room_for_a_folder_ranks_do_not_start(model, monkeypatch):
    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    known = set(children())
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(EngineDeadError, match="ranks meet: No space left on device") as caught:
        open_ranks(model)
    assert "TMPDIR" in caught.value.hint
    assert set(children()) <= known


def test_a_process_has_one_model_on_several_ranks(model, monkeypatch):
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    with pytest.raises(ArgumentError, match="a model on several ranks already"):
        open_ranks(model)


def children():
    """Processes that this one has started and not reaped."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [pid for path in found for pid in path.read_text().split()]


@pytest.mark.usefixtures("own_processes")
def test_a_rank_that_is_killed_while_it_loads_ends_the_start(model):
    known = set(children())

    def kill():
        wait_for(lambda: set(children()) - known)
        (pid,) = set(children()) - known
        process = Path(f"/proc/{pid}")
        wait_for(lambda: b"tiercel.ipc" in (process / "cmdline").read_bytes())
        wait_for(lambda: "libtorch" in (process / "maps").read_text())  # it is about to load
        os.kill(int(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match="rank 1 was ended by signal SIGKILL"):
        open_ranks(model)
    killer.join()
    wait_for(lambda: set(children()) <= known)


def test_a_rank_that_hangs_ends_all(model, monkeypatch):
    llm = open_ranks(model)
    pids = pids_of(llm)
    os.kill(pids[0], signal.SIGSTOP)
    monkeypatch.setattr(ranks, "SILENT_S", 0.8)  # now: while it starts it may well be silent
    monkeypatch.setattr(ranks, "TICK_S", 0.1)
    with contextlib.suppress(EngineDeadError):  # where a step waits for it
        llm.generate("a", greedy(2))
    wait_for(lambda: llm._engine._ranks.failure is not None)
    assert_over(llm, pids, r"rank 1 hung for 0\.8 s")


def test_ranks_that_come_apart_are_ended(model, caplog):
    llm = open_ranks(model)
    pids = pids_of(llm)
    llm._engine._check_word._word += 1
    with contextlib.suppress(EngineDeadError):
        llm.generate("a", greedy(70))
    wait_for(lambda: llm._engine._ranks.failure is not None)
    assert str(llm._engine._ranks.failure).count("0x") == 2, "both words"
    assert_over(llm, pids, "rank 1 computed other tokens than rank 0")
    assert "its check word is 0x" in caplog.text


@pytest.mark.slow
def test_an_llm_that_is_dropped_leaves_no_process(model):
    pids = pids_of(open_ranks(model))
    gc.collect()
    assert not any(map(is_alive, pids))


def test_words_are_compared_when_the_last_is_in():
    words = ranks._Words(3)
    assert words.add(1, 64, 5) is None
    assert words.add(0, 128, 9) is None
    assert words.add(0, 64, 5) is None
    assert words.add(2, 64, 5) is None
    assert words.add(1, 128, 9) is None
    assert words.add(2, 128, 8).startswith("rank 2 computed other tokens than rank 0: after 128 ")
    assert not words._words


@pytest.mark.slow
def test_a_collective_that_fails_is_explained_by_the_rank_that_died(model, monkeypatch):
    """Rank 0 meets the consequence before the cause is noticed."""
    llm = open_ranks(model)
    pids = pids_of(llm)

    def fail(plan):
        os.kill(pids[0], signal.SIGKILL)
        raise RankLostError("rank 0 of 2 waited for the sum of (1, 2)")

    monkeypatch.setattr(llm._engine.runner, "launch", fail)
    with pytest.raises(EngineDeadError, match="rank 1 was ended by signal SIGKILL"):
        llm.generate("a", greedy(2))
    assert_over(llm, pids, "SIGKILL")
