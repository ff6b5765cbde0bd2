"""The bytes of each tensor, compared with a map of the bytes: overlaps, gaps, the ends."""

import itertools
import random

import numpy as np
import pytest

from tests.gguf_files import TYPE_IDS, assemble, pair, record
from tests.loader.test_gguf_hostile import refusal as gguf_refusal
from tests.loader.test_safetensors import entry, write
from tests.loader.test_safetensors import refusal as safetensors_refusal
from tiercel.errors import ModelFormatError
from tiercel.loader.gguf import read_gguf
from tiercel.loader.mapped import MappedFile, TensorInfo, check_no_overlap
from tiercel.loader.safetensors import read_safetensors
from tiercel.quant_types import QuantType

pytestmark = pytest.mark.reliability


def num_owners(ranges, size):
    """(size,): number of tensors that each byte belongs to; None if a range leaves the data."""
    owners = np.zeros(size, int)
    for begin, end in ranges:
        if not 0 <= begin <= end <= size:
            return None
        owners[begin:end] += 1
    return owners


@pytest.mark.parametrize("size", range(6, 12))
def test_safetensors_cover_every_byte_once(size, tmp_path):
    """All arrangements of one F16 and two F32 values, with data of that size or another."""
    path = tmp_path / "model.safetensors"
    num_read = 0
    for places in itertools.product(range(size), repeat=3):
        ranges = [(at, at + n) for at, n in zip(places, (2, 4, 4), strict=True)]
        tensors = {
            name: entry("F16" if end - begin == 2 else "F32", (1,), (begin, end))
            for name, (begin, end) in zip("abc", ranges, strict=True)
        }
        owners = num_owners(ranges, size)
        is_sound = owners is not None and (owners == 1).all()
        if not is_sound and sum(places) % 7:
            continue  # a 7th of the broken files is enough
        data = bytes(range(size))
        write(path, tensors, data)
        if not is_sound:
            safetensors_refusal(path, ModelFormatError)
            continue
        file = read_safetensors(path)
        num_read += 1
        for name, (begin, end) in zip("abc", ranges, strict=True):
            assert file.data(name).tobytes() == data[begin:end]
    assert num_read == (6 if size == 10 else 0)  # the orders of three tensors


def test_gguf_tensors_never_overlap_and_end_within_the_file(tmp_path):
    """Random sizes at multiples of 8; gaps are allowed, and bytes after the last tensor."""
    path = tmp_path / "x.gguf"
    rng = random.Random(0)
    align = pair("general.alignment", 8)
    outcomes = []
    for _ in range(300):
        size = 8 * rng.randint(4, 12)
        counts = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
        starts = [8 * rng.randint(0, size // 8) for _ in counts]
        if rng.random() < 0.6:  # one after the other, in any order
            starts = [8 * sum(-(-4 * n // 8) for n in counts[:i]) for i in range(len(counts))]
        ranges = [(at, at + 4 * n) for at, n in zip(starts, counts, strict=True)]
        records = [
            record(f"t{i}", (n,), TYPE_IDS["F32"], at)
            for i, (at, n) in enumerate(zip(starts, counts, strict=True))
        ]
        rng.shuffle(records)
        data = rng.randbytes(size)
        path.write_bytes(assemble([align], records, data, alignment=8))
        owners = num_owners(ranges, size)
        is_sound = owners is not None and owners.max() <= 1
        outcomes.append(is_sound)
        if not is_sound:
            gguf_refusal(path)
            continue
        file = read_gguf(path)
        for i, (begin, end) in enumerate(ranges):
            assert file.data(f"t{i}").tobytes() == data[begin:end]
    assert 50 < sum(outcomes) < 250


def test_overlaps_are_found_to_the_byte(tmp_path):
    """The check itself, with ranges of any length: no format's alignment hides a single byte."""
    path = tmp_path / "any"
    path.write_bytes(bytes(64))
    file = MappedFile(path, 1)
    rng = random.Random(1)
    outcomes = []
    for _ in range(2000):
        ranges = []
        for _ in range(rng.randint(1, 4)):
            begin = rng.randint(0, 30)
            ranges.append((begin, begin + rng.randint(1, 12)))
        infos = [
            TensorInfo(f"t{i}", (end - begin,), QuantType.F32, end - begin, 0, begin)
            for i, (begin, end) in enumerate(ranges)
        ]
        is_sound = num_owners(ranges, 64).max() <= 1
        outcomes.append(is_sound)
        if is_sound:
            check_no_overlap(file, infos)
        else:
            with pytest.raises(ModelFormatError, match="overlaps"):
                check_no_overlap(file, infos)
    assert min(sum(outcomes), len(outcomes) - sum(outcomes)) > 300
