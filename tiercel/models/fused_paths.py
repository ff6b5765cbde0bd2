"""Which of the fused kernels run a model, and why not: said at load, by `inspect` and by `doctor`.

Two kernels join what single kernels do: `fused_decode_step` runs all layers for one token,
`fused_layer_tail` all between two attentions for up to 16 tokens. Each is built for some sizes and
types. The functions here answer from a file's header alone. Loading decides by the same rules, from
the weights at rest. Free of PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Final

from tiercel import env
from tiercel.kernels.fused import fused_decode_step_geometry, fused_layer_tail_geometry
from tiercel.kernels.fused.fused_decode_step_geometry import DecoderShape, StepGeometry
from tiercel.kernels.fused.fused_layer_tail_geometry import Matrix
from tiercel.kernels.fused.fused_refusal import Refusal
from tiercel.models.sharding import WHOLE, Sharding
from tiercel.quant_types import QuantType

if TYPE_CHECKING:
    from tiercel.models.config import ModelConfig
    from tiercel.models.source import ModelSource

FUSED_PATHS: Final = ("fused_decode_step", "fused_layer_tail")
USED: Final = "used"
HOPPER_SMS: Final = 132  # of an H100 SXM and of an H200
_STEP_PARTS: Final = {
    **{name: (name,) for name in ("q", "k", "v", "o", "down")},
    "gate_up": ("gate", "up"),
}
_LOG: Final = logging.getLogger(__name__)


def decoder_shape(config: ModelConfig, max_tokens: int, sharding: Sharding = WHOLE) -> DecoderShape:
    """A decoder, or a rank's part of it, as the kernel of whole steps sees it.

    Args:
        config: of the model.
        max_tokens: of a context.
        sharding: of the rank.
    """
    first_kv_head, last_kv_head = sharding.kv_part(config.num_kv_heads)
    first, last = sharding.inner_part(config.intermediate_size)
    return DecoderShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=last - first,
        num_heads=config.num_heads // sharding.size,
        num_kv_heads=last_kv_head - first_kv_head,
        head_dim=config.head_dim,
        rotary_dim=config.rope.rotary_dim,
        max_tokens=max_tokens,
        activation=config.activation,
        has_update_norms=config.sandwich_norms,
        window=config.sliding_window if "sliding" in config.layer_types else 0,
        sliding=tuple(kind == "sliding" for kind in config.layer_types),
        ranks=sharding.size,
    )


def unsupported_part(config: ModelConfig) -> str:
    """A part of a decoder that the fused layer tail lacks, as a sentence; empty without."""
    if config.activation != "silu":
        return f"the activation is {config.activation}, not silu"
    if set(config.layer_types) != {"full"}:
        return "some layers have a sliding window"
    if config.sandwich_norms:
        return "outputs of attention and MLP are normed"
    return "q, k and v have biases" if config.qkv_bias else ""


def switched_off() -> dict[str, Refusal]:
    """The paths that an environment variable forbids."""
    switches = (env.fused_decode_step_switch(), env.fused_layer_tail_switch())
    return {
        name: Refusal(f"switched off by {switch}")
        for name, switch in zip(FUSED_PATHS, switches, strict=True)
        if switch
    }


def refuse_model(source: ModelSource, num_sms: int = HOPPER_SMS) -> dict[str, Refusal | None]:
    """Why a model does not fit each path on a Hopper GPU, in float16; None where it fits.

    Args:
        source: a checked file; its configuration and tensor table are read.
        num_sms: of the GPU.
    """
    no_step = refuse_step(source)
    return {
        "fused_decode_step": no_step,
        "fused_layer_tail": no_step if source.stored else _refuse_tails(source, num_sms),
    }


def refuse_step(source: ModelSource, sharding: Sharding = WHOLE) -> Refusal | None:
    """Why the kernel of whole steps does not run a model, or a rank's part; None if it does.

    Args:
        source: a checked file.
        sharding: of the rank.
    """
    if source.stored:
        return Refusal("the model is no dense decoder")
    found = step_geometry(source, source.config.max_position, sharding)
    return found if isinstance(found, Refusal) else None


def step_geometry(
    source: ModelSource, max_tokens: int, sharding: Sharding = WHOLE
) -> StepGeometry | Refusal:
    """How the kernel of whole steps deals out a dense decoder, or why it does not fit.

    Args:
        source: a checked file.
        max_tokens: of a context.
        sharding: of the rank whose part it is.
    """
    config = source.config
    types = [
        {
            name: [_matrix(source, index, part).qtype for part in parts]
            for name, parts in _STEP_PARTS.items()
        }
        for index in range(config.num_layers)
    ]
    shape = decoder_shape(config, max_tokens, sharding)
    return fused_decode_step_geometry.select_geometry(shape, types)


def step_copy_bytes(source: ModelSource, sharding: Sharding = WHOLE) -> int:
    """Bytes of the copy of its own that the fused decode step takes on a Hopper GPU, in float16.

    0 where it does not fit the model or is switched off, or where one copy serves every kernel.

    Args:
        source: a checked file.
        sharding: of the rank whose part it is.
    """
    if source.stored or FUSED_PATHS[0] in switched_off():
        return 0
    geometry = step_geometry(source, source.config.max_position, sharding)
    if isinstance(geometry, Refusal):
        return 0
    if env.has_one_copy() and not geometry.unread_types and sharding.size == 1:
        return 0
    sizes = geometry.shape.matrix_sizes
    return sum(
        rows * QuantType[geometry.qtype(layer, name)].row_bytes(columns)
        for layer in range(len(geometry.masks))
        for name, (rows, columns) in sizes.items()
    )


def _refuse_tails(source: ModelSource, num_sms: int) -> Refusal | None:
    config = source.config
    part = unsupported_part(config)
    refusal = fused_layer_tail_geometry.refuse_width(config.hidden_size)
    if part or refusal:
        return Refusal(part) if part else refusal
    for index in range(config.num_layers):
        qkv = _segments(source, index + 1, "q", "k", "v") if index + 1 < config.num_layers else []
        found = fused_layer_tail_geometry.partition_layer(
            _segments(source, index, "o"),
            _segments(source, index, "gate", "up"),
            _segments(source, index, "down"),
            qkv,
            num_sms,
        )
        if isinstance(found, Refusal):
            return Refusal(f"{found.reason} (after the attention of layer {index})")
    return None


def _matrix(source: ModelSource, index: int, part: str) -> Matrix:
    info = source.tensors[source.names[f"layers.{index}.{part}.weight"]]
    return Matrix(info.qtype.name, *info.shape)


def _segments(source: ModelSource, index: int, *parts: str) -> list[Matrix]:
    """Matrices that share an input, as they rest: neighbours of one type are one matrix."""
    matrices = [_matrix(source, index, part) for part in parts]
    segments = []
    for qtype, members in groupby(matrices, key=lambda matrix: matrix.qtype):
        joined = list(members)
        segments.append(Matrix(qtype, sum(m.rows for m in joined), joined[0].columns))
    return segments


def log_fused_paths(paths: Mapping[str, str], *, is_gpu: bool) -> None:
    """Say once, at load, which paths a model uses and why not the others.

    Args:
        paths: of `FUSED_PATHS`, `USED` or a reason.
        is_gpu: whether the model is on a GPU; a CPU has none of the paths, which is no news.
    """
    level = logging.INFO if is_gpu else logging.DEBUG
    for name, outcome in paths.items():
        _LOG.log(level, "%s: %s", name, outcome if outcome == USED else f"not used: {outcome}")
