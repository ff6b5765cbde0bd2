"""Compatibility fields: sent by clients of llama-server, vLLM, SGLang and others.

    alias     another name of a field (`ALIASES`)
    neutral   accepted with a value that has no effect, else refused by name (`NEUTRAL`)
    idle      accepted with any value: it has an effect only with a field that is refused (`IDLE`)
    ignored   changes no completion; a response header names it (`IGNORED`)

Each name of these tables is a field of every body that generates, so that none of them counts as
unknown and none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tiercel.errors import InvalidRequestError
from tiercel.serve.http.errors import escaped, unsupported_parameter

# Name -> our name; each route adds the names of its limit of the completion.
ALIASES: Final[Mapping[str, str]] = {
    "repeat_penalty": "repetition_penalty",  # llama-server
    "no_stop_trim": "include_stop_str_in_output",  # SGLang
}
# Name -> the values that change nothing.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    # llama-server
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "adaptive_target": (-1,),
    "penalize_nl": (False,),
    "samplers": (),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "post_sampling_probs": (False,),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "n_indent": (0,),
    "response_fields": ([],),
    "return_tokens": (False,),
    "lora": ([],),
    "reasoning_format": ("auto", "deepseek"),
    "reasoning_in_content": (False,),
    "thinking_budget_tokens": (-1,),
    "parse_tool_calls": (True,),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (-1,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "vllm_xargs": ({},),
    # SGLang
    "ebnf": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "lora_path": (),
    "return_hidden_states": (False,),
    "custom_logit_processor": (),
    # text-generation-webui, KoboldCpp, OpenRouter
    "do_sample": (True,),
    "num_beams": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "smoothing_factor": (0,),
    "dynamic_temperature": (False,),
    "temperature_last": (False,),
}
IDLE: Final = (
    "mirostat_tau", "mirostat_eta", "mirostat_mode", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent",
    "adaptive_decay", "smoothing_curve", "early_stopping",
)  # fmt: skip
IGNORED: Final = (
    # llama-server
    "cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token",
    "backend_sampling", "speculative.n_max", "speculative.n_min", "speculative.p_min",
    # vLLM, SGLang
    "request_id", "rid", "cache_salt", "data_parallel_rank", "kv_transfer_params",
    "mm_processor_kwargs", "guided_decoding_backend",
    # Ollama
    "keep_alive", "num_ctx",
)  # fmt: skip
# llama.cpp counts repetitions in a window of the last tokens; here the whole sequence counts.
_WINDOWS: Final = ("repeat_last_n", "penalty_last_n")
_WHY: Final[Mapping[str, str]] = {
    "grammar": "holds GBNF, which is not supported; write Lark into structured_outputs.grammar",
    "ebnf": "is not supported; write Lark into structured_outputs.grammar",
    "samplers": "is not supported: the order is penalties, temperature, top_k, top_p, min_p",
}

if TYPE_CHECKING:
    CompatFields = Struct
else:
    CompatFields = msgspec.defstruct(
        "CompatFields",
        [
            (name.replace(".", "_"), object, UNSET)
            for name in (*NEUTRAL, *IDLE, *IGNORED, *_WINDOWS)
        ],
        rename={name.replace(".", "_"): name for name in IGNORED},
        kw_only=True,
        module=__name__,
    )


def is_given(body: Struct, name: str) -> bool:
    """Whether a request holds a field, by the name on the wire; null counts as left out."""
    value = getattr(body, name.replace(".", "_"))
    return value is not None and not isinstance(value, UnsetType)


def given_fields(body: Struct, names: Iterable[str]) -> list[str]:
    """Those of `names` that a request holds."""
    return [name for name in names if is_given(body, name)]


def take_aliases(body: Struct, aliases: Mapping[str, str]) -> None:
    """Move values to our own names of their fields.

    Raises:
        InvalidRequestError: both names are given, with different values.
    """
    for name, ours in aliases.items():
        if not is_given(body, name):
            continue
        value, known = getattr(body, name), getattr(body, ours)
        if known is not None and known != value:
            raise InvalidRequestError(
                f"{name} and {ours} are the same field here but differ.",
                hint=f"Leave {name} out.",
                param=name,
            )
        setattr(body, ours, value)


def refuse_unless_neutral(body: Struct, table: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse known fields that are not supported, unless their value has no effect.

    Args:
        body: body of a request.
        table: field -> the values without effect; null and an absent field have none either.

    Raises:
        InvalidRequestError: 400 `unsupported_parameter`.
    """
    for name in given_fields(body, table):
        value = getattr(body, name)
        if not any(_is_same(value, neutral) for neutral in table[name]):
            raise unsupported_parameter(name, _why(name, value, table[name]))


def _is_same(value: object, neutral: object) -> bool:
    """Whether two values are equal: 1 and 1.0 are, 0 and false are not."""
    is_number = isinstance(value, int | float) and isinstance(neutral, int | float)
    has_kind = isinstance(value, bool) is isinstance(neutral, bool)
    return value == neutral and has_kind and (is_number or type(value) is type(neutral))


def _why(name: str, value: object, neutral: tuple[object, ...]) -> str:
    if name in _WHY:
        return _WHY[name]
    shown = escaped(msgspec.json.encode(value).decode("utf-8", "replace"), 60)
    rest = f" or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
    return f"is {shown}, which is not supported here; leave it out{rest}"


def refuse_windows(body: Struct) -> None:
    """Refuse a window of the penalties, unless it is the whole sequence.

    Only for requests with penalties.

    Raises:
        InvalidRequestError: 400 `unsupported_parameter`.
    """
    for name in given_fields(body, _WINDOWS):
        if not _is_same(getattr(body, name), -1):
            raise unsupported_parameter(
                name, "must be -1 here: penalties count all of prompt and answer"
            )
