"""Arguments of the n-gram drafters, as their ops pass them to the kernels and to the CPU code."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor


class NgramBatch(Struct, frozen=True):
    """The tensors of a call, checked; B rows. Vectors are (B,), lengths all int64 or all int32.

    Attributes:
        prompt: (B, prompt room) int64 or int32, as all tokens.
        prompt_lens: tokens of a prompt.
        generated: (B, generated room).
        generated_start: index in its row at which the generated text begins; None: 0.
        steps: committed generated tokens.
        draft_limit: int32, drafts of a row at most, of `ngram_match`; None in the other op.
        drafts: (B, draft room); mutated.
        lens: int32; mutated.
        encoder: int32, of `ngram_match`; None in the other op.
        decoder: int32.
        max_dec: limit of generated tokens.
    """

    prompt: Tensor
    prompt_lens: Tensor
    generated: Tensor
    generated_start: Tensor | None
    steps: Tensor
    draft_limit: Tensor | None
    drafts: Tensor
    lens: Tensor
    encoder: Tensor | None
    decoder: Tensor
    max_dec: Tensor


class NgramLimits(Struct, frozen=True):
    """Options that do not depend on the row.

    Attributes:
        max_ngram_size: longest window.
        min_ngram_size: shortest window.
        max_draft_tokens: drafts of a row at most, with those of the MTP head.
        query_shift: 1 if the query ends with G[s], 0 if with G[s-1].
    """

    max_ngram_size: int
    min_ngram_size: int
    max_draft_tokens: int
    query_shift: int
