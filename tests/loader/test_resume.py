"""A download in pieces: a source that cuts, repeats, restarts and sends wrong bytes.

The functions are called with a fake source, so that every byte and every attempt is counted.
"""

import contextlib
import hashlib
import random
from collections import namedtuple

import pytest

from tiercel.errors import ModelNotFoundError
from tiercel.loader import hub_pull
from tiercel.loader.hub_client import Body, ConnectionLostError
from tiercel.loader.hub_folder import HubFolder
from tiercel.loader.hub_names import HubName, RemoteFile
from tiercel.loader.store import Content

NAME = HubName("acme", "tiny")
DATA = random.Random(0).randbytes(1000)
FILE = RemoteFile("m.gguf", Content(len(DATA), hashlib.sha256(DATA).hexdigest()))


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The pauses between attempts, which are not slept."""
    slept = []
    monkeypatch.setattr(hub_pull.time, "sleep", slept.append)
    monkeypatch.setattr(hub_pull, "RETRY_DELAYS_S", (1.0, 2.0, 4.0))
    return slept


class Source:
    """A source of a file's bytes; each connection follows the next step of `script`, or the last.

    A step is (bytes of this connection, whether it ends with an error, whether it has ranges).
    """

    def __init__(self, script, data=DATA):
        self.script = list(script)
        self.data = data
        self.starts = []

    @contextlib.contextmanager
    def __call__(self, start):
        self.starts.append(start)
        assert len(self.starts) < 50, "asked without end"
        count, is_lost, has_ranges = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        start = start if has_ranges else 0

        def chunks():
            end = min(len(self.data), start + count)
            for place in range(start, end, 64):
                yield self.data[place : min(place + 64, end)]
            if is_lost:
                raise ConnectionLostError("cut")

        yield Body(start, chunks())


WHOLE = (10**6, False, True)


def fetch(source, part, report=None):
    hub_pull._fetch(source, NAME, FILE, part, report)
    assert part.read_bytes() == DATA


@pytest.mark.parametrize("seed", range(20))
def test_random_cuts_end_in_the_whole_file(seed, tmp_path):
    rng = random.Random(seed)
    part = tmp_path / "x.part"
    kept = rng.choice([0, 1, 500, 999])
    part.write_bytes(DATA[:kept])
    script = [
        (rng.randint(1, 400), rng.random() < 0.5, rng.random() < 0.8)
        for _ in range(rng.randint(0, 3))  # as many as there are pauses
    ]
    source = Source([*script, WHOLE])
    seen = []
    fetch(source, part, lambda what, done, total: seen.append((done, total)))
    assert source.starts[0] == kept
    assert all(0 < done <= total == len(DATA) for done, total in seen)
    assert seen[-1][0] == len(DATA)


def test_each_try_that_brings_bytes_is_followed_by_a_short_pause(tmp_path, waits):
    """Only attempts without a new byte add up."""
    fetch(Source([(100, True, True)]), tmp_path / "x.part")
    assert waits == [1.0] * 9
    waits.clear()
    source = Source([(0, True, True)] * 3 + [(500, True, True)] + [(0, True, True)] * 2 + [WHOLE])
    (tmp_path / "x.part").unlink()
    fetch(source, tmp_path / "x.part")
    assert waits == [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]  # the 500 bytes begin a new series


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_source_that_brings_nothing_more_is_given_up(is_lost, tmp_path, waits):
    part = tmp_path / "x.part"
    part.write_bytes(DATA[:300])
    source = Source([(0, is_lost, True)])
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached"):
        hub_pull._fetch(source, NAME, FILE, part, None)
    assert source.starts == [300] * 4
    assert waits == [1.0, 2.0, 4.0]
    assert part.read_bytes() == DATA[:300]  # for the next run


def test_a_restart_counts_as_progress_only_beyond_what_was_there(tmp_path):
    """A server without ranges that always cuts at the same byte is given up."""
    source = Source([(400, True, False)])
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        hub_pull._fetch(source, NAME, FILE, tmp_path / "x.part", None)
    assert source.starts == [0, 400, 400, 400]


@pytest.mark.parametrize("kept", [b"", b"wrong" * 20, DATA[:500], DATA + b"more"])
def test_wrong_bytes_are_fetched_once_more_if_some_were_there_before(kept, tmp_path):
    part = tmp_path / "x.part"
    if kept:
        part.write_bytes(kept)
    fetch(Source([WHOLE]), part)
    part.write_bytes(kept)
    lying = Source([WHOLE], bytes(1000))
    with pytest.raises(ModelNotFoundError, match="another hash than the hub names"):
        hub_pull._fetch(lying, NAME, FILE, part, None)
    assert not part.exists()
    assert len(lying.starts) == (1 if not kept or len(kept) > len(DATA) else 2)
    assert lying.starts[-1] == 0


def test_a_source_that_never_ends_is_cut_at_the_size(tmp_path):
    source = Source([WHOLE], DATA + bytes(10**6))
    with pytest.raises(ModelNotFoundError, match="another hash"):
        hub_pull._fetch(source, NAME, FILE, tmp_path / "x.part", None)
    assert source.starts == [0]


def test_space_is_needed_for_what_is_missing(tmp_path, monkeypatch):
    """Of all files, without the bytes of existing parts; a file at the bound fits."""
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path))
    folder = HubFolder(NAME)
    part = tmp_path / "a.part"
    part.write_bytes(DATA[:300])
    files, parts = [FILE, FILE], [part, tmp_path / "none.part"]
    usage = namedtuple("usage", "total used free")
    for free, is_full in ((1700, False), (1699, True), (1701, False), (0, True)):
        monkeypatch.setattr(hub_pull.shutil, "disk_usage", lambda _, n=free: usage(9999, 0, n))
        if is_full:
            with pytest.raises(ModelNotFoundError, match="is full"):
                hub_pull._check_space(folder, files, parts)
        else:
            hub_pull._check_space(folder, files, parts)
