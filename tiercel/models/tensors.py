"""The tensors that a config needs, with their shapes: the check that a file is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tiercel.errors import ModelFormatError
from tiercel.models.config import ModelConfig

OPTIONAL = ("head.weight", "rope_factors")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (our name, (out, in)) of each tensor; vectors are (1, n)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "embed.weight", (config.vocab_size, hidden)
    yield "norm.weight", (1, hidden)
    yield "head.weight", (config.vocab_size, hidden)
    yield "rope_factors", (1, config.rope.rotary_dim // 2)
    matrices = {
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    if config.sandwich_norms:
        norms |= {"post_attn_norm": hidden, "post_mlp_norm": hidden}
    for i in range(config.num_layers + config.num_mtp_layers):
        for part, shape in matrices.items():
            yield f"layers.{i}.{part}.weight", shape
        for part, width in norms.items():
            yield f"layers.{i}.{part}.weight", (1, width)
        if config.qkv_bias:
            for part in "qkv":
                yield f"layers.{i}.{part}.bias", (1, matrices[part][0])
        if i >= config.num_layers:
            yield f"layers.{i}.mtp_proj.weight", (hidden, 2 * hidden)
            for part in ("mtp_embed_norm", "mtp_hidden_norm", "mtp_norm"):
                yield f"layers.{i}.{part}.weight", (1, hidden)


def check_tensors(
    config: ModelConfig,
    found: Mapping[str, tuple[str, tuple[int, int]]],
    file: str,
    file_name_of: Callable[[str], str],
) -> None:
    """Compare a file's tensors with those that the config needs.

    Args:
        config: the shape of the model.
        found: our name -> (the file's name, (out, in)).
        file: the file's name, for errors.
        file_name_of: our name of a tensor -> the file's.

    Raises:
        ModelFormatError: a tensor is missing or surplus, or its shape disagrees.
    """
    needed = dict(expected_shapes(config))
    for name, shape in needed.items():
        if name not in found:
            if name not in OPTIONAL:
                raise ModelFormatError(
                    f"{file}: tensor {file_name_of(name)!r} is missing.",
                    hint="The file is incomplete or of another architecture: fetch it again.",
                )
            continue
        file_name, actual = found[name]
        if actual != shape:
            raise ModelFormatError(
                f"{file}: tensor {file_name!r} is {_show(actual)} (out x in).",
                hint=f"Its hyperparameters ask for {_show(shape)}.",
            )
    for name in found.keys() - needed.keys():
        raise ModelFormatError(
            f"{file}: tensor {found[name][0]!r} does not belong to a {config.arch} model "
            "of this shape.",
            hint=f"The model has {config.num_layers} layers of the usual parts.",
        )


def _show(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
