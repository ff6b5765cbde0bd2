"""Options at the ends of their ranges: the last value is accepted, the next is a usage error."""

import argparse
import io
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tiercel.cli import generate, score, serve, terminal
from tiercel.cli.bench_options import (
    WorkloadOptions,
    make_workload,
    parse_bounds,
    parse_counts,
    parse_levels,
    parse_rates,
)
from tiercel.cli.inspect import _size
from tiercel.cli.options import check_device
from tiercel.cli.serve_options import LimitOptions, ServerOptions
from tiercel.cli.terminal import UsageError, one_line, read_bounded
from tiercel.params import LIMITS, Limits
from tiercel.serve.http.access import LOOPBACK_HOSTS, digest

CEILINGS = {
    "max_n", "max_stop_strings", "max_stop_chars", "max_logit_bias", "max_logprobs",
    "max_tool_name_chars", "max_schema_bytes", "max_schema_depth", "max_schema_nodes",
    "max_regex_bytes", "max_grammar_bytes",
}  # fmt: skip
FROM_ZERO = {"max_stop_strings", "max_logit_bias", "max_logprobs", "max_waiting_requests"}


def is_refused(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except UsageError as error:
        return str(error).isprintable()
    return False


def test_every_bound_of_a_server_has_an_option_of_its_name():
    own = {field.name for field in fields(Limits)} - {
        "max_temperature", "max_tokens", "max_prompt_bytes_per_token",
    }  # fmt: skip
    assert {field.name for field in fields(LimitOptions)} == own
    assert serve.make_limits(LimitOptions()) == LIMITS


@pytest.mark.parametrize("name", [field.name for field in fields(LimitOptions)])
def test_a_bound_of_a_server_is_taken_within_its_range(name):
    default = getattr(LIMITS, name)
    is_seconds = default is None or isinstance(default, float)
    low = 1e-3 if is_seconds else 0 if name in FROM_ZERO else 1
    high = default if name in CEILINGS else 1 << 40
    step = 1e-4 if is_seconds else 1
    for value in (low, low + step, high - 1, high):
        made = serve.make_limits(LimitOptions(**{name: value}))
        assert made == replace(LIMITS, **{name: value})
    for value in (low - step, high + 1, -1):
        assert is_refused(serve.make_limits, LimitOptions(**{name: value})), value


def test_lists_of_counts():
    assert parse_counts("--x", "3,1,3,0") == [3, 1, 0]
    assert parse_counts("--x", "10000000") == [10_000_000]
    assert parse_counts("--x", "5,9", low=5, high=9) == [5, 9]
    assert parse_levels("1,65536") == [1, 65536]
    for text in ("", ",", "1,", "-1", "1.0", "x", "\u0661", "10000001", "1" * 10):
        assert is_refused(parse_counts, "--x", text)
    for text in ("4", "10", "5,10", "5,4"):
        assert is_refused(parse_counts, "--x", text, low=5, high=9)
    for text in ("0", "65537", "1,0"):
        assert is_refused(parse_levels, text)


def test_lists_of_rates():
    assert parse_rates("0.001,2,1e5,2.0") == [0.001, 2.0, 100000.0]
    for text in ("", "0", "0.00099", "100001", "nan", "inf", "-1", "x", "1,"):
        assert is_refused(parse_rates, text)


def test_bounds_of_goodput():
    found = parse_bounds("inter=50,first=500.5,latency=9000")
    assert (found.first_token_ms, found.inter_token_ms, found.latency_ms) == (500.5, 50, 9000)
    assert not parse_bounds(None).are_set
    for name in ("first", "inter", "latency"):
        assert parse_bounds(f"{name}=1").are_set
    for text in ("", "first", "first=", "first=0", "first=-1", "first=nan", "first=inf", "other=1"):
        assert is_refused(parse_bounds, text)


def test_options_of_a_workload():
    def make(**options):
        return make_workload(WorkloadOptions(**options))[0]

    shape = make(input_len="1:16777216", output_len="7", token_ids="0:9", seed=3, temperature=2.0)
    assert (shape.input_len.low, shape.input_len.high) == (1, 1 << 24)
    assert (shape.output_len.low, shape.output_len.high) == (7, 7)
    assert (shape.token_ids.low, shape.token_ids.high) == (0, 9)
    assert (shape.seed, shape.temperature, shape.file_sha256) == (3, 2.0, None)
    default = make()
    assert (default.input_len.low, default.output_len.low, default.temperature) == (512, 128, 0.0)
    for options in (
        {"requests": 1}, {"requests": 10_000_000}, {"warm_up": 0}, {"warm_up": 10_000_000},
        {"temperature": 0.0},
    ):  # fmt: skip
        make(**options)
    for options in (
        {"requests": 0}, {"requests": 10_000_001}, {"warm_up": -1}, {"warm_up": 10_000_001},
        {"temperature": -0.01}, {"temperature": 2.01}, {"temperature": math.nan},
        {"input_len": "0"}, {"output_len": "0"}, {"input_len": "16777217"}, {"token_ids": "9:8"},
    ):  # fmt: skip
        assert is_refused(make, **options), options


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:999"])
def test_devices(name):
    check_device(str, name)


@pytest.mark.parametrize("name", ["", "CPU", "cuda:", "cuda:1000", "cuda:-1", "cuda:0 ", "xcpu"])
def test_what_is_no_device(name):
    with pytest.raises(ValueError, match="is not a device"):
        check_device(str, name)


# --- Texts and files -----------------------------------------------------------------------------


@pytest.fixture
def stdin_of(monkeypatch):
    def put(data):
        stream = argparse.Namespace(buffer=io.BytesIO(data), isatty=lambda: False)
        monkeypatch.setattr(generate.sys, "stdin", stream)

    return put


def test_a_prompt_is_read_to_its_bound(tmp_path, stdin_of, monkeypatch):
    monkeypatch.setattr(generate, "MAX_PROMPT_BYTES", 10)
    path = tmp_path / "prompt.txt"
    for data in (b" ", b"a\n", b"a\n\n", b"123456789\n", "é".encode() * 5, b"\r\n"):
        expected = data.decode().removesuffix("\n")  # one final newline is the editor's
        path.write_bytes(data)
        stdin_of(data)
        assert generate.read_prompt(None, path) == generate.read_prompt(None, None) == expected
    for data in (b"12345678901", "é".encode() * 5 + b"x", b"\xff", b"ab\xc3", b"", b"\n"):
        path.write_bytes(data)
        stdin_of(data)
        assert is_refused(generate.read_prompt, None, path)
        assert is_refused(generate.read_prompt, None, None)
    assert generate.read_prompt("x" * 99 + "\n", None) == "x" * 99 + "\n"
    assert is_refused(generate.read_prompt, "x", path)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 50])
def test_files_are_read_to_their_bound(tmp_path, size, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"x" * size)
    assert read_bounded(path, 10) == (b"x" * size if size <= 10 else None)
    monkeypatch.setattr(score, "MAX_FILE_BYTES", 10)
    if size <= 10:
        assert score._read(path) == "x" * size
    else:
        assert is_refused(score._read, path)


def test_keys_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    text = "# a comment\n\nsk-1\n  sk-2  \n#sk-3\n"
    path.write_text(text)
    assert serve.read_keys(path) == ["sk-1", "sk-2"]
    monkeypatch.setattr(serve, "MAX_KEY_FILE_BYTES", len(text))
    assert serve.read_keys(path) == ["sk-1", "sk-2"]
    monkeypatch.setattr(serve, "MAX_KEY_FILE_BYTES", len(text) - 1)
    assert is_refused(serve.read_keys, path)
    for data in (b"", b"# none\n\n", b"\xff\n"):
        path.write_bytes(data)
        assert is_refused(serve.read_keys, path)


@pytest.mark.parametrize(
    ("key", "is_sound"),
    [("x", True), ("x" * 1024, True), ("x" * 1025, False), ("", False), ("é", False),
     ("a b", True), ("a\tb", False), ("~!", True)],
)  # fmt: skip
def test_keys_that_a_header_can_hold(key, is_sound):
    server = ServerOptions(api_key=("other", key))
    if is_sound:
        assert serve.make_access(server).key_digests == (digest("other"), digest(key))
    else:
        assert is_refused(serve.make_access, server)


OPEN = {"host": "0.0.0.0", "no_key": True}


@pytest.mark.parametrize(
    ("options", "hosts", "is_metrics_open"),
    [
        ({}, LOOPBACK_HOSTS, True),
        ({"host": "127.0.0.9"}, LOOPBACK_HOSTS | {"127.0.0.9"}, True),
        ({"host": "LOCALHOST"}, LOOPBACK_HOSTS, True),
        ({"host": "0.0.0.0", "no_key": True}, None, False),
        ({**OPEN, "allowed_host": ("A.example",)}, {"a.example"}, False),
        ({"allowed_host": ("A.example",)}, LOOPBACK_HOSTS | {"a.example"}, True),
        ({"metrics_auth": "key"}, LOOPBACK_HOSTS, False),
        ({**OPEN, "metrics_auth": "none"}, None, True),
        ({"uds": Path("/x/y")}, None, True),
        ({"no_key": True}, LOOPBACK_HOSTS, True),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | bool) else "",  # not in a set's order
)
def test_who_may_ask_follows_from_where_the_server_listens(options, hosts, is_metrics_open):
    access = serve.make_access(ServerOptions(**options))
    assert access.allowed_hosts == hosts
    assert access.is_metrics_open is is_metrics_open
    assert access.key_digests == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "", "server.example"])
def test_other_machines_are_let_in_with_a_key_or_in_so_many_words(host):
    assert is_refused(serve.make_access, ServerOptions(host=host))
    with pytest.raises(UsageError) as caught:
        serve.make_access(ServerOptions(host=host))
    assert str(caught.value).startswith(f"--host {host} allows access from other machines")
    for way in ("TIERCEL_API_KEY", "--api-key-file", "--no-key"):
        assert way in caught.value.hint
    assert serve.make_access(ServerOptions(host=host, api_key=("k",))).key_digests
    assert not serve.make_access(ServerOptions(host=host, no_key=True)).key_digests


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_key_beside_no_key_is_refused(host, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    for given in ({"api_key": ("k",)}, {"api_key_file": keys}):
        assert is_refused(serve.make_access, ServerOptions(host=host, no_key=True, **given))


@pytest.mark.parametrize(
    ("origin", "is_sound"),
    [("*", True), ("https://a.example", True), ("http://a:1", True), ("https://a.example/", False),
     ("a.example", False), ("", False)],
)  # fmt: skip
def test_origins(origin, is_sound):
    server = ServerOptions(cors_origin=(origin,))
    if is_sound:
        assert serve.make_access(server).cors_origins == (origin,)
    else:
        assert is_refused(serve.make_access, server)


# --- What is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_949, "999.9 kB"),
     (10**6, "1.0 MB"), (98_362_432, "98.4 MB"), (10**9, "1.0 GB"), (123_456_789_012, "123.5 GB")],
)  # fmt: skip
def test_sizes(num_bytes, text):
    assert _size(num_bytes) == text


def test_text_for_a_terminal_is_one_line_without_controls(monkeypatch):
    for number in [*range(0x250), 0x2028, 0x202E, 0xFEFF]:
        char = chr(number)
        found = one_line(f"a{char}b")
        assert found.isprintable()
        assert found == (f"a{char}b" if char.isprintable() else found)
        assert found != "ab"
    assert one_line("a\nb\tc") == "a b c"
    written = []
    for is_terminal in (True, False):
        stream = argparse.Namespace(
            isatty=lambda is_terminal=is_terminal: is_terminal, write=written.append, flush=int
        )
        monkeypatch.setattr(terminal.sys, "stdout", stream)
        terminal.write("".join(map(chr, range(0xA1))))
    text = "".join(map(chr, range(0xA1)))
    kept = "".join(c for c in text if c in "\t\n" or not (c < " " or "\x7f" <= c < "\xa0"))
    assert written == [kept, text]
