"""`tiercel generate`: sources of the prompt, standard output and error, and real text."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.harness import COMMAND, environment, error_line, tiercel
from tests.gguf_files import tiny_model
from tests.tiny_llm import LLAMA
from tiercel.cli import terminal
from tiercel.cli.main import run
from tiercel.loader.hub import resolve
from tiercel.params import SamplingParams, StructuredOutputs


@pytest.fixture
def generate(fake_llm, tiny, capsys):
    """Runs the command with the fake model; returns its standard output."""

    def call(*arguments, status=0):
        assert run(["generate", "--model", str(tiny), *arguments]) == status
        captured = capsys.readouterr()
        if status == 0:
            assert captured.err == ""
        return captured.out if status == 0 else captured.err

    return call


def asked(fake_llm, kind="stream"):
    return next(call for call in fake_llm.calls if call[0] == kind)


def test_text_is_exact_without_a_terminal(generate):
    assert generate("one two") == " ONE TWO"


def test_echo(generate):
    assert generate("one two", "--echo") == "one two ONE TWO"


class Terminal(io.StringIO):
    """A standard stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("arguments", "is_shown"),
    [
        ((), True),
        (("--chat",), True),
        (("--n", "2"), True),
        (("--chat", "--logprobs", "1"), True),
        (("--quiet",), False),
    ],
    ids=["stream", "chat", "answers", "chat answers", "quiet"],
)
def test_a_long_prompt_shows_its_progress(fake_llm, tiny, monkeypatch, arguments, is_shown):
    monkeypatch.setattr(terminal, "_PROMPT_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(fake_llm, "prompt_steps", ((35, 100),))
    # One terminal: the line is erased before the answer is written.
    both = Terminal()
    monkeypatch.setattr(sys, "stderr", both)
    monkeypatch.setattr(sys, "stdout", both)
    assert run(["generate", "--model", str(tiny), "one", *arguments]) == 0
    shown, _, rest = both.getvalue().rpartition("\r")
    assert ("reading prompt, 35%" in shown) == is_shown
    assert "ONE" not in shown
    assert "ONE" in rest


def test_an_echo_on_the_terminal_is_not_overwritten(fake_llm, tiny, monkeypatch):
    monkeypatch.setattr(terminal, "_PROMPT_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(fake_llm, "prompt_steps", ((35, 100),))
    both = Terminal()
    monkeypatch.setattr(sys, "stderr", both)
    monkeypatch.setattr(sys, "stdout", both)
    assert run(["generate", "--model", str(tiny), "one", "--echo"]) == 0
    assert "reading prompt" not in both.getvalue()


def test_prompt_from_a_file_loses_one_newline(generate, fake_llm, tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n\n")
    generate("--file", str(tmp_path / "p.txt"))
    assert asked(fake_llm)[1] == "one\n\ntwo\n"


def test_prompt_from_standard_input(generate, fake_llm, stdin):
    stdin("héllo wörld\n")
    assert generate() == " HÉLLO WÖRLD"
    assert asked(fake_llm)[1] == "héllo wörld"


@pytest.mark.parametrize("flags", [(), ("--chat",), ("--json",)], ids=str)
def test_an_empty_prompt_is_refused_before_anything_loads(
    flags, generate, fake_llm, stdin, tmp_path
):
    assert generate("", *flags, status=2) == (
        "error: prompt: the prompt is empty. Give at least one character.\n"
    )
    for text in ("", "\n"):
        stdin(text)
        assert "standard input: the prompt is empty." in generate(*flags, status=2)
        (tmp_path / "p.txt").write_text(text)
        file = ("--file", str(tmp_path / "p.txt"))
        assert "p.txt: the prompt is empty." in generate(*file, *flags, status=2)
    assert fake_llm.calls == []


def test_input_that_is_no_text(generate, stdin, tmp_path):
    stdin(b"abc\xff")
    assert "standard input: byte 3 is not valid UTF-8" in generate(status=2)
    (tmp_path / "p.bin").write_bytes(b"\x80")
    assert "p.bin: byte 0 is not" in generate("--file", str(tmp_path / "p.bin"), status=2)


SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'


def test_schema_and_grammar_become_the_form_of_the_answer(generate, fake_llm, tmp_path):
    (tmp_path / "s.json").write_text(SCHEMA)
    generate("one", "--schema", str(tmp_path / "s.json"))
    assert asked(fake_llm)[2].structured_outputs == StructuredOutputs(json=SCHEMA)
    fake_llm.calls.clear()
    (tmp_path / "g.lark").write_text('start: "a"\n')
    generate("one", "--grammar", str(tmp_path / "g.lark"), "--n", "2")
    form = asked(fake_llm, "generate")[2].structured_outputs
    assert form == StructuredOutputs(grammar='start: "a"\n')


def test_no_form_unless_asked_for(generate, fake_llm):
    generate("one")
    assert asked(fake_llm)[2].structured_outputs is None


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--schema", b"{", "is no JSON"),
        ("--schema", b"[1]", "is no JSON schema"),
        ("--schema", b"\xff", "byte 0 is not valid UTF-8"),
        ("--schema", b" " * (257 << 10), "the schema is over 262144 bytes"),
        ("--grammar", b"", "grammar='' is no text"),
        ("--grammar", b"x" * (65 << 10), "the grammar is over 65536 bytes"),
    ],
)
def test_forms_that_cannot_be_read(generate, fake_llm, tmp_path, option, content, words):
    (tmp_path / "form").write_bytes(content)
    line = generate("one", option, str(tmp_path / "form"), status=2)
    assert line.startswith(f"error: {tmp_path / 'form'}: ")
    assert words in line
    assert not fake_llm.calls  # found before a model is loaded


def test_one_form_only(generate, tmp_path):
    (tmp_path / "f").write_text("{}")
    form = str(tmp_path / "f")
    line = generate("one", "--schema", form, "--grammar", form, status=2)
    assert "--schema and --grammar exclude each other" in line
    assert "error: " in generate("one", "--schema", str(tmp_path / "missing"), status=1)


def test_an_answer_of_a_real_model_has_the_form(tmp_path, here):
    (tmp_path / "s.json").write_text(SCHEMA)
    arguments = ["--schema", tmp_path / "s.json", "-m", LLAMA, "--device", "cpu", "--quiet"]
    whole = here("generate", "the thin man", "--max-tokens", 200, *arguments)
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)["a"] in (1, 2)
    cut = here("generate", "the thin man", "--max-tokens", 2, *arguments)
    assert cut.returncode == 0
    assert cut.stderr == "The answer was cut at --max-tokens, so its form is not complete.\n"
    (tmp_path / "s.json").write_text('{"uniqueItems": true}')
    assert "uniqueItems" in error_line(here("generate", "a", *arguments))


def test_prompt_that_looks_like_an_option(generate):
    assert generate("--", "--temperature") == " --TEMPERATURE"


PUBLISHED = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}


@pytest.mark.parametrize(
    ("metadata", "options", "expected"),
    [
        ({}, [], {"temperature": 0.7, "top_p": 0.95}),
        (PUBLISHED, [], {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (PUBLISHED, ["--temperature", "0", "--top-k", "0"], {"temperature": 0, "top_p": 0.95}),
        ({"general.sampling.penalty_repeat": 1.1}, ["--repeat-penalty", "1"],
         {"temperature": 0.7, "top_p": 0.95}),
    ],
    ids=["commands", "file", "option", "neutral"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_option_wins_over_the_file_and_the_file_over_the_command(
    command, metadata, options, expected, fake_llm, stdin, tmp_path, capsys
):
    path = tiny_model(tmp_path / "m.gguf", metadata=metadata)
    stdin("hi\n")
    assert run([command, "--model", str(path), "--max-tokens", "4", "--seed", "3", *options]) == 0
    (params,) = [call[2] for call in fake_llm.calls if call[0] in ("stream", "stream_chat")]
    assert params == SamplingParams(**expected, max_tokens=4, seed=3)


def test_options_reach_the_model(generate, fake_llm, tiny, monkeypatch):
    offline = []

    def watched(model, **options):
        offline.append(options["offline"])
        return resolve(model, **options)

    monkeypatch.setattr("tiercel.loader.hub.resolve", watched)
    generate(
        *["x", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--seed", "5"],
        *["--gpu-memory-utilization", "0.5", "--offline", "--temperature", "0", "--top-p", "0.5"],
        *["--top-k", "3", "--min-p", "0.1", "--repeat-penalty", "1.5", "--max-tokens", "9"],
        *["--stop", "a b", "--stop", "c", "--no-special-in-prompt"],
        *["--spec", "ngram", "--num-spec-tokens", "3", "--threads", "2"],
        *["--kv-dtype", "fp8", "--numerics", "native"],
    )
    _, model, options = asked(fake_llm, "load")
    assert model.path == tiny, "the checked file itself: it is not opened again"
    assert offline == [True]
    progress = options.pop("progress")
    progress("Loading", 1, 2)
    assert options == {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "fp8",
        "numerics": "native",
        "max_model_len": 64,
        "gpu_memory_utilization": 0.5,
        "spec": "ngram",
        "num_spec_tokens": 3,
        "threads": 2,
        "tensor_parallel_size": 1,
        "expert_parallel": False,
        "data_parallel_attention": False,
        "seed": 5,
    }
    _, _, params, parse_special = asked(fake_llm)
    assert parse_special is False
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 3, 0.1)
    assert (params.repetition_penalty, params.max_tokens, params.seed) == (1.5, 9, 5)
    assert params.stop == ("a b", "c")
    assert fake_llm.calls[-1] == ("close",)


def test_defaults(generate, fake_llm):
    generate("x")
    _, _, params, parse_special = asked(fake_llm)
    assert parse_special is True
    assert (params.max_tokens, params.n, params.logprobs) == (256, 1, None)


def test_chat_sends_one_user_message(generate, fake_llm):
    assert generate("hi you", "--chat") == " HI YOU"
    assert asked(fake_llm, "stream_chat")[1] == [{"role": "user", "content": "hi you"}]


def test_several_answers(generate):
    assert generate("a b", "--n", "2") == "--- answer 1\n A B\n--- answer 2\n A B\n"


def test_logprobs_as_a_table(generate):
    lines = generate("a b", "--logprobs", "2").splitlines()
    assert lines[0] == " A B"
    assert lines[1].split() == ["'<0>'", "-0.500", "'<0>'", "-0.500", "'<99>'", "-2.000"]
    assert len(lines) == 3


@pytest.mark.parametrize("extra", [[], ["--chat"]])
def test_json(generate, extra):
    result = json.loads(generate("a b", "--json", "--n", "2", "--logprobs", "1", "--echo", *extra))
    assert result["prompt"] == "a b"
    assert result["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    first = result["answers"][0]
    assert first["text"] == "a b A B"
    assert (first["index"], first["token_ids"], first["finish_reason"]) == (0, [0, 1], "stop")
    assert first["logprobs"][1]["id"] == 1
    assert first["logprobs"][1]["top"][1] == {"id": 99, "token": "<99>", "logprob": -2.0}


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_an_answer_that_ends_with_an_error(generate, fake_llm, monkeypatch, extra):
    monkeypatch.setattr(fake_llm, "fail_after", 1)
    message = generate("a b", *extra, status=1)
    assert "nonfinite_logits" in message
    assert message.count("\n") == 1
    assert ("close",) in fake_llm.calls


def test_verbose_tells_the_speed(fake_llm, tiny, capsys):
    assert run(["generate", "a b", "--model", str(tiny), "-v"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " A B"
    assert "2 tokens in" in captured.err


def test_the_default_model_knows_paris(default_model):
    process = tiercel(
        *["generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(" Paris")


def test_prompt_longer_than_the_context_names_both_numbers(tiny, here):
    line = error_line(
        here("generate", "a b c d e f g h" * 20, "--model", tiny, "--max-model-len", "16", "-q")
    )
    numbers = [int(word) for word in line.split() if word.isdigit()]
    assert 16 in numbers
    assert any(number > 16 for number in numbers)


def test_device_that_is_not_there(tiny, here):
    line = error_line(here(*["generate", "x", "--model", tiny, "--device", "cuda:99", "--quiet"]))
    assert "cuda:99" in line


def test_ctrl_c_during_an_answer(default_model):
    with subprocess.Popen(
        [
            *COMMAND,
            "generate",
            "Once upon a time",
            "--max-tokens",
            "4000",
            "--model",
            default_model,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TIERCEL_QUIET="1"),
    ) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait(60) == 130


def test_a_reader_that_has_enough(default_model):
    with subprocess.Popen(
        [
            *COMMAND,
            "generate",
            "Once upon a time",
            "--max-tokens",
            "4000",
            "--model",
            default_model,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TIERCEL_QUIET="1"),
    ) as process:
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 141)
