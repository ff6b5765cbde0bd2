"""Token counts of one request, as every API reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request.

    Attributes:
        prompt: tokens of all prompts; a prompt with `n` completions counts once.
        completion: tokens of all completions.
        cached: tokens of the prompts that were found in the prefix cache.
        reasoning: tokens of the completions that are reasoning.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int
