"""Hostile model files, as `(name, writer)`: `writer(path)` makes the file at `path`.

`container_hostiles` break the container or the tensor table: the reader itself must refuse them.
`model_hostiles` are valid containers whose hyperparameters, tensors or tokenizer are wrong: loading
a model must refuse them. Numbers like C4 are the cases of the reliability specification.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    MERGES,
    NUM_TOKENS,
    STRING,
    TYPE_IDS,
    U8,
    U16,
    U32,
    U64,
    Typed,
    assemble,
    pair,
    plain,
    record,
    string,
    tiny_model,
    tiny_tokenizer,
)

Writer = Callable[[Path], Any]
HUGE = 2**64 - 1
NAME = pair("general.name", "hostile")
MATRIX = record("a.weight", (64, 4), TYPE_IDS["F32"], 0)  # 1024 bytes
DATA = bytes(1024)


def hostile_files() -> Iterator[tuple[str, Writer]]:
    """Both kinds."""
    yield from container_hostiles()
    yield from model_hostiles()


def container_hostiles() -> Iterator[tuple[str, Writer]]:
    """Files that `read_gguf` must refuse."""
    for name, content in {**_headers(), **_metadata(), **_tensors()}.items():
        yield name, lambda path, content=content: path.write_bytes(content)


def _headers() -> dict[str, bytes]:
    """C1 and C2: magic, versions, counts."""
    sound = assemble([NAME], [MATRIX], DATA)
    return {
        "c1_empty": b"",
        "c1_four_bytes": b"GGUF",
        "c1_23_bytes": sound[:23],
        "c1_other_magic": b"PK\x03\x04" + sound[4:],
        "c1_html": b"<!DOCTYPE html><html><body>Not found</body></html>",
        "c1_lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "c1_swapped_magic": assemble([NAME], magic=b"FUGG"),
        "c1_zeros": bytes(4096),
        "c1_ones": b"\xff" * 4096,
        "c1_version_0": assemble([NAME], version=0),
        "c1_version_1": assemble([NAME], version=1),
        "c1_version_4": assemble([NAME], version=4),
        "c1_version_max": assemble([NAME], version=2**32 - 1),
        "c1_big_endian": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + sound[24:],
        "c2_tensors_max": assemble([NAME], [MATRIX], DATA, num_tensors=HUGE),
        "c2_pairs_max": assemble([NAME], [MATRIX], DATA, num_pairs=HUGE),
        "c2_tensors_1e9": assemble([NAME], [MATRIX], DATA, num_tensors=10**9),
        "c2_pairs_1e9": assemble([NAME], [MATRIX], DATA, num_pairs=10**9),
        "c2_tensors_100000": assemble([NAME], [MATRIX], DATA, num_tensors=100_000),
        "c2_pairs_60000": assemble([NAME], [MATRIX], DATA, num_pairs=60_000),
        "c2_pairs_wrap": assemble([NAME], [MATRIX], DATA, num_pairs=2**63 + 1),
        "c2_pairs_over_cap": assemble([NAME] * 65_537, [MATRIX], DATA),
        "c2_tensors_one_more": assemble([NAME], [MATRIX], DATA, num_tensors=2),
        "c2_pairs_one_more": assemble([NAME], [MATRIX], DATA, num_pairs=2),
        "c2_pairs_one_less": assemble([NAME, NAME], [MATRIX], DATA, num_pairs=1),
        "c3_data_cut": sound[:-1],
        "c3_header_cut": sound[:40],
    }


def _metadata() -> dict[str, bytes]:
    """C4 to C6 and the other rules of the key-value section."""

    def with_pair(raw: bytes, **options: Any) -> bytes:
        return assemble([NAME, raw], [MATRIX], DATA, **options)

    def value(kind: int, payload: bytes) -> bytes:
        return with_pair(string("x.y") + struct.pack("<I", kind) + payload)

    def array(kind: int, count: int, payload: bytes = b"") -> bytes:
        return value(ARRAY, struct.pack("<IQ", kind, count) + payload)

    def length(size: int) -> bytes:
        return struct.pack("<Q", size)

    nested = struct.pack("<IQ", ARRAY, 1) * 100_000
    files = {
        "c4_key_length_max": with_pair(length(HUGE) + b"abc"),
        "c4_key_length_2_40": with_pair(length(2**40) + b"abc"),
        "c4_text_length_max": value(STRING, length(HUGE) + b"abc"),
        "c4_text_length_2_40": value(STRING, length(2**40) + b"abc"),
        "c4_text_length_2_63": value(STRING, length(2**63) + b"abc"),
        "c4_array_u8_max": array(U8, HUGE),
        "c4_array_u64_wraps": array(U64, 2**61 + 1),
        "c4_array_f64_2_40": array(F64, 2**40),
        "c4_array_text_max": array(STRING, HUGE),
        "c4_array_text_2_40": array(STRING, 2**40),
        "c4_array_text_item_max": array(STRING, 1, length(HUGE) + b"abc"),
        "c4_array_text_one_more": array(STRING, 3, string("a") * 2 + length(2**20)),
        "c5_nested_arrays": value(ARRAY, nested),
        "c5_array_type_77": array(77, 1, bytes(8)),
        "c5_value_type_13": value(13, bytes(8)),
        "c5_value_type_max": value(2**32 - 1, bytes(8)),
        "c5_bool_2": value(BOOL, b"\x02"),
        "c5_bool_array_2": array(BOOL, 3, b"\x00\x01\x02"),
        "c5_key_empty": with_pair(pair("", 1)),
        "c5_key_twice": with_pair(NAME),
        "c5_key_too_long": with_pair(pair("k" * 65_536, 1)),
        "c5_key_not_utf8": with_pair(pair(b"\xff\xfe", 1)),
        "c5_key_surrogate": with_pair(pair(b"\xed\xa0\x80", 1)),
        "c5_text_not_utf8": with_pair(pair("x.y", b"\xc3\x28")),
        "c5_split_of_3": with_pair(pair("split.count", Typed(U16, 3))),
        "c5_split_of_max": with_pair(pair("split.count", Typed(U16, 65_535))),
        "c5_split_text": with_pair(pair("split.count", "3")),
        "c5_split_negative": with_pair(pair("split.count", -1)),
    }
    alignments = {
        "0": 0,
        "3": 3,
        "4": 4,
        "48": 48,
        "131072": 131_072,
        "2_31": 2**31,
        "negative": -32,
        "text": "32",
        "bool": True,
        "float": 32.0,
        "u64_max": HUGE,
        "array": [32],
    }
    for name, alignment in alignments.items():
        files[f"c6_alignment_{name}"] = with_pair(pair("general.alignment", alignment))
    return files


def _tensors() -> dict[str, bytes]:
    """C7: tensor records."""

    def one(dims: tuple[int, ...], type_name: str = "F32", offset: int = 0) -> bytes:
        return assemble([NAME], [record("a.weight", dims, TYPE_IDS[type_name], offset)], DATA)

    def typed(type_id: int) -> bytes:
        return assemble([NAME], [record("a.weight", (256, 1), type_id, 0)], DATA)

    def named(name: str | bytes) -> bytes:
        return assemble([NAME], [record(name, (64, 4), 0, 0)], DATA)

    def two(second: bytes, data: bytes = DATA * 2) -> bytes:
        return assemble([NAME], [MATRIX, second], data)

    files = {
        "c7_zero_dimension": one((0, 4)),
        "c7_second_dimension_zero": one((64, 0)),
        "c7_product_wraps": one((2**32, 2**32)),
        "c7_product_wraps_to_64": one((2**62 + 16, 4)),
        "c7_product_2_60": one((2**30, 2**30)),
        "c7_dimension_max": one((HUGE, HUGE, HUGE, HUGE)),
        "c7_too_large": one((64, 5)),
        "c7_rank_0": one(()),
        "c7_rank_5": one((2, 2, 2, 2, 2)),
        "c7_rank_1000": one((1,) * 1000),
        "c7_rank_max": assemble(
            [NAME], [string("a.weight") + struct.pack("<I", 2**32 - 1) + bytes(64)], DATA
        ),
        "c7_offset_odd": one((16, 4), offset=1),
        "c7_offset_not_aligned": one((16, 4), offset=16),
        "c7_offset_past_end": one((64, 4), offset=1024),
        "c7_offset_2_40": one((64, 4), offset=2**40),
        "c7_offset_wraps": one((64, 4), offset=2**64 - 1024),
        "c7_ragged_q4_k": one((250, 4), "Q4_K"),
        "c7_ragged_q4_0": one((48, 4), "Q4_0"),
        "c7_ragged_but_product_fits": one((64, 4), "Q6_K"),
        "c7_name_empty": named(""),
        "c7_name_too_long": named("n" * 256),
        "c7_name_not_utf8": named(b"a\xff.weight"),
        "c7_name_twice": two(record("a.weight", (64, 4), 0, 1024)),
        "c7_same_place": two(record("b.weight", (64, 4), 0, 0)),
        "c7_overlap_by_one": two(record("b.weight", (64, 4), 0, 992)),
        "c7_overlap_inside": two(record("b.weight", (8,), 0, 512)),
    }
    for name, type_id in {
        "unknown_99": 99,
        "unknown_max": 2**32 - 1,
        "withdrawn_4": 4,
        "withdrawn_31": 31,
        "withdrawn_38": 38,
        "iq2_xs": 17,
        "q8_k": 15,
        "i8": 24,
        "f64": 28,
    }.items():
        files[f"c7_type_{name}"] = typed(type_id)
    return files


def model_hostiles() -> Iterator[tuple[str, Writer]]:
    """Valid containers that must not load as a model."""
    for name, metadata in {**_hyperparameters(), **_tokenizers()}.items():
        yield name, lambda path, metadata=metadata: tiny_model(path, metadata=metadata)
    matrix = np.random.default_rng(1)
    replaced: dict[str, dict[str, Any]] = {
        "c7_missing_tensor": {"blk.1.ffn_up.weight": None},
        "c7_missing_embedding": {"token_embd.weight": None},
        "c7_missing_norm": {"output_norm.weight": None},
        "c7_transposed": {"blk.0.ffn_up.weight": plain(matrix.normal(size=(64, 128)))},
        "c7_norm_too_short": {"blk.0.attn_norm.weight": np.ones(63)},
        "c7_norm_as_matrix": {"blk.0.attn_norm.weight": np.ones((2, 32))},
        "c7_surplus_tensor": {"blk.0.extra.weight": np.ones(64)},
        "c7_surplus_layer": {"blk.2.attn_norm.weight": np.ones(64)},
        "c7_embedding_rank_3": {"token_embd.weight": np.ones((2, 150, 64))},
    }
    for name, tensors in replaced.items():
        yield name, lambda path, tensors=tensors: tiny_model(path, tensors=tensors)
    yield "c2_tensors_one_less", _write_one_tensor_less


def _write_one_tensor_less(path: Path) -> None:
    """The last record is not announced and is read as padding; the last tensor is missing."""
    content = bytearray(tiny_model(path).read_bytes())
    (count,) = struct.unpack_from("<Q", content, 8)
    struct.pack_into("<Q", content, 8, count - 1)
    path.write_bytes(content)


def _hyperparameters() -> dict[str, dict[str, Any]]:
    """C8: metadata changes of a tiny llama; None removes a key."""
    nan, inf = float("nan"), float("inf")
    wrong: dict[str, tuple[Any, ...]] = {
        "block_count": (0, 1, 3, 2**31, 1025, -1, "2", 2.5, None, True, [2]),
        "embedding_length": (0, 63, 128, 2**31, 2**18, -64, "64", None),
        "feed_forward_length": (0, 127, 2**31, "128", None, [128]),
        "attention.head_count": (0, 3, 5, 2**31, 1025, nan, None, "4"),
        "attention.head_count_kv": (0, 3, 8, 2**31, "2"),
        "attention.key_length": (0, 15, 32, 2**31),
        "attention.value_length": (0, 8, 2**31),
        "attention.layer_norm_rms_epsilon": (0.0, 1.0, -1e-6, nan, inf, "1e-6", None),
        "rope.freq_base": (0.0, -1.0, nan, inf, "1e4"),
        "rope.dimension_count": (0, 7, 32, 2**31),
        "rope.scaling.type": ("sideways", 1),
        "context_length": (0, 2**31, 2**26 + 1, -1, "512", None),
    }
    files = {
        f"c8_{key.rpartition('.')[2]}_{_label(value)}": {f"llama.{key}": value}
        for key, values in wrong.items()
        for value in values
    }
    files |= {
        f"c8_architecture_{_label(value)}": {"general.architecture": value}
        for value in (None, "", "mamba", "../llama", 7, "llama\n\x1b[31m")
    }
    for factor in (0.0, -2.0, nan, inf):
        files[f"c8_linear_factor_{_label(factor)}"] = {
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": factor,
        }
    files["c8_yarn_base_1"] = {
        "llama.rope.freq_base": 1.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    return files


def _tokenizers() -> dict[str, dict[str, Any]]:
    """C9: tokenizer changes of a tiny llama; None removes a key."""
    tokens = tiny_tokenizer("llama-bpe")["tokenizer.ggml.tokens"]
    wrong: dict[str, tuple[Any, ...]] = {
        "model": ("wordpiece", "", 3, None),
        "tokens": (None, "text", []),
        "token_type": ([1] * (NUM_TOKENS - 1), [1] * (NUM_TOKENS + 1), "normal", [99] * NUM_TOKENS),
        "bos_token_id": (NUM_TOKENS, 2**32 - 1, -1, "0", 1.5, [1, 2]),
        "eos_token_id": (NUM_TOKENS, 2**32 - 1, -1, "0"),
        "add_bos_token": ("true", 2, [True, False]),
        "merges": (None, "t h", ["nospace"], ["t  h"], [" "], [""], ["t never"], [*MERGES, "q zz"]),
    }
    files = {
        f"c9_{key}_{_label(value)}": {f"tokenizer.ggml.{key}": value}
        for key, values in wrong.items()
        for value in values
    }
    lists: dict[str, dict[str, Any]] = {
        "tokens": {
            "numbers": Typed(ARRAY, list(range(NUM_TOKENS)), of=U32),
            "too_few": tokens[:-1],
            "too_many": [*tokens, "more"],
            "all_equal": ["same"] * NUM_TOKENS,
            "two_equal": [*tokens[:-1], tokens[0]],
            "empty_texts": [""] * NUM_TOKENS,
        },
        "merges": {"numbers": Typed(ARRAY, [1, 2, 3], of=I32)},
        "token_type": {"floats": Typed(ARRAY, [1.0] * NUM_TOKENS, of=F32)},
    }
    files |= {
        f"c9_{key}_{name}": {f"tokenizer.ggml.{key}": value}
        for key, values in lists.items()
        for name, value in values.items()
    }
    files["c9_chat_template_number"] = {"tokenizer.chat_template": 7}
    return files


def _label(value: object) -> str:
    if isinstance(value, list):
        return f"list_{len(value)}_{_label(value[0]) if value else ''}"
    text = repr(value) if isinstance(value, str) else str(value)
    kept = "".join(c if c.isalnum() or c in ".-" else "_" for c in text)
    return kept + ("_text" if isinstance(value, str) else "")
