"""Memory of a model on a device: weights in their stored forms, keys and values of tokens.

The engine, the choice of a dtype, the error of a model that does not fit and `tiercel inspect` take
their figures from here. Free of PyTorch: the tensor table of a file is all it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiercel.models.registry import architecture
from tiercel.resting import ITEM_BYTES, head_dtype, resting_bytes, select_form, uses_native

if TYPE_CHECKING:
    from tiercel.models.config import ModelConfig
    from tiercel.models.source import ModelSource

# Names for people of the forms of `resting.select_form`; dense forms are named by their dtype.
_FORM_NAMES: Final = {
    "planes1": "4-bit planes",
    "planes2": "pairs of 4-bit planes",
    "packed": "packed",
    "tiles": "8-row tiles",
    "mapped": "mapped from the file",
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
    if source.stored:
        return _stored_footprint(source, dtype, device_type, has_draft_head=has_draft_head)
    forms: Counter[str] = Counter()
    head = "head.weight" if "head.weight" in source.names else "embed.weight"

    def add(name: str, dtype: str) -> None:
        info = source.tensors[source.names[name]]
        form = select_form(info.qtype, info.shape, dtype, device_type)
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


def _stored_footprint(
    source: ModelSource, dtype: str, device_type: str, *, has_draft_head: bool
) -> Footprint:
    """The same of a family with `ModelSource.stored`.

    Stacks of experts and block formats rest as stored, float matrices in the dtype of the
    activations; vectors and what is no `.weight` in float32; tables in int64.
    """
    forms: Counter[str] = Counter()
    for name, stored in source.stored.items():
        if name.startswith("mtp.") and not has_draft_head:
            continue
        qtype, count = stored.qtype, math.prod(stored.shape)
        if stored.limit:
            forms["int64"] += count * 8
        elif len(stored.shape) == 1 or not name.endswith(".weight"):
            forms["float32"] += count * ITEM_BYTES["float32"]
        elif name == "embed.weight":
            forms[STORED] += stored.nbytes
        elif qtype.is_float:
            kind = head_dtype(dtype, device_type) if name == "head.weight" else dtype
            is_mapped = uses_native(device_type)
            size = stored.nbytes if is_mapped else count * ITEM_BYTES[kind]
            forms[_FORM_NAMES["mapped"] if is_mapped else kind] += size
        elif len(stored.shape) == 3:
            forms[qtype.name] += stored.nbytes
        else:
            kind = head_dtype(dtype, device_type) if name == "head.weight" else dtype
            rows, columns = stored.shape
            form = select_form(qtype, (rows, columns), kind, device_type)
            size = resting_bytes(qtype, (rows, columns), kind, device_type, dense_copies=False)
            if form == "stored":
                form, size = qtype.name, stored.nbytes
            forms[_FORM_NAMES.get(form, kind if form == "dense" else form)] += size
    return Footprint(dtype, dict(forms.most_common()))


def _drafts_only(name: str, config: ModelConfig) -> bool:
    layer = name.split(".")[1] if name.startswith("layers.") else "0"
    return int(layer) >= config.num_layers


def cache_bytes(
    config: ModelConfig,
    num_tokens: int,
    dtype: str,
    device_type: str = "cuda",
    kv_dtype: str = "auto",
) -> int:
    """Bytes that one sequence keeps.

    Of dense decoders: keys and values, in sliding layers those inside their window. Of other models
    what the architecture says.

    Args:
        config: the model's shape.
        num_tokens: of the sequence.
        dtype: of the activations, which is that of keys and values.
        device_type: ``cpu`` or ``cuda``; some models keep another form on each.
        kv_dtype: the option of that name, for models that have a choice.
    """
    own = architecture(config.arch, config.arch).cache_bytes
    if own is not None:
        return own(config, num_tokens, dtype, device_type, kv_dtype)
    kept = [
        min(num_tokens, config.sliding_window) if kind == "sliding" else num_tokens
        for kind in config.layer_types
    ]
    return 2 * config.num_kv_heads * config.head_dim * ITEM_BYTES[dtype] * sum(kept)
