"""The library's functions and structures as ctypes; `src/native.h` says what they mean."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p

ABI_VERSION = 1  # of `tc_abi_version`: changes with any structure or signature here
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 30  # GGML ids, of weights and of caches
FILE, TILES = 0, 1  # layouts of a matrix
TILE_ROWS, GROUP = 8, 32
CPU_AVX2, CPU_AVX512, CPU_NEON, CPU_I8MM = 1, 2, 4, 8  # bits of `tc_cpu_features`


class Weight(Structure):
    """`tc_weight`: a matrix."""

    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_bytes", c_int64),
        ("type", c_int32),
        ("layout", c_int32),
    )


class Attention(Structure):
    """`tc_attention`: the attention of one layer in a step."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "half", "window")),
        ("scale", c_float),
        ("eps", c_float),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "rope", "k_cache", "v_cache")),
        *((name, c_int32) for name in ("cache_type", "block_size", "num_reqs", "num_tokens")),
        ("tables", c_void_p),
        ("max_blocks", c_int64),
        *((name, c_void_p) for name in ("rows", "starts", "seq_lens", "positions", "slots")),
        *((name, c_void_p) for name in ("prefix_len", "item_start", "heads", "out", "scratch")),
    )


class Layer(Structure):
    """`tc_layer`: one layer of a dense decoder."""

    _fields_ = (
        *((name, c_void_p) for name in ("attn_norm", "attn_update_norm")),
        *((name, c_void_p) for name in ("mlp_norm", "mlp_update_norm")),
        *((name, POINTER(Weight)) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "output_bias")),
        *((name, c_int32) for name in ("num_qkv", "num_output", "num_gate_up", "num_down")),
        *((name, c_int32) for name in ("group", "window")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "rope", "k_cache", "v_cache")),
    )


class Decoder(Structure):
    """`tc_decoder`: the layers of a dense decoder."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int32) for name in ("num_layers", "hidden", "intermediate")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "half")),
        *((name, c_int32) for name in ("activation", "cache_type", "block_size", "rounds")),
        ("eps", c_float),
        ("scale", c_float),
        ("last_update_norm", c_void_p),
    )


class Step(Structure):
    """`tc_step`: the tokens of a step."""

    _fields_ = (
        ("num_reqs", c_int32),
        ("num_tokens", c_int32),
        *((name, c_void_p) for name in ("rows", "starts", "seq_lens", "positions")),
        *((name, c_void_p) for name in ("slots", "tables")),
        ("table_rows", c_int64),
        ("max_blocks", c_int64),
        *((name, c_void_p) for name in ("prefix_len", "item_start", "x", "scratch")),
    )


# Results and arguments of each function.
FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "tc_abi_version": (c_int, ()),
    "tc_cpu_features": (c_int, ()),
    "tc_pool_create": (c_void_p, (c_int,)),
    "tc_pool_destroy": (None, (c_void_p,)),
    "tc_pool_size": (c_int, (c_void_p,)),
    "tc_tiles_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "tc_pack_tiles": (None, (c_void_p, POINTER(Weight), c_void_p)),
    "tc_dequantize": (c_int, (c_void_p, POINTER(Weight), c_void_p, c_int64, c_void_p)),
    "tc_is_supported": (c_int, (c_int32,)),
    "tc_rounded_bytes": (c_int64, (c_int64,)),
    "tc_linear_scratch": (c_int64, (c_int64, c_int64, c_int64, c_int)),
    "tc_linear": (
        None,
        (c_void_p, POINTER(Weight), c_int, c_void_p, c_int64, c_int, c_void_p, c_void_p),
    ),
    "tc_norm_rows": (
        None,
        (c_void_p,) * 5 + (c_float, c_int64, c_int64, c_void_p),
    ),
    "tc_act_mul_rows": (None, (c_void_p, c_void_p, c_int, c_int64, c_int64, c_void_p)),
    "tc_attention_run": (None, (c_void_p, POINTER(Attention))),
    "tc_attention_scratch": (c_int64, (POINTER(Attention), c_int)),
    "tc_step_scratch": (c_int64, (POINTER(Decoder), POINTER(Step), c_int)),
    "tc_run_layers": (None, (c_void_p, POINTER(Decoder), POINTER(Step), c_int32, c_int32)),
}


def declare(library: ctypes.CDLL) -> None:
    """Set the types of the functions that a loaded library has."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
