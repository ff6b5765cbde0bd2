"""The options of loading a model, and limits that host and device share.

Free of PyTorch: the HTTP process and the scheduler read them too. The options as the engine
resolves them are in `engine_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from tiercel.errors import ArgumentError

MAX_DECODE_QUERIES: Final = 16
"""New tokens of a request in a step that decode attention supports, at most."""

RETRY_STEPS: Final = 32
"""Steps without drafts after which a row whose drafts were often wrong tries one again."""

ACCEPTANCE_DECAY: Final = 0.875
"""Share of the old acceptance estimate that each trial keeps: 8 trials matter."""

METHODS: Final = ("off", "ngram", "mtp", "hybrid")
MAX_DRAFTS: Final = MAX_DECODE_QUERIES - 1  # decode attention takes these and the last token
DEFAULT_DRAFTS: Final = 5


class SpecConfig(Struct, frozen=True):
    """Resolved settings of speculation.

    Attributes:
        method: source of drafts: none, the text itself, a head of the model, or both.
        max_drafts: K, drafts of a row and step at most.
        min_ngram: shortest run of tokens that is looked up in the text.
        max_ngram: longest run of tokens that is looked up in the text.
    """

    method: str = "off"
    max_drafts: int = 0
    min_ngram: int = 2
    max_ngram: int = 4

    @property
    def has_ngrams(self) -> bool:
        """Whether drafts are looked up in the text."""
        return self.method in ("ngram", "hybrid")

    @property
    def has_head(self) -> bool:
        """Whether a head of the model drafts."""
        return self.method in ("mtp", "hybrid")


NO_DRAFTS: Final = SpecConfig()


def num_head_drafts(config: SpecConfig) -> int:
    """Number of drafts that the model's head makes: all, or one that the text continues."""
    if not config.has_head:
        return 0
    return config.max_drafts if config.method == "mtp" else 1


def resolve_spec(method: object, num_spec_tokens: object) -> SpecConfig:
    """Resolve the options of speculation.

    Args:
        method: one of `METHODS`.
        num_spec_tokens: K, 0 to 15; 0 is off, None is 5.

    Raises:
        ArgumentError: an unknown method, or a number out of range.
    """
    if method not in METHODS:
        raise ArgumentError(
            f"spec={method!r:.80} is unknown.", hint=f"Use one of {', '.join(METHODS)}."
        )
    count = DEFAULT_DRAFTS if num_spec_tokens is None else num_spec_tokens
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_DRAFTS:
        raise ArgumentError(
            f"num_spec_tokens={count!r:.80} is out of range.", hint=f"Use 0 to {MAX_DRAFTS}."
        )
    if method == "off" or count == 0:
        return NO_DRAFTS
    return SpecConfig(str(method), count)


MAX_RANKS: Final = 64
"""Processes that compute one model together, at most."""

MAX_REPLICAS: Final = 64
"""Engines of one server, at most."""

KV_DTYPES: Final = ("auto", "fp8", "bf16", "float32")
NUMERICS: Final = ("exact", "native")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options that the class of a model decides on; see `ModelClass.check_options`.

    Attributes:
        kv_dtype: one of `KV_DTYPES`, the form of keys and values in the cache; ``auto`` is the
            model's own.
        numerics: one of `NUMERICS`: ``exact`` products with activations as they are, or
            ``native`` ones with activations rounded as the model was trained for.
    """

    kv_dtype: str = "auto"
    numerics: str = "exact"


DEFAULT_MODEL_OPTIONS: Final = ModelOptions()


def resolve_model_options(kv_dtype: object, numerics: object) -> ModelOptions:
    """Check the names of a model's options; the model's class checks what it can.

    Raises:
        ArgumentError: an unknown name.
    """
    for name, value, known in (
        ("kv_dtype", kv_dtype, KV_DTYPES),
        ("numerics", numerics, NUMERICS),
    ):
        if value not in known:
            raise ArgumentError(
                f"{name}={value!r:.80} is unknown.", hint=f"Use one of {', '.join(known)}."
            )
    return ModelOptions(str(kv_dtype), str(numerics))


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of loading a model; see `LLM.__init__` for the other fields.

    Attributes:
        model: path or catalogue name; None for the default model.
        enable_fault_injection: whether ``TIERCEL_FAULTS`` may be set; see `faults.py`.
        warm_up: whether every kind of request runs once before the first real one; on a GPU it
            always does.
        timed_steps: whether the time of steps on a CPU is bounded, because streams wait for them;
            answers may then depend on the speed of the machine in their last bits.
        tensor_parallel_size: ranks, one process and GPU each, that compute together.
        expert_parallel: whether ranks hold whole experts of a layer, else a part of each.
        data_parallel_attention: whether each rank has requests of its own, and whole experts.
        replica: number of this engine among those of this machine that serve the same model.
        num_replicas: engines of this machine that serve it; each has GPUs of its own.
        ranks_per_host: consecutive ranks that are on one host; 0: all of them.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    numerics: str = "exact"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    spec: str = "off"
    num_spec_tokens: int | None = None
    offline: bool | None = None
    threads: int | None = None
    enable_fault_injection: bool = False
    warm_up: bool = False
    timed_steps: bool = False
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    data_parallel_attention: bool = False
    replica: int = 0
    num_replicas: int = 1
    ranks_per_host: int = 0
