"""A hub model is downloaded completely or not at all, whatever hub, network and disk do."""

import hashlib
import importlib.metadata
import os

import httpx2
import pytest

from tests.loader.hub_cases import (
    FILE,
    FOLDER,
    GGUF,
    MODEL,
    OTHER,
    file_names,
    leftovers,
    pull,
    refusal,
    resolve,
)
from tests.loader.hub_server import COMMIT, Hub
from tests.loopback import served
from tiercel.loader import hub_client, hub_folder, hub_pull


def test_a_model_is_fetched_once_and_then_needs_no_network(server, folder, monkeypatch):
    seen = []
    path = resolve(report=lambda *step: seen.append(step))
    assert path == folder / "tiny" / FILE
    assert path.read_bytes() == GGUF
    assert file_names(folder / "tiny") == [FILE]
    assert not leftovers(folder)
    fetching = [step for step in seen if step[0].startswith(f"Fetching {FILE}")]
    assert fetching[-1][1:] == (len(GGUF), len(GGUF))
    assert [step[1] for step in fetching] == sorted(step[1] for step in fetching)

    server.requests.clear()
    monkeypatch.setattr(importlib.metadata, "version", None)  # the library is not searched for
    monkeypatch.setattr("tiercel.loader.store.hash_file", None)  # nothing is hashed again
    assert resolve() == path
    assert resolve(f"{MODEL}:Q4_K_M", offline=True) == path
    assert not server.requests


def test_choices_and_splits(server, folder):
    assert resolve(f"{MODEL}:q8_0").read_bytes() == OTHER
    assert resolve(f"{MODEL}:{FILE}").read_bytes() == GGUF
    assert file_names(folder / "tiny") == [FILE, "tiny-Q8_0.gguf"]
    seen = []
    first = resolve("acme/split", report=lambda *step: seen.append(step))
    assert first.name == "m-00001-of-00002.gguf"
    fetching = [step for step in seen if step[0].startswith("Fetching")]
    assert {what for what, _, _ in fetching} == {"Fetching 2 files of acme/split (0 MB)"}
    both = len(first.read_bytes()) + len(OTHER + b"2")
    assert {total for _, _, total in fetching} == {both}
    counts = [done for _, done, _ in fetching]
    assert counts == sorted(counts)
    assert len(first.read_bytes()) in counts
    assert counts[-1] == both
    assert (first.parent / "m-00002-of-00002.gguf").read_bytes() == OTHER + b"2"


def test_a_folder_model(server):
    path = resolve("acme/folder")
    assert path.name == "folder"  # the model's name in messages and in the server
    assert file_names(path) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all((path / name).read_bytes() == FOLDER[name] for name in file_names(path))


def test_a_pattern_fetches_what_matches(server, folder):
    assert pull(pattern="*.md") == folder / "tiny"
    assert file_names(folder / "tiny") == ["README.md"]
    assert "no file matches 'x*'" in refusal(pull, pattern="x*")


def test_a_revision_has_a_folder_of_its_own(server, folder):
    server.revisions["refs/pr/1"] = "f" * 40
    path = pull(revision="refs/pr/1")
    assert path == folder.parent / "refs%2Fpr%2F1/tiny" / FILE
    assert [model.revision for model in hub_folder.list_cached()] == ["refs/pr/1"]
    assert pull(revision=COMMIT).read_bytes() == GGUF
    assert "has no revision gone" in refusal(pull, revision="gone")
    assert "not the name of a revision" in refusal(pull, revision="../main")


def test_pull_fetches_only_what_has_changed(server):
    resolve("acme/split")
    server.requests.clear()
    server.repositories["acme/split"]["q/m-00002-of-00002.gguf"] = OTHER + b"new"
    first = pull("acme/split")
    assert (first.parent / "m-00002-of-00002.gguf").read_bytes() == OTHER + b"new"
    assert {path.rsplit("/")[-1] for path, _ in server.requests if "resolve" in path} == {
        "m-00002-of-00002.gguf"
    }


def test_a_cut_connection_is_continued(server, folder):
    server.cut_after[FILE] = [200_000, 100_000]
    assert resolve().read_bytes() == GGUF
    ranges = [headers.get("range") for headers in server.asked("/storage/")]
    assert ranges[0] is None
    starts = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges[1:]]
    assert starts == sorted(starts)
    assert 0 < starts[0] <= 200_000 < starts[-1] <= 300_000


def test_a_later_run_continues_a_broken_one(server, folder):
    server.cut_after[FILE] = [150_000, 0, 0, 0, 0]
    text = refusal(resolve)
    assert "the hub cannot be reached" in text
    assert "resumes where it ended" in text
    assert file_names(folder / "tiny") == []
    (part,) = leftovers(folder)
    have = (folder / part).stat().st_size
    assert 0 < have <= 150_000
    server.requests.clear()
    server.cut_after.clear()
    assert resolve().read_bytes() == GGUF
    assert server.asked("/storage/")[0]["range"] == f"bytes={have}-"
    assert not leftovers(folder)


def test_another_part_than_asked_for_is_not_taken(server):
    server.cut_after[FILE] = [150_000]
    server.range_shifts = [1]
    assert resolve().read_bytes() == GGUF
    ranges = [headers.get("range") for headers in server.asked("/storage/")]
    assert len(ranges) == 3
    assert ranges[1] is not None
    assert ranges[2] == ranges[1]  # it resumed, and not from the start


def test_a_server_without_ranges_starts_again(server, folder):
    server.has_ranges = False
    server.cut_after[FILE] = [150_000]
    assert resolve().read_bytes() == GGUF


@pytest.mark.parametrize("damage", [b"x" * 1000, GGUF + b"x", b"x" * len(GGUF)])
def test_a_damaged_part_is_thrown_away(server, folder, damage):
    (folder / ".state").mkdir(parents=True)
    part = folder / ".state" / f"{hashlib.sha256(GGUF).hexdigest()}.part"
    part.write_bytes(damage)
    assert resolve().read_bytes() == GGUF
    assert not part.exists()


def test_a_range_that_is_refused_starts_again(server, folder):
    server.served_instead[FILE] = GGUF[:1000]
    (folder / ".state").mkdir(parents=True)
    part = folder / ".state" / f"{hashlib.sha256(GGUF).hexdigest()}.part"
    part.write_bytes(GGUF[:2000])
    assert "cannot be reached" in refusal(resolve)
    server.served_instead.clear()
    assert resolve().read_bytes() == GGUF


@pytest.mark.parametrize("served_instead", [GGUF[:-1] + b"x", GGUF + b"x"], ids=["other", "long"])
@pytest.mark.parametrize("model", [MODEL, "acme/folder"])
def test_wrong_bytes_never_get_the_final_name(server, tmp_path, model, served_instead):
    name = FILE if model == MODEL else "config.json"
    server.served_instead[name] = served_instead
    assert f"{name} came with another hash" in refusal(resolve, model)
    names = file_names(tmp_path / "cache")
    assert not [n for n in names if n.endswith((name, ".part"))]


def test_a_short_file_never_gets_the_final_name(server, folder):
    server.served_instead[FILE] = GGUF[:-1]
    assert "cannot be reached" in refusal(resolve)
    assert file_names(folder / "tiny") == []


@pytest.mark.parametrize(
    ("key", "answer", "words"),
    [
        (MODEL, (401, "RepoNotFound", "x"), "no such repository, or it is private"),
        (MODEL, (401, "", "Invalid credentials in Authorization header"), "accept your token"),
        (MODEL, (403, "GatedRepo", "x"), "the repository is gated"),
        (FILE, (403, "GatedRepo", "x"), "Accept them at http://127.0.0.1"),
        (FILE, (404, "EntryNotFound", "x"), "the file is not there any more"),
        (MODEL, (418, "", ""), "the hub answered HTTP 418"),
        (MODEL, (304, "", ""), "the hub answered HTTP 304"),
        (MODEL, (503, "", ""), "cannot be reached: the hub answered HTTP 503"),
        (FILE, (429, "", "slow down"), "cannot be reached: the hub answered HTTP 429"),
    ],
)
def test_refusals_are_one_line(server, folder, key, answer, words):
    server.refusals[key] = answer
    assert words in refusal(resolve)
    assert not list(folder.rglob("*.gguf"))


def test_a_short_failure_of_the_hub_is_overcome(server, monkeypatch):
    server.refusals[FILE] = (503, "", "")
    waits = []

    def wait(delay_s):
        waits.append(delay_s)
        server.refusals.clear()

    monkeypatch.setattr(hub_pull.time, "sleep", wait)
    assert resolve().read_bytes() == GGUF
    assert waits == [0.0]


def test_an_unknown_repository(server):
    text = refusal(resolve, "acme/nothing")
    assert text.startswith("acme/nothing: the hub has no such repository")
    assert "HF_TOKEN" in text


def test_nobody_listens(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached: " in refusal(resolve)


def test_the_hub_is_silent(server, monkeypatch):
    monkeypatch.setattr(hub_client.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    server.silence_s = 0.5
    assert "took too long to answer" in refusal(resolve)


@pytest.mark.parametrize(
    "address", ["http://example.com", "http://10.0.0.1", "http://127.0.0.1.evil.com", "ftp://x", ""]
)
def test_only_https_is_asked(server, monkeypatch, address):
    def send(*_args, **_kwargs):
        raise AssertionError("a connection was made")

    session = hub_client.get_session()
    monkeypatch.setattr(session, "send", send)
    if address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert f"HF_ENDPOINT: the address {address} is not https" in refusal(resolve)
    else:  # unset: the hub itself, over https
        monkeypatch.delenv("HF_ENDPOINT")
        with pytest.raises(AssertionError, match="a connection was made"):
            resolve()


def test_a_redirect_to_plain_http_elsewhere_is_refused(server, folder):
    server.storage = "http://storage.example.com"
    text = refusal(resolve)
    assert "http://storage.example.com/storage/acme/tiny/tiny-Q4_K_M.gguf is not https" in text
    assert file_names(folder / "tiny") == []


def test_a_hub_elsewhere_cannot_redirect_to_this_machine(server, monkeypatch):
    def send(request, **_kwargs):
        response = httpx2.Response(302, headers={"location": "http://127.0.0.1/x"}, request=request)
        response.next_request = httpx2.Request("GET", "http://127.0.0.1/x")
        return response

    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    monkeypatch.setattr(hub_client.get_session(), "send", send)
    assert "acme/tiny: the address http://127.0.0.1/x is not https" in refusal(resolve)


def test_redirects_end(server):
    server.storage = os.environ["HF_ENDPOINT"] + f"/acme/tiny/resolve/{COMMIT}/{FILE}?"
    assert "redirected over 5 times" in refusal(resolve)


def test_the_token_goes_to_the_hub_alone(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    storage = Hub(server.repositories)
    with served(storage) as address:
        server.storage = address
        assert resolve().read_bytes() == GGUF
    assert all(h["authorization"] == "Bearer hf_secret" for _, h in server.requests)
    assert storage.requests
    assert not any("authorization" in headers for _, headers in storage.requests)


@pytest.mark.parametrize("name", ["../../../../../escaped.gguf", "/var/escaped.gguf", "a\\b.gguf"])
def test_names_that_leave_the_folder_are_refused(server, tmp_path, name):
    server.repositories[MODEL] = {name: GGUF}
    assert "not a safe name" in refusal(resolve)
    assert not list(tmp_path.rglob("*.gguf"))
    assert not server.asked("/resolve/")


@pytest.mark.parametrize("where", ["tiny", "tiny/sub", ".", ".."])
def test_links_in_the_cache_are_not_followed(server, folder, tmp_path, where):
    server.repositories[MODEL] = {"sub/a.gguf": GGUF}
    (tmp_path / "elsewhere").mkdir()
    link = folder / where if ".." not in where else folder.parent
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    assert "the cache holds a link, which is not followed" in refusal(resolve)
    assert not list((tmp_path / "elsewhere").rglob("*.gguf"))


def test_a_link_in_place_of_a_part_is_not_followed(server, folder, tmp_path):
    (folder / ".state").mkdir(parents=True)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    part = folder / ".state" / f"{hashlib.sha256(GGUF).hexdigest()}.part"
    part.symlink_to(target)
    assert "cannot be stored" in refusal(resolve)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "listing",
    [
        b"<html>",
        b"[]",
        b'{"sha": 1, "siblings": []}',
        b'{"sha": "../../x", "siblings": []}',
        b'{"sha": "%s", "siblings": [{"rfilename": "a.gguf"}]}' % COMMIT.encode(),
        b'{"sha": "%s", "siblings": [{"rfilename": "a.gguf", "size": -1, "blobId": "%s"}]}'
        % (COMMIT.encode(), COMMIT.encode()),
        b'{"sha": "%s", "siblings": [{"rfilename": "a.gguf", "size": 1, "blobId": "../x"}]}'
        % COMMIT.encode(),
        b"[" * 100_000,
        b" " * hub_client.MAX_LISTING_BYTES + b'{"sha": "%s", "siblings": []}' % COMMIT.encode(),
    ],
    ids=range(9),
)
def test_a_listing_that_is_none(server, tmp_path, listing):
    server.listing = listing
    text = refusal(resolve)
    assert "is not a list of files" in text or "names the commit" in text
    assert not list(tmp_path.rglob("*.gguf"))
