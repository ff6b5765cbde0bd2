"""Whether another engine process would end as the last one did."""

import pytest

from tiercel.errors import ModelFormatError
from tiercel.ipc.deaths import Deaths
from tiercel.ipc.messages import ErrorInfo
from tiercel.ipc.siblings import OpenedFiles
from tiercel.loader.stamps import read_stamp

KILLED = ErrorInfo("EngineDeadError", "it was ended by signal SIGKILL")
BROKEN = ErrorInfo("InternalError", "RuntimeError: x")


def end(deaths, cause, *, is_ready=False):
    """One process from its start to its death."""
    deaths.note_start()
    if is_ready:
        deaths.note_ready()
    deaths.note_loss()
    deaths.note_cause(cause)
    return deaths.is_hopeless


def test_two_in_a_row_that_end_alike_before_they_are_ready_are_enough():
    for failed in (KILLED, BROKEN):
        deaths = Deaths(OpenedFiles())
        assert [end(deaths, failed), end(deaths, failed)] == [False, True]


def test_a_death_after_ready_and_another_cause_do_not_count():
    deaths = Deaths(OpenedFiles())
    assert not end(deaths, KILLED)
    assert not end(deaths, BROKEN), "another cause"
    assert not end(deaths, KILLED)
    assert not end(deaths, KILLED, is_ready=True), "it was ready"
    assert not end(deaths, KILLED), "the one before was ready"
    assert end(deaths, KILLED)
    assert deaths.failure == "it was ended by signal SIGKILL"


@pytest.mark.parametrize("was_ready", [False, True])
@pytest.mark.parametrize(
    ("kind", "is_about_the_model"),
    [("ModelFormatError", True), ("OutOfMemoryError", True), ("InternalError", False),
     ("EngineDeadError", False), ("ValueError", False)],
)  # fmt: skip
def test_an_error_of_the_model_is_final_until_an_engine_was_ready(
    kind, is_about_the_model, was_ready
):
    deaths = Deaths(OpenedFiles())
    assert deaths.load_error() is None
    if was_ready:
        end(deaths, KILLED, is_ready=True)
    is_hopeless = end(deaths, ErrorInfo(kind, "why"))
    assert is_hopeless == (is_about_the_model and not was_ready)
    assert (deaths.load_error() is not None) == is_hopeless
    if kind == "ModelFormatError" and not was_ready:
        assert type(deaths.load_error()) is ModelFormatError
    assert deaths.failure == "why"


def test_a_file_that_changed_is_final(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"abc")
    stamp = read_stamp(path)
    deaths = Deaths(OpenedFiles())
    assert deaths.note_files((stamp,))
    assert deaths.note_files((read_stamp(path),))
    deaths.note_ready()
    path.write_bytes(b"a")
    assert not deaths.note_files((read_stamp(path),))
    deaths.note_loss()
    assert deaths.is_hopeless, "known before the exit status is"
    words = "m.gguf changed since the start: it had 3 bytes and has 1 now."
    assert words in str(deaths.final_error())
    deaths.note_cause(KILLED)
    assert deaths.failure.startswith(f"it was ended by signal SIGKILL, and {words}")
    assert str(tmp_path) not in deaths.failure


@pytest.mark.parametrize("failed", [KILLED, BROKEN])
def test_clients_are_told_causes_of_ours_alone(failed):
    deaths = Deaths(OpenedFiles())
    end(deaths, failed)
    error = deaths.final_error()
    told = "it was ended by signal SIGKILL." if failed is KILLED else "the log of the server says"
    assert told in str(error)
    assert "RuntimeError" not in str(error)
    assert (error.code, error.http_status, error.is_final) == ("engine_dead", 503, True)
    assert error.retry_after_s is None
    deaths.note_loss()
    assert "the log of the server says why." in str(deaths.final_error()), "not the one before"
