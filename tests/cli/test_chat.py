"""`tiercel chat`: the conversation's state, its commands, pipes, and Ctrl-C on a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import COMMAND, environment, tiercel
from tiercel.cli import chat as chat_module
from tiercel.cli import conversation as conversation_module
from tiercel.cli import terminal
from tiercel.cli.conversation import Conversation, load_messages
from tiercel.cli.main import run
from tiercel.errors import ArgumentError, ContextLengthError
from tiercel.params import SamplingParams


@pytest.fixture
def conversation(fake_llm):
    return Conversation(fake_llm(), SamplingParams(max_tokens=None, seed=3), [])


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def test_history_is_sent_with_each_message(conversation, fake_llm, capsys):
    for text in ("one", "two"):
        assert conversation.take(text)
    assert capsys.readouterr().out == " ONE\n TWO\n"
    sent = [call[1] for call in fake_llm.calls if call[0] == "stream_chat"]
    assert [len(messages) for messages in sent] == [1, 3]
    assert sent[1][1] == {"role": "assistant", "content": " ONE"}


def test_a_long_conversation_shows_its_progress(conversation, fake_llm, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_PROMPT_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(fake_llm, "prompt_steps", ((35, 100), (70, 100)))
    conversation.take("one")
    assert capsys.readouterr() == (" ONE\n", "")  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    conversation.take("two")
    captured = capsys.readouterr()
    assert captured.out == " TWO\n"
    text = "reading prompt, 70%"
    assert captured.err == f"\rreading prompt, 35%\r{text}\r{' ' * len(text)}\r"


def test_system_message(conversation, capsys):
    conversation.take("/system be brief")
    conversation.take("hi")
    conversation.take("/system be kind")
    assert conversation.messages[0] == {"role": "system", "content": "be kind"}
    assert roles(conversation) == ["system", "user", "assistant"]
    conversation.take("/system")
    assert "be kind" in capsys.readouterr().err
    conversation.take("/reset")
    assert roles(conversation) == ["system"]


def test_commands_and_empty_lines_are_not_messages(conversation, capsys):
    for text in ("", "   ", "/help", "/stats", "/hlep"):
        assert conversation.take(text)
    error = capsys.readouterr().err
    assert "/regen" in error
    assert "error: /hlep: no such command. Did you mean /help?" in error
    assert conversation.messages == []
    assert not conversation.take("/quit")
    conversation.take("//etc is a folder")
    assert conversation.messages[0]["content"] == "/etc is a folder"


def test_regenerate_draws_anew(conversation, fake_llm):
    with pytest.raises(ArgumentError, match="no answer yet"):
        conversation.take("/regen")
    conversation.take("one")
    conversation.take("/regen")
    conversation.take("/regen")
    conversation.take("two")
    assert roles(conversation) == ["user", "assistant"] * 2
    seeds = [call[2].seed for call in fake_llm.calls if call[0] == "stream_chat"]
    assert seeds == [3, 4, 5, 3]


def test_a_message_that_fails_is_not_kept(conversation):
    conversation.take("one")
    with pytest.raises(ContextLengthError):
        conversation.take("x" * 1001)
    assert [message["content"] for message in conversation.messages] == ["one", " ONE"]


def test_interrupt_keeps_what_has_come(conversation, fake_llm, monkeypatch, capsys):
    def interrupt(index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(fake_llm, "on_token", staticmethod(interrupt))
    assert conversation.take("one two three four")
    assert conversation.messages[-1]["content"] == " ONE TWO"
    assert conversation.stats.is_stopped
    assert fake_llm.calls[-1] == ("stream ended",)
    assert "(stopped)" in capsys.readouterr().err
    conversation.take("/stats")
    assert "2 tokens, stopped" in capsys.readouterr().err


def test_save_and_load(conversation, tmp_path):
    conversation.take("/system brief")
    conversation.take("grüße\nzwei")
    path = tmp_path / "talk.json"
    conversation.take(f"/save {path}")
    before = list(conversation.messages)
    conversation.take("/reset")
    conversation.take(f"/load {path}")
    assert conversation.messages == before == load_messages(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"messages": 1}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "root", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
        '{"messages": ' + "[" * 100_000,
        "\udcff",
    ],
)
def test_damaged_conversations_are_refused(tmp_path, content):
    path = tmp_path / "talk.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match=r"talk\.json"):
        load_messages(path)


def test_lines_of_a_pipe_are_messages(fake_llm, tiny, stdin, capsys, tmp_path):
    stdin("one\n\n/reset\ntwo\n/quit\nthree\n")
    path = tmp_path / "talk.json"
    assert run(["chat", str(tiny), "--system", "s", "--save", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == " ONE\n TWO\n"
    saved = json.loads(path.read_text())["messages"]
    assert [message["content"] for message in saved] == ["s", "two", " TWO"]
    stdin("three")
    assert run(["chat", str(tiny), "--load", str(path), "--save", str(path)]) == 0
    assert len(json.loads(path.read_text())["messages"]) == 5


def test_lines_of_a_pipe_may_end_as_on_windows(fake_llm, tiny, stdin, capsys):
    stdin("one\r\n/quit\r\ntwo\r\n")
    assert run(["chat", str(tiny)]) == 0
    assert capsys.readouterr().out == " ONE\n"
    assert fake_llm.calls[1][1][-1]["content"] == "one"


def test_text_that_is_no_utf8_is_told_by_its_place(conversation):
    with pytest.raises(ArgumentError, match="the message: character 2 is not valid UTF-8"):
        conversation.take("hi\udcff")
    with pytest.raises(ArgumentError, match="the system message: character 0 is not valid UTF-8"):
        conversation.set_system("\udcff")
    assert conversation.messages == []


def test_a_file_that_cannot_be_written_is_named_as_given(conversation, tmp_path):
    with pytest.raises(FileNotFoundError) as error_info:
        conversation.take(f"/save {tmp_path}/missing/talk.json")
    assert error_info.value.filename == f"{tmp_path}/missing/talk.json"


def test_a_conversation_without_end_is_refused():
    with pytest.raises(ArgumentError, match="/dev/zero: over 16777216 bytes"):
        load_messages(Path("/dev/zero"))


def test_an_error_in_a_pipe_ends_with_status_1(fake_llm, tiny, stdin, capsys):
    stdin("one\n" + "x" * 1001 + "\ntwo\n")
    assert run(["chat", str(tiny)]) == 1
    captured = capsys.readouterr()
    assert captured.out == " ONE\n"
    assert captured.err.splitlines()[-1].startswith("error: prompt has 1001 tokens.")


def test_pasted_and_continued_lines_are_one_message(monkeypatch):
    lines = iter(["first \\", "second", "third"])
    more = iter([True, False])
    monkeypatch.setattr("builtins.input", lambda _prompt="": next(lines))
    monkeypatch.setattr(chat_module, "_has_more_input", lambda: next(more))
    assert chat_module._read_message() == "first \nsecond\nthird"


def test_the_default_model_answers_in_a_pipe(default_model):
    process = tiercel(
        *["chat", "--max-tokens", "4", "--temperature", "0", "--quiet"], stdin="Say hello.\n/quit\n"
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert process.stdout.strip()


@pytest.mark.timeout(400)
def test_ctrl_c_on_a_terminal_stops_the_answer_only(default_model):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", str(default_model), "--max-tokens", "4000", "--temperature", "0"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(TERM="dumb"),
        start_new_session=True,
    )
    os.close(follower)
    shown = b""

    def read_until(text):
        nonlocal shown
        while text not in shown:
            shown += os.read(leader, 4096)
        shown = shown.split(text, 1)[1]

    def interrupt_until(text):
        """A signal between prompt and readline's wait is handled at the next key: send it again."""
        nonlocal shown
        while text not in shown:
            process.send_signal(signal.SIGINT)
            while text not in shown and select.select([leader], [], [], 2)[0]:
                shown += os.read(leader, 4096)
        read_until(text)

    try:
        read_until(b"> ")
        os.write(leader, b"Count from 1 to 10000, one number per line.\n")
        read_until(b"2")
        interrupt_until(b"(stopped)")
        read_until(b"> ")
        os.write(leader, b"/stats\n")
        read_until(b"stopped; first after")
        read_until(b"> ")
        interrupt_until(b"/quit ends")  # at the prompt it only prints a reminder
        os.write(leader, b"/quit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


class Clock:
    """A clock that tests set forward."""

    now_s = 10.0

    def perf_counter(self):
        return self.now_s


def test_figures_of_an_answer_are_those_of_its_tokens(conversation, fake_llm, monkeypatch, capsys):
    """The first token after 2 seconds, each later one after half a second."""
    clock = Clock()

    def tick(index):
        clock.now_s += 0.5 if index else 2.0

    monkeypatch.setattr(conversation_module, "time", clock)
    monkeypatch.setattr(fake_llm, "on_token", staticmethod(tick))
    for text, shown in (
        ("one", "1 tokens; first after 2.00 s; 2 messages"),
        ("one two three", "3 tokens; first after 2.00 s, then 2.0 tokens/s; 4 messages"),
    ):
        conversation.take(text)
        stats = conversation.stats
        count = len(text.split())
        assert (stats.num_tokens, stats.is_stopped) == (count, False)
        assert (stats.first_token_s, stats.total_s) == (2.0, 2.0 + 0.5 * (count - 1))
        capsys.readouterr()
        conversation.take("/stats")
        assert capsys.readouterr().err == f"{shown}\n"


def test_each_new_try_has_a_random_stream_of_its_own(conversation, fake_llm):
    """And the next message has the requested one."""
    for text in ("one", "/regen", "/regen", "two", "/regen"):
        conversation.take(text)
    seeds = [call[2].seed for call in fake_llm.calls if call[0] == "stream_chat"]
    assert seeds == [3, 4, 5, 3, 4]
    assert roles(conversation) == ["user", "assistant"] * 2
