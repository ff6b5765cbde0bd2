"""Memory of a model on a device: weights in their stored forms, keys and values of tokens.

The engine, the choice of a dtype, the error of a model that does not fit and `tiercel inspect` take
their figures from here. Free of PyTorch: the tensor table of a file is all it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from tiercel.models.registry import architecture, shard_rules
from tiercel.models.shard_check import possible_sizes
from tiercel.models.sharding import WHOLE, Cut, Sharding, cut_stored
from tiercel.resting import (
    ITEM_BYTES,
    head_dtype,
    keeps_q8_planes,
    resting_bytes,
    select_form,
    uses_native,
)

if TYPE_CHECKING:
    from tiercel.models.config import ModelConfig
    from tiercel.models.source import ModelSource
    from tiercel.models.stored import StoredWeight
    from tiercel.quant_types import QuantType

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


class Footprint(Struct, frozen=True):
    """Weights of a model at rest on a device.

    Attributes:
        dtype: of the activations.
        forms: bytes of each form by its name for people, the largest first.
        whole_bytes: of weights that are not split where several GPUs share the model.
    """

    dtype: str
    forms: Mapping[str, int]
    whole_bytes: int

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
    sharding: Sharding = WHOLE,
) -> Footprint:
    """Bytes of a model's weights on a device, in the forms that loading gives them.

    Args:
        source: a checked file.
        dtype: of the activations.
        device_type: ``cpu`` or ``cuda``.
        dense_copies: whether packed weights on a GPU keep dense copies.
        has_draft_head: whether layers that only draft are loaded too.
        sharding: of the rank whose part it is; rank 0 has the largest.
    """
    tally = _Tally(source, sharding)
    if source.stored:
        _add_stored(
            tally,
            source,
            dtype,
            device_type,
            dense_copies=dense_copies,
            has_draft_head=has_draft_head,
        )
        return tally.footprint(dtype)
    head = "head.weight" if "head.weight" in source.names else "embed.weight"

    @cache  # layers repeat their matrices
    def form_of(qtype: QuantType, shape: tuple[int, int], dtype: str) -> tuple[str, int]:
        form = select_form(qtype, shape, dtype, device_type)
        size = resting_bytes(qtype, shape, dtype, device_type, dense_copies=dense_copies)
        return _FORM_NAMES.get(form, dtype), size

    def add_matrix(name: str, dtype: str) -> None:
        qtype = source.tensors[source.names[name]].qtype
        tally.add(name, *form_of(qtype, tally.shape(name), dtype))

    add_matrix(head, head_dtype(dtype, device_type))
    for name, stored in source.names.items():
        if name == "head.weight" or (not has_draft_head and _drafts_only(name, source.config)):
            continue
        info, (rows, columns) = source.tensors[stored], tally.shape(name)
        if name == "embed.weight":
            tally.add(name, STORED, rows * info.qtype.row_bytes(columns))
        elif info.shape[0] == 1:
            tally.add(name, "float32", columns * ITEM_BYTES["float32"])
        else:
            add_matrix(name, dtype)
    return tally.footprint(dtype)


class _Tally:
    """Bytes of a rank's parts of weights, by form."""

    def __init__(self, source: ModelSource, sharding: Sharding) -> None:
        self._source = source
        self._sharding = sharding
        self._rules = shard_rules(source.family)
        self._forms: Counter[str] = Counter()
        self._whole_bytes = 0

    def cut(self, name: str) -> Cut | None:
        """The part of a weight that the rank holds; None for all of it."""
        if self._sharding.size == 1:
            return None
        return self._rules.cut(self._source.config, self._sharding, name)

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of the rank's part of a matrix of a dense decoder."""
        whole, cut = self._source.tensors[self._source.names[name]].shape, self.cut(name)
        rows, columns = whole if cut is None else cut.shape(whole)
        return rows, columns

    def add(self, name: str, form: str, size: int) -> None:
        """Count bytes of the rank's part of a weight."""
        self._forms[form] += size
        if self.cut(name) is None:
            self._whole_bytes += size

    def footprint(self, dtype: str) -> Footprint:
        """What was counted."""
        return Footprint(dtype, dict(self._forms.most_common()), self._whole_bytes)


def _add_stored(
    tally: _Tally,
    source: ModelSource,
    dtype: str,
    device_type: str,
    *,
    dense_copies: bool,
    has_draft_head: bool,
) -> None:
    """Count the weights of a family with `ModelSource.stored`.

    Stacks of experts and block formats rest as stored, float matrices in the dtype of the
    activations; Q8_0 on a GPU in planes, beside dense copies if there is room; vectors and what is
    no `.weight` in float32; tables in int64.
    """
    for name, stored in source.stored.items():
        if name.startswith("mtp.") and not has_draft_head:
            continue
        cut = tally.cut(name)
        if cut is not None:
            stored = cut_stored(stored, cut)
        if name == "embed.weight":
            tally.add(name, STORED, stored.nbytes)
            continue
        for form, size in _stored_forms(name, stored, dtype, device_type, dense_copies):
            tally.add(name, form, size)


def _stored_forms(
    name: str, stored: StoredWeight, dtype: str, device_type: str, dense_copies: bool
) -> list[tuple[str, int]]:
    """The forms of a weight for people, and the bytes of each."""
    qtype, count = stored.qtype, math.prod(stored.shape)
    kind = head_dtype(dtype, device_type) if name == "head.weight" else dtype
    if stored.limit:
        return [("int64", count * 8)]
    if len(stored.shape) == 1 or not name.endswith(".weight"):
        return [("float32", count * ITEM_BYTES["float32"])]
    if qtype.is_float:
        is_mapped = uses_native(device_type)
        form = _FORM_NAMES["mapped"] if is_mapped else kind
        return [(form, stored.nbytes if is_mapped else count * ITEM_BYTES[kind])]
    *stack, rows, columns = stored.shape
    form = "stored" if stack else select_form(qtype, (rows, columns), kind, device_type)
    if form == "stored":
        return [(qtype.name, stored.nbytes)]
    size = resting_bytes(qtype, (rows, columns), kind, device_type, dense_copies=False)
    dense = _FORM_NAMES.get(form, kind if form == "dense" else form), size
    if keeps_q8_planes(qtype, (rows, columns), kind, device_type):
        return [(qtype.name, stored.nbytes), dense][: 1 + dense_copies]
    return [dense]


def _drafts_only(name: str, config: ModelConfig) -> bool:
    layer = name.split(".")[1] if name.startswith("layers.") else "0"
    return int(layer) >= config.num_layers


def cache_bytes(
    config: ModelConfig,
    num_tokens: int,
    dtype: str,
    device_type: str = "cuda",
    kv_dtype: str = "auto",
    sharding: Sharding = WHOLE,
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
        sharding: of the rank whose memory it is: one of a dense decoder keeps its own heads' keys
            and values; other models keep all on every rank.
    """
    own = architecture(config.arch, config.arch).cache_bytes
    if own is not None:
        return own(config, num_tokens, dtype, device_type, kv_dtype)
    kept = [
        min(num_tokens, config.sliding_window) if kind == "sliding" else num_tokens
        for kind in config.layer_types
    ]
    first, last = sharding.kv_part(config.num_kv_heads)
    return 2 * (last - first) * config.head_dim * ITEM_BYTES[dtype] * sum(kept)


def gpus_that_fit(
    source: ModelSource,
    dtype: str,
    num_tokens: int,
    available: int,
    *,
    kind: Sharding = WHOLE,
    kv_dtype: str = "auto",
    has_draft_head: bool = False,
) -> list[int]:
    """Numbers of GPUs on which a model and the cache of one sequence fit, of those that can be.

    Args:
        source: a checked file.
        dtype: of the activations.
        num_tokens: of the sequence.
        available: bytes of one GPU.
        kind: how GPUs share it, see `sharding_kind`.
        kv_dtype: the option of that name.
        has_draft_head: whether layers that only draft are loaded too.
    """
    config = source.config if has_draft_head else replace(source.config, num_mtp_layers=0)
    fitting = []
    for size in possible_sizes(source, kind):
        rank = kind.of(0, size)
        needed = weight_footprint(
            source, dtype, "cuda", has_draft_head=has_draft_head, sharding=rank
        ).nbytes
        needed += cache_bytes(config, num_tokens, dtype, "cuda", kv_dtype, rank)
        if needed <= available:
            fitting.append(size)
    return fitting
