"""Requests for one token each whose prompts share a start, as one request that computes it once.

Rerankers send a list of prompts, one per document, and read one token and its log-probabilities of
each. The shared start becomes the prompt of one request, and the remaining tokens of each prompt
become an item of a `ScoreTask`: all items run packed, each as if it were alone after the start.

A list may hold several families of prompts with starts of their own (`prompt_families.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.request.inputs import InputProcessor
from tiercel.request.prompt_families import find_families
from tiercel.request.request import Request, TokenUpdate
from tiercel.request.score_task import ScoreTask
from tiercel.seeds import mix_key


@dataclass(frozen=True, slots=True)
class SharedStart:
    """Some requests as one.

    Attributes:
        carrier: request that the engine gets; its prompt is the shared start.
        members: requests that the carrier replaces, in the order of its items.
    """

    carrier: Request
    members: tuple[Request, ...]

    @property
    def num_cached(self) -> list[int]:
        """Tokens of each member that were not computed for it: the first one pays for the start."""
        shared = len(self.carrier.prompt_token_ids)
        return [self.carrier.num_cached, *[shared] * (len(self.members) - 1)]

    def updates(self) -> list[TokenUpdate]:
        """The only update of each member, from the tokens of a carrier that has ended."""
        return [
            TokenUpdate(
                new_token_ids=(entry.token_id,),
                logprobs=() if member.params.logprobs is None else (entry,),
                finish_reason="stop" if entry.token_id in member.stop_ids else "length",
                stop_reason=entry.token_id if entry.token_id in member.stop_ids else None,
            )
            for member, entry in zip(self.members, self.carrier.item_tokens, strict=True)
        ]


def find_shared_starts(
    inputs: InputProcessor, requests: Sequence[Request], *, longest_item: int
) -> list[SharedStart]:
    """Find the requests that may run as items after a shared start.

    Args:
        inputs: input processor of the model.
        requests: new requests of one call; a request in no result runs on its own.
        longest_item: tokens that a step is sure to hold.
    """
    if not requests or not all(_can_share(request, requests[0]) for request in requests):
        return []
    prompts = [request.prompt_token_ids for request in requests]
    found = []
    for family in find_families(prompts):
        longest = family.num_shared + longest_item
        members = tuple(requests[n] for n in family.numbers if len(prompts[n]) <= longest)
        if len(members) > 1:
            carrier = _carrier(inputs, members, family.num_shared)
            found.append(SharedStart(carrier, members))
    return found


def _can_share(request: Request, first: Request) -> bool:
    """Whether the request wants one token that depends on logits and noise alone."""
    params = request.params
    is_one_token = request.max_tokens == 1 and request.grammar is None
    is_plain = not (params.has_penalties or params.has_edits or request.reads_prompt)
    return is_one_token and is_plain and params == first.params


def _carrier(inputs: InputProcessor, members: Sequence[Request], num_shared: int) -> Request:
    task = ScoreTask(
        items=tuple(tuple(request.prompt_token_ids[num_shared:]) for request in members),
        reads=(),
        sample_keys=tuple(mix_key(request.seed, request.stream) for request in members),
    )
    first = members[0]
    carrier = inputs.score_request(first.prompt_token_ids[:num_shared], task)
    carrier.request_id = first.request_id  # logs name the caller's request
    carrier.client = first.client
    carrier.params, carrier.priority = first.params, first.priority
    return carrier
