"""Memory of a model on a device: weights in their stored forms, keys and values of tokens.

The engine, the choice of a dtype, the error of a model that does not fit and `tiercel inspect` take
their figures from here. Free of PyTorch: the tensor table of a file is all it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiercel.resting import ITEM_BYTES, head_dtype, resting_bytes, select_form

if TYPE_CHECKING:
    from tiercel.models.config import ModelConfig
    from tiercel.models.source import ModelSource

# Names for people of the forms of `resting.select_form`; dense forms are named by their dtype.
_FORM_NAMES: Final = {
    "planes1": "4-bit planes",
    "planes2": "pairs of 4-bit planes",
    "packed": "packed",
    "stored": "as stored",
}
STORED: Final = _FORM_NAMES["stored"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Weights of a model at rest on a device.

    Attributes:
        dtype: of the activations.
        forms: bytes of each form by its name for people, the largest first.
    """

    dtype: str
    forms: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.forms.values())


def weight_footprint(
    source: ModelSource,
    dtype: str,
    device_type: str,
    *,
    dense_copies: bool = False,
    has_draft_head: bool = False,
) -> Footprint:
    """Bytes of a model's weights on a device, in the forms that loading gives them.

    Args:
        source: a checked file.
        dtype: of the activations.
        device_type: ``cpu`` or ``cuda``.
        dense_copies: whether packed weights on a GPU keep dense copies.
        has_draft_head: whether layers that only draft are loaded too.
    """
    forms: Counter[str] = Counter()
    head = "head.weight" if "head.weight" in source.names else "embed.weight"

    def add(name: str, dtype: str) -> None:
        info = source.tensors[source.names[name]]
        form = select_form(info.qtype, info.shape[0], dtype, device_type)
        size = resting_bytes(info.qtype, info.shape, dtype, device_type, dense_copies=dense_copies)
        forms[_FORM_NAMES.get(form, dtype)] += size

    add(head, head_dtype(dtype, device_type))
    for name, stored in source.names.items():
        if name == "head.weight" or (not has_draft_head and _drafts_only(name, source.config)):
            continue
        info = source.tensors[stored]
        if name == "embed.weight":
            forms[STORED] += info.nbytes
        elif info.shape[0] == 1:
            forms["float32"] += info.shape[1] * ITEM_BYTES["float32"]
        else:
            add(name, dtype)
    return Footprint(dtype, dict(forms.most_common()))


def _drafts_only(name: str, config: ModelConfig) -> bool:
    layer = name.split(".")[1] if name.startswith("layers.") else "0"
    return int(layer) >= config.num_layers


def cache_bytes(config: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Keys and values of one sequence; sliding layers keep those inside their window.

    Args:
        config: the model's shape.
        num_tokens: of the sequence.
        dtype: of the cache, which is that of the activations.
    """
    kept = [
        min(num_tokens, config.sliding_window) if kind == "sliding" else num_tokens
        for kind in config.layer_types
    ]
    return 2 * config.num_kv_heads * config.head_dim * ITEM_BYTES[dtype] * sum(kept)
