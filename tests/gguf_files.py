"""GGUF files for tests: a small writer, an encoder for each block type, and whole tiny models.

Written from the format's description and independent of the reader, so that both cannot be wrong in
the same way. `assemble` lets a test write what no correct writer would.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q",
    I64: "q", F64: "d",
}  # fmt: skip
TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30,
    "IQ2_XXS": 16, "MXFP4": 39,
}  # fmt: skip


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type; `of` is the element type of an array."""

    kind: int
    value: Any
    of: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor as bytes: dims in file order (dims[0] contiguous), GGML type number, data."""

    dims: tuple[int, ...]
    type_id: int
    data: bytes


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _infer(value: Any) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, int):
        fits = 0 <= value < 1 << 32
        return Typed(U32 if fits else I32 if value < 0 else U64, value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, str | bytes):
        return Typed(STRING, value)
    first = _infer(value[0]).kind if len(value) else U32
    return Typed(ARRAY, value, of=I32 if first == U32 else first)


def _payload(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


def pair(key: str | bytes, value: Any) -> bytes:
    """One metadata entry; the type is inferred unless `value` is `Typed` (ints in lists: i32)."""
    typed = _infer(value)
    head = string(key) + struct.pack("<I", typed.kind)
    if typed.kind != ARRAY:
        return head + _payload(typed.kind, typed.value)
    assert typed.of is not None
    items = b"".join(_payload(typed.of, item) for item in typed.value)
    return head + struct.pack("<IQ", typed.of, len(typed.value)) + items


def record(name: str | bytes, dims: Iterable[int], type_id: int, offset: int) -> bytes:
    """One tensor record."""
    sizes = tuple(dims)
    head = string(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return head + struct.pack("<IQ", type_id, offset)


def assemble(
    pairs: list[bytes],
    records: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file from its pieces; the counts may be wrong."""
    records = records or []
    num_tensors = len(records) if num_tensors is None else num_tensors
    num_pairs = len(pairs) if num_pairs is None else num_pairs
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs)
    head += b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored | np.ndarray],
    *,
    alignment: int = 32,
    version: int = 3,
) -> Path:
    """Write a valid file; arrays of floats are stored as F32 (float16 as F16)."""
    pairs = [pair(key, value) for key, value in metadata.items()]
    if alignment != 32 and "general.alignment" not in metadata:
        pairs.append(pair("general.alignment", alignment))
    records, chunks, offset = [], [], 0
    for name, tensor in tensors.items():
        stored = tensor if isinstance(tensor, Stored) else plain(tensor)
        records.append(record(name, stored.dims, stored.type_id, offset))
        chunks.append(stored.data + bytes(-len(stored.data) % alignment))
        offset += len(chunks[-1])
    path.write_bytes(
        assemble(pairs, records, b"".join(chunks), version=version, alignment=alignment)
    )
    return path


def plain(array: np.ndarray) -> Stored:
    """A float tensor of any rank: float16 as F16, everything else as F32."""
    is_half = array.dtype == np.float16
    data = np.ascontiguousarray(array, "<f2" if is_half else "<f4")
    return Stored(array.shape[::-1], TYPE_IDS["F16" if is_half else "F32"], data.tobytes())


def quantised(array: np.ndarray, type_name: str) -> Stored:
    """(out, in) or (n,) floats in a storage type."""
    encode, weights = ENCODERS[type_name]
    blocks = encode(np.asarray(array, np.float64).reshape(-1, weights))
    return Stored(array.shape[::-1], TYPE_IDS[type_name], blocks.tobytes())


# --- Encoders: (n, block_weights) float64 to (n, block_bytes) uint8 ---------------------------


def _bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    """(n, ...) numbers to (n, bytes) of a little-endian type."""
    return np.ascontiguousarray(array.astype(dtype)).view(np.uint8).reshape(len(array), -1)


def _half(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) as fp16 bytes (n, 2) and the values that were stored (n, 1)."""
    stored = x.astype("<f2").reshape(-1, 1)
    return _bytes(stored, "<f2"), stored.astype(np.float64)


def _div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(x, y, out=np.zeros(np.broadcast_shapes(x.shape, y.shape)), where=y != 0)


def _level(x: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(_div(x, scale)), low, high).astype(np.int64)


def _peak(x: np.ndarray) -> np.ndarray:
    """The entry of largest magnitude along the last axis, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


def _pack32(q: np.ndarray) -> np.ndarray:
    """(n, 32) nibbles to (n, 16) bytes."""
    return (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)


def _fifth(q: np.ndarray) -> np.ndarray:
    return _bytes(((q >> 4) << np.arange(32)).sum(1), "<u4")


def _join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=1)


def _symmetric(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    raw, d = _half(_peak(x) / -levels)
    return raw, _level(x, d, -levels, levels - 1) + levels


def _affine(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    d_raw, d = _half((x.max(1) - x.min(1)) / levels)
    m_raw, m = _half(x.min(1))
    return _join(d_raw, m_raw), _level(x - m, d, 0, levels)


def encode_q4_0(x: np.ndarray) -> np.ndarray:
    raw, q = _symmetric(x, 8)
    return _join(raw, _pack32(q))


def encode_q4_1(x: np.ndarray) -> np.ndarray:
    raw, q = _affine(x, 15)
    return _join(raw, _pack32(q))


def encode_q5_0(x: np.ndarray) -> np.ndarray:
    raw, q = _symmetric(x, 16)
    return _join(raw, _fifth(q), _pack32(q & 15))


def encode_q5_1(x: np.ndarray) -> np.ndarray:
    raw, q = _affine(x, 31)
    return _join(raw, _fifth(q), _pack32(q & 15))


def encode_q8_0(x: np.ndarray) -> np.ndarray:
    raw, d = _half(np.abs(x).max(1) / 127)
    return _join(raw, _bytes(_level(x, d, -127, 127), "i1"))


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def _nearest(x: np.ndarray) -> np.ndarray:
    return np.abs(x[..., None] - IQ4).argmin(-1)


def encode_iq4_nl(x: np.ndarray) -> np.ndarray:
    raw, d = _half(_peak(x) / -127)
    return _join(raw, _pack32(_nearest(_div(x, d))))


def encode_iq4_xs(x: np.ndarray) -> np.ndarray:
    subs = x.reshape(-1, 8, 32)
    scales = _peak(subs) / -127
    raw, d = _half(np.abs(scales).max(1) / 31)
    s = _level(scales, d, -32, 31)
    q = _nearest(_div(subs, (d * s)[..., None]))
    s = s + 32
    high = _bytes(((s >> 4) << 2 * np.arange(8)).sum(1), "<u2")
    low = (s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4).astype(np.uint8)
    return _join(raw, high, low, _pack32(q.reshape(-1, 32)).reshape(-1, 128))


def _pack_quarters(q: np.ndarray) -> np.ndarray:
    """(n, 256) two-bit values to (n, 64): byte 32h + l has weights 128h + 32s + l."""
    return (q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6])[:, None]).sum(2).reshape(-1, 64)


def encode_q2_k(x: np.ndarray) -> np.ndarray:
    subs = x.reshape(-1, 16, 16)
    lows = np.minimum(subs.min(2), 0)
    scales = (subs.max(2) - lows) / 3
    d_raw, d = _half(scales.max(1) / 15)
    m_raw, dmin = _half(-lows.min(1) / 15)
    s, m = _level(scales, d, 0, 15), _level(-lows, dmin, 0, 15)
    q = _level(subs + (dmin * m)[..., None], (d * s)[..., None], 0, 3)
    packed = _pack_quarters(q.reshape(-1, 256)).astype(np.uint8)
    return _join((s | m << 4).astype(np.uint8), packed, d_raw, m_raw)


def encode_q3_k(x: np.ndarray) -> np.ndarray:
    subs = x.reshape(-1, 16, 16)
    scales = _peak(subs) / -4
    raw, d = _half(np.abs(scales).max(1) / 31)
    s = _level(scales, d, -32, 31)
    q = (_level(subs, (d * s)[..., None], -4, 3) + 4).reshape(-1, 256)
    s = s + 32
    hmask = ((q >> 2).reshape(-1, 8, 32) << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    low = (s[:, :8] & 15 | (s[:, 8:] & 15) << 4).astype(np.uint8)
    high = ((s >> 4).reshape(-1, 4, 4) << 2 * np.arange(4)[:, None]).sum(1).astype(np.uint8)
    return _join(hmask, _pack_quarters(q & 3).astype(np.uint8), low, high, raw)


def _with_minimums(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 16 bytes of Q4_K and Q5_K, and the integers (n, 8, 32)."""
    subs = x.reshape(-1, 8, 32)
    lows = np.minimum(subs.min(2), 0)
    scales = (subs.max(2) - lows) / levels
    d_raw, d = _half(scales.max(1) / 63)
    m_raw, dmin = _half(-lows.min(1) / 63)
    s, m = _level(scales, d, 0, 63), _level(-lows, dmin, 0, 63)
    q = _level(subs + (dmin * m)[..., None], (d * s)[..., None], 0, levels)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return _join(d_raw, m_raw, _join(first, second, third).astype(np.uint8)), q


def _pack_pairs(q: np.ndarray) -> np.ndarray:
    """(n, 8, 32) nibbles to (n, 128): sub-blocks 2c and 2c + 1 share bytes."""
    return (q[:, ::2] | q[:, 1::2] << 4).reshape(-1, 128).astype(np.uint8)


def encode_q4_k(x: np.ndarray) -> np.ndarray:
    head, q = _with_minimums(x, 15)
    return _join(head, _pack_pairs(q))


def encode_q5_k(x: np.ndarray) -> np.ndarray:
    head, q = _with_minimums(x, 31)
    qh = ((q >> 4) << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    return _join(head, qh, _pack_pairs(q & 15))


def encode_q6_k(x: np.ndarray) -> np.ndarray:
    subs = x.reshape(-1, 16, 16)
    scales = _peak(subs) / -32
    raw, d = _half(np.abs(scales).max(1) / 127)
    s = _level(scales, d, -127, 127)
    q = (_level(subs, (d * s)[..., None], -32, 31) + 32).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128).astype(np.uint8)
    high = ((q >> 4) << np.array([0, 2, 4, 6])[:, None]).sum(2).reshape(-1, 64).astype(np.uint8)
    return _join(low, high, _bytes(s, "i1"), raw)


def encode_mxfp4(x: np.ndarray) -> np.ndarray:
    """0 the exponent, 1 qs[16]."""
    return gguf.quants.quantize(x.astype("<f4"), gguf.GGMLQuantizationType.MXFP4)


def encode_iq2_xxs(x: np.ndarray) -> np.ndarray:
    """0 d, then per 32 weights four indices of a table of magnitudes, and signs and a scale."""
    gguf.quants.IQ2_XXS.init_grid()
    grid = gguf.quants.IQ2_XXS.grid.reshape(256, 8).astype(np.float64)
    groups = x.reshape(-1, 8, 4, 8)
    is_negative = groups < 0
    least = np.abs(groups).argmin(-1)[..., None]
    is_odd = is_negative.sum(-1, keepdims=True) % 2 == 1
    np.put_along_axis(is_negative, least, np.take_along_axis(is_negative, least, -1) ^ is_odd, -1)
    size = np.where(is_negative, -groups, groups)  # negative where a sign is wrong
    half, d = _half(np.abs(x).max(1) / 43 * 4 / 15.5)
    scale = d[:, None, :] * (0.5 + np.arange(16)) / 4  # (n, 1, 16)
    best = np.full(groups.shape[:2], np.inf)
    chosen = np.zeros(groups.shape[:3], np.int64)
    levels = np.zeros(groups.shape[:2], np.int64)
    for level in range(16):
        values = scale[..., level][..., None, None, None] * grid  # (n, 1, 1, 256, 8)
        errors = ((size[..., None, :] - values) ** 2).sum(-1)
        error = errors.min(-1).sum(-1)
        is_better = error < best
        best = np.where(is_better, error, best)
        chosen = np.where(is_better[..., None], errors.argmin(-1), chosen)
        levels = np.where(is_better, level, levels)
    signs = (is_negative[..., :7] << np.arange(7)).sum(-1)
    word = (signs << (7 * np.arange(4))).sum(-1) | levels << 28
    word = np.ascontiguousarray(word.astype("<u4")[..., None]).view(np.uint8)
    groups = np.concatenate([chosen.astype(np.uint8), word], axis=-1)
    return np.concatenate([half, groups.reshape(len(x), 64)], axis=1)


ENCODERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "F32": (lambda x: _bytes(x, "<f4"), 1),
    "F16": (lambda x: _bytes(x, "<f2"), 1),
    "BF16": (lambda x: _bytes((_bytes(x, "<f4").view("<u4") + 0x8000) >> 16, "<u2"), 1),
    "Q4_0": (encode_q4_0, 32),
    "Q4_1": (encode_q4_1, 32),
    "Q5_0": (encode_q5_0, 32),
    "Q5_1": (encode_q5_1, 32),
    "Q8_0": (encode_q8_0, 32),
    "IQ4_NL": (encode_iq4_nl, 32),
    "Q2_K": (encode_q2_k, 256),
    "Q3_K": (encode_q3_k, 256),
    "Q4_K": (encode_q4_k, 256),
    "Q5_K": (encode_q5_k, 256),
    "Q6_K": (encode_q6_k, 256),
    "IQ4_XS": (encode_iq4_xs, 256),
    "MXFP4": (encode_mxfp4, 32),
    "IQ2_XXS": (encode_iq2_xxs, 256),
}

# --- Whole models ------------------------------------------------------------------------------

MERGES = (
    "t h", "th e", "i n", "Ġ the", "e r", "a n", "r e", "o n", "Ġ a", "o u", "l l", "h e", "Ġ in",
    "an d",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The 256 characters of byte-level BPE, in the order of the bytes."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(spare)) for b in range(256)]


def tiny_tokenizer(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of 300 tokens; the last three are the special ones."""
    tokens = byte_characters() + [merge.replace(" ", "") for merge in MERGES]
    num_fill = NUM_TOKENS - len(tokens) - len(SPECIAL)
    tokens += [f"filler{len(tokens) + i}" for i in range(num_fill)] + list(SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (NUM_TOKENS - 3) + [3] * 3,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": NUM_TOKENS - 3,
        "tokenizer.ggml.eos_token_id": NUM_TOKENS - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_model(
    path: Path,
    arch: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ff: int = 128,
    context: int = 512,
    qtype: str = "Q8_0",
    tied: bool | None = None,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Stored | np.ndarray | None] | None = None,
) -> Path:
    """Write a whole random model: llama, qwen2, qwen3 or gemma3.

    `metadata` and `tensors` replace or add entries of the file by name; None removes one. `tied`
    leaves out output.weight (default: all but llama).
    """
    pairs: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"{arch}-tiny",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": ff,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 10000.0,
        **tiny_tokenizer("llama-bpe" if arch == "llama" else "qwen2"),
    }
    if arch == "gemma3":
        pairs["gemma3.attention.sliding_window"] = 6
        pairs["gemma3.attention.sliding_window_pattern"] = 2
    rng = np.random.default_rng(seed)
    weights: dict[str, Stored | np.ndarray] = {
        "token_embd.weight": quantised(rng.normal(size=(NUM_TOKENS, hidden)), qtype),
        "output_norm.weight": 1 + 0.1 * rng.normal(size=hidden),
    }
    if not (arch != "llama" if tied is None else tied):
        weights["output.weight"] = quantised(rng.normal(size=(NUM_TOKENS, hidden)), qtype)
    for layer in range(layers):
        for name, shape in _layer_shapes(arch, hidden, heads, kv_heads, head_dim, ff).items():
            if len(shape) == 2:
                matrix = rng.normal(size=shape) / np.sqrt(shape[1])
                weights[f"blk.{layer}.{name}"] = quantised(matrix, qtype)
            else:
                start = 0.0 if name.endswith("bias") else 1.0
                weights[f"blk.{layer}.{name}"] = start + 0.1 * rng.normal(size=shape)
    return write_gguf(path, _replaced(pairs, metadata or {}), _replaced(weights, tensors or {}))


def _replaced(entries: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**entries, **changes}.items() if value is not None}


def _layer_shapes(
    arch: str, hidden: int, heads: int, kv_heads: int, head_dim: int, ff: int
) -> dict[str, tuple[int, ...]]:
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ff, hidden),
        "ffn_up.weight": (ff, hidden),
        "ffn_down.weight": (hidden, ff),
    }
    if arch == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if arch == "gemma3":
        shapes |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    return shapes
