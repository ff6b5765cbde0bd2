"""What DeepSeek-V4 keeps of a block of 128 tokens, by kind of layer and by how it rests."""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_files import TINY
from tiercel.cache.spec import group_specs
from tiercel.config import LoadOptions, ModelOptions
from tiercel.engine.load import resolve_config
from tiercel.errors import ArgumentError
from tiercel.layers.compressed_attention import CompressedAttention, Compression
from tiercel.layers.compressor import Compressor
from tiercel.layers.indexer import Indexer
from tiercel.layers.latent_cache import LatentFormat
from tiercel.models.deepseek_v4 import entry_bytes
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.models.source import open_source

BLOCK, WINDOW = 128, 128


def compressor(ratio, width):
    return Compressor(torch.empty(ratio, width, device="meta"), None, 1e-6, None)


def specs(ratio, kv_dtype):
    """Of a layer of the true sizes: 512 channels of which 64 rotate, index keys of 128."""
    latents = LatentFormat(512, 64, 128, kv_dtype)
    compression = None
    if ratio:
        indexer = Indexer(None, 64, 512, compressor(4, 256), None, latents) if ratio == 4 else None
        width = 1024 if ratio == 4 else 512
        compression = Compression(None, compressor(ratio, width), indexer, ratio)
    layer = CompressedAttention(latents, None, None, None, compression)
    return layer.cache_specs(WINDOW)


def block_bytes(ratio, kv_dtype):
    return [spec.bytes_per_block(BLOCK) for spec in specs(ratio, kv_dtype)]


def test_entries_are_those_of_the_published_layout():
    inputs = 32 * (2 * 1024 + 2 * 256) * 4
    assert block_bytes(0, "fp8") == [128 * 584]
    assert block_bytes(4, "fp8") == [128 * 584, 32 * (584 + 68), inputs]
    assert block_bytes(128, "fp8") == [128 * 584, 584, 128 * 2 * 512 * 4]
    assert [block_bytes(4, "fp8")[1], block_bytes(128, "fp8")[1]] == [20_864, 584]


@pytest.mark.parametrize(("kv_dtype", "size"), [("bf16", 2), ("float32", 4)])
def test_unencoded_entries_are_plain_floats(kv_dtype, size):
    assert block_bytes(4, kv_dtype)[:2] == [128 * 512 * size, 32 * (512 + 128) * size]


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16", "float32"])
@pytest.mark.parametrize("sizes", [(512, 64, 128), (96, 32, 64), (704, 64, 32)])
def test_planned_bytes_are_those_of_the_planes(sizes, kv_dtype):
    latents = LatentFormat(*sizes, kv_dtype)
    names = ("head_dim", "rotary_dim", "index_head_dim")
    config = replace(open_source(TINY).config, **dict(zip(names, sizes, strict=True)))
    planes = (latents.kv_planes(), latents.index_planes())
    found = tuple(sum(plane.entry_bytes for plane in kind) for kind in planes)
    assert found == entry_bytes(config, kv_dtype)


def test_equal_specs_of_all_layers_are_five_groups():
    layers = [specs(ratio, "fp8") for ratio in (0, 0, *(4, 128) * 20, 4, 0)]
    groups = group_specs([spec for layer in layers for spec in layer])
    found = {
        (g.spec.policy, g.spec.window, g.spec.tokens_per_entry, g.spec.block_entries(BLOCK)):
        len(g.layers) for g in groups
    }  # fmt: skip
    assert found == {
        ("sliding", 128, 1, 128): 44,
        ("full", 0, 4, 32): 21,
        ("sliding", 8, 1, 32): 21,
        ("full", 0, 128, 1): 20,
        ("sliding", 1, 1, 128): 20,
    }
    entries = sum(g.bytes_per_block(BLOCK) for g in groups if g.spec.policy == "full")
    assert entries == 449_824


def test_dtypes_that_auto_means():
    source = open_source(TINY)
    config = resolve_config(source, LoadOptions(device="cpu"))
    assert config.dtype == torch.float32
    assert source.family.auto_dtypes["cuda"] == "bfloat16"
    chosen = resolve_config(source, LoadOptions(device="cpu", dtype="bfloat16"))
    assert chosen.dtype == torch.bfloat16


def test_encoded_entries_need_whole_groups():
    config = open_source(TINY).config
    DeepseekV4.check_options(config, ModelOptions(kv_dtype="fp8"))
    for odd in (replace(config, head_dim=100), replace(config, index_head_dim=16)):
        DeepseekV4.check_options(odd, ModelOptions(kv_dtype="auto"))
        with pytest.raises(ArgumentError, match="kv_dtype='fp8'"):
            DeepseekV4.check_options(odd, ModelOptions(kv_dtype="fp8"))
