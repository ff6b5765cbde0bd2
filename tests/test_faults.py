"""Fault injection is read exactly, and off unless it was enabled."""

import numpy as np
import pytest

from tests.tiny_llm import LLAMA, open_tiny
from tiercel import faults as faults_module
from tiercel.errors import ArgumentError, OutOfMemoryError
from tiercel.faults import Fault, Faults


def test_faults_are_off_by_default(monkeypatch):
    monkeypatch.setenv("TIERCEL_FAULTS", "nan:0@1")
    with pytest.raises(ArgumentError, match="not enabled"):
        open_tiny(LLAMA)
    assert Faults.parse("", is_enabled=False) == Faults()
    assert Faults.parse("", is_enabled=True) == Faults()


def test_a_fault_may_be_of_one_rank():
    text = "exit@3/1,sleep:2@4"
    assert Faults.parse(text, is_enabled=True).faults == (Fault("sleep", 2, 4),)
    assert Faults.parse(text, is_enabled=True, rank=1).faults == (
        Fault("exit", 0, 3),
        Fault("sleep", 2, 4),
    )


def test_each_kind_is_read():
    faults = Faults.parse(
        "nan:3@5, oom@1,sleep:0.5@2,sleep:7@start,exit@start,exit@999,slow:1.5@start,slow:2@3",
        is_enabled=True,
    )
    assert faults.faults == (
        Fault("nan", 3, 5),
        Fault("oom", 0, 1),
        Fault("sleep", 0.5, 2),
        Fault("sleep", 7, 0),
        Fault("exit", 0, 0),
        Fault("exit", 0, 999),
        Fault("slow", 1.5, 0),
        Fault("slow", 2, 3),
    )


@pytest.mark.parametrize(
    "text",
    [
        "nan", "nan@1", "nan:x@1", "nan:1.5@1", "nan:1@start", "nan:1@0", "oom:1@1", "oom@start",
        "exit", "exit:1@1", "exit@-1", "exit@0", "sleep@1", "sleep:-1@1", "sleep:1e9@1",
        "raise:1@1", "raise@start", "sleep:inf@1", "fire@1", ",", "exit@start,", "exit@1;exit@2",
        "exit@9999999999", "slow@1", "slow:-1@start", "slow:1@0",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ArgumentError, match="TIERCEL_FAULTS"):
        Faults.parse(text, is_enabled=True)


def test_a_fault_strikes_its_own_step_and_row_only():
    faults = Faults.parse("oom@2,nan:3@4", is_enabled=True)
    for step in (1, 3, 4):
        faults.before_step(step)
    with pytest.raises(OutOfMemoryError, match="step 2"):
        faults.before_step(2)
    with pytest.raises(RuntimeError, match="step 7"):
        Faults.parse("raise@7", is_enabled=True).before_step(7)
    logits = np.ones((3, 4), dtype=np.float32)
    for step in (2, 3, 5):
        faults.on_logits(step, logits, [0, 3, 1])
    faults.on_logits(4, logits, [0, 1, 2])
    assert np.isfinite(logits).all()
    faults.on_logits(4, logits, [0, 3, 1])
    assert np.isnan(logits).all(axis=1).tolist() == [False, True, False]


def test_a_slow_step_shows_that_it_advances(monkeypatch):
    slept, pulses = [], []
    monkeypatch.setattr(faults_module.time, "sleep", slept.append)
    faults = Faults.parse("slow:2@start,slow:10@3,sleep:5@2", is_enabled=True)
    for step, num_tokens, seconds in ((1, 100, 0.2), (2, 1, 0.002), (3, 100, 1.2), (9, 10, 0.12)):
        slept.clear()
        pulses.clear()
        faults.slow_down(step, num_tokens, lambda: pulses.append(len(slept)))
        assert sum(slept) == pytest.approx(seconds)
        assert max(slept) <= 0.05
        assert pulses == list(range(1, len(slept) + 1)), "a sign after each part"
    Faults().slow_down(1, 100, pytest.fail)
