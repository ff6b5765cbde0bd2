"""The safetensors writer: the official package and our reader find what was written."""

import errno
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tiercel.loader import safetensors_write
from tiercel.loader.safetensors import INDEX_NAME, read_safetensors, read_shapes
from tiercel.loader.safetensors_write import Entry, split_shards, write_index, write_shard

TENSORS = {
    "odd": ("U8", torch.arange(21, dtype=torch.uint8).view(3, 7)),
    "scalar": ("F32", torch.tensor(2.5)),
    "half": ("BF16", torch.arange(5).bfloat16()),
    "table": ("I64", torch.arange(6).view(2, 3)),
    "fp8": ("F8_E4M3", torch.arange(8).view(1, 8).to(torch.float8_e4m3fn)),
    'quoted "\u00e9"': ("I8", torch.tensor([-1], dtype=torch.int8)),
}


def entries():
    return [
        Entry(name, dtype, tuple(tensor.shape), tensor.nbytes)
        for name, (dtype, tensor) in TENSORS.items()
    ]


def data(name):
    return TENSORS[name][1].reshape(-1).view(torch.uint8).numpy()


def write(folder, shards):
    for file, shard in shards.items():
        write_shard(folder / file, shard, [(e.name, data(e.name)) for e in reversed(shard)])
    write_index(folder, shards)


@pytest.mark.parametrize("limit", [10**9, 400, 1], ids=["one file", "some", "one each"])
def test_what_is_written_is_read(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(safetensors_write, "_PIECE_BYTES", 4)  # several writes of a tensor
    shards = split_shards([[entry] for entry in entries()], limit)
    write(tmp_path, shards)
    assert (tmp_path / INDEX_NAME).exists() == (limit < 10**9)
    assert len(shards) == {10**9: 1, 400: 3, 1: len(TENSORS)}[limit]
    files = read_safetensors(tmp_path)
    assert read_shapes(files) == {name: tuple(t.shape) for name, (_, t) in TENSORS.items()}
    for name in TENSORS:
        assert files.data(name).tobytes() == data(name).tobytes()
    for file, shard in shards.items():
        assert len(shard) == 1 or (tmp_path / file).stat().st_size <= limit
        with safe_open(tmp_path / file, "pt") as official:
            assert official.metadata() == {"format": "pt"}
            for entry in shard:
                found, expected = official.get_tensor(entry.name), TENSORS[entry.name][1]
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(found.float(), expected.float())


def test_tensors_are_aligned_to_their_elements(tmp_path):
    write(tmp_path, split_shards([entries()]))
    files = read_safetensors(tmp_path)
    for info in files.tensors.values():
        assert info.offset % info.qtype.block_bytes == 0, info


def test_groups_stay_together():
    tensors = [Entry(f"t{i}", "U8", (100,), 100) for i in range(6)]
    size = tensors[0].file_bytes
    shards = split_shards([tensors[:2], tensors[2:5], tensors[5:]], 4 * size)
    assert [[e.name for e in shard] for shard in shards.values()] == [
        ["t0", "t1"], ["t2", "t3", "t4", "t5"],
    ]  # fmt: skip
    assert list(shards) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_the_index_names_the_file_of_each_tensor(tmp_path):
    shards = split_shards([[entry] for entry in entries()], 1)
    write_index(tmp_path, shards)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in TENSORS.values())
    assert index["weight_map"] == {s[0].name: file for file, s in shards.items()}


def test_a_full_disk_names_the_file(tmp_path):
    def pieces():
        yield "x", np.zeros(4, np.uint8)
        raise OSError(errno.ENOSPC, "No space left on device")

    shard = [Entry("x", "U8", (4,), 4), Entry("y", "U8", (4,), 4)]
    with pytest.raises(OSError, match="No space left") as caught:
        write_shard(tmp_path / "a.safetensors", shard, pieces())
    assert caught.value.filename == str(tmp_path / "a.safetensors")
