"""`tiercel pull` with a hub on loopback: its output on standard output and error."""

import pytest

from tests.loader.hub_server import Hub
from tests.loopback import served
from tiercel.cli.main import run

GGUF = b"GGUF" + bytes(range(251)) * 5000
FILES = {"m-Q4_K_M.gguf": GGUF, "m-Q8_0.gguf": GGUF + b"8", "README\x1b.md": b"words"}


@pytest.fixture(scope="module")
def address():
    with served(Hub({"acme/tiny": FILES})) as address:
        yield address


@pytest.fixture(autouse=True)
def cache(address, tmp_path, monkeypatch):
    for name in ("TIERCEL_MODEL", "TIERCEL_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read at its import
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_path_goes_to_standard_output(cache, capsys):
    path = cache / "models/hub/acme/tiny/main/tiny/m-Q4_K_M.gguf"
    for _ in range(2):
        assert run(["pull", "acme/tiny"]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{path}\n"
        assert captured.err == ""
    assert path.read_bytes() == GGUF


def test_lists(capsys):
    assert run(["pull", "acme/tiny:Q8_0"]) == 0
    capsys.readouterr()
    assert run(["pull", "--list"]) == 0
    assert capsys.readouterr().out == "  1.26 MB  acme/tiny  m-Q8_0.gguf\n"
    for offline in ([], ["--offline"]):
        assert run(["pull", "acme/tiny", "--list", *offline]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "  1.26 MB            m-Q4_K_M.gguf",
            "  1.26 MB  cached    m-Q8_0.gguf",
            "  0.00 MB            README\\x1b.md",
        ]


def test_remove(cache, capsys):
    assert run(["pull", "acme/tiny"]) == 0
    capsys.readouterr()
    assert run(["pull", "acme/tiny", "--rm"]) == 0
    assert capsys.readouterr().err == "Removed 1.26 MB.\n"
    assert not (cache / "models/hub/acme").exists()
    assert run(["pull", "acme/tiny", "--rm"]) == 1
    assert "the cache holds nothing of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "NAME: none was given"),
        (["acme/tiny", "--list", "--rm"], 2, "exclude each other"),
        (["smollm2", "--revision", "x"], 2, "are for models of a hub"),
        (["acme/gone"], 1, "acme/gone: the hub has no such repository"),
        (["acme/tiny", "--revision", "gone"], 1, "acme/tiny: the repository has no revision gone"),
        (["acme/tiny", "--file", "x*"], 1, "acme/tiny: no file matches 'x*'"),
        (["acme/tiny:Q2_K"], 1, "no GGUF file is 'Q2_K'. It has m-Q4_K_M, m-Q8_0."),
        (["acme/tiny", "--offline"], 1, "downloads are switched off"),
        (["acme/tiny", "--list", "--offline"], 1, "downloads are switched off"),
        (["smolm"], 1, "Did you mean smollm2?"),
        (["./x.gguf"], 1, "the path does not exist"),
        (["smollm2", "--offline"], 1, "smollm2: the model is not on this machine"),
        (["smollm2", "--rm"], 1, "smollm2: the cache does not hold it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line(arguments, status, words, capsys, monkeypatch):
    monkeypatch.setattr("tiercel.loader.hub._installed_copy", lambda _entry: None)
    assert run(["pull", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_the_environment_reaches_it(capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_OFFLINE", "1")
    assert run(["pull", "acme/tiny"]) == 1
    assert "downloads are switched off" in capsys.readouterr().err
