"""How matrices rest for the native library, from their types alone. Free of PyTorch.

tiles    rearranged once, in memory of their own: 8 rows end to end (`src/native.h`)
mapped   the bytes of the file as they are, in the map of the file
"""

from __future__ import annotations

from tiercel.kernels.native.library import library, native_refusal


def has_native() -> bool:
    """Whether the library is loaded, so that a CPU computes with it."""
    return not native_refusal()


def native_form(ggml_id: int, rows: int, cols: int) -> str:
    """``tiles``, ``mapped``, or "" for a type that the library does not multiply.

    Args:
        ggml_id: the type; negative for formats that are none of GGML's.
        rows: output features.
        cols: input features.
    """
    if not is_native_type(ggml_id):
        return ""
    return "tiles" if tiles_bytes(ggml_id, rows, cols) else "mapped"


def is_native_type(ggml_id: int) -> bool:
    """Whether the library decodes and multiplies a type; negative ids are none of GGML's."""
    return ggml_id >= 0 and bool(library().lib.tc_is_supported(ggml_id))


def tiles_bytes(ggml_id: int, rows: int, cols: int) -> int:
    """Bytes of a matrix as tiles; 0 for one that rests mapped."""
    found: int = library().lib.tc_tiles_bytes(ggml_id, rows, cols)
    return found
