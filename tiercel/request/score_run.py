"""Sequences after one prompt, each with labels of its own, as the fewest requests that hold them.

All sequences that fit a step go into one request after the prompt. Every other sequence takes a
request of its own, in which it belongs to the prompt: a sequence longer than a step, an empty one
(read at the prompt's last token), and every sequence where nothing may be packed. Such requests
share the prompt through the prefix cache as far as it comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.errors import InternalError
from tiercel.request.inputs import InputProcessor
from tiercel.request.request import Request
from tiercel.request.score_task import LabelTrie, Node, ScoreRead, ScoreTask


class ScoreRun(Struct, frozen=True):
    """The requests of some sequences, and where their values belong.

    Attributes:
        tries: trie of the labels of each sequence.
        requests: requests to run, in any order.
        packed: numbers of the sequences that the first request holds; none: all requests are
            separate.
        targets: sequence and node of each separate request.
    """

    tries: tuple[LabelTrie, ...]
    requests: tuple[Request, ...]
    packed: tuple[int, ...]
    targets: tuple[tuple[int, Node], ...]

    @property
    def num_done(self) -> int:
        """Number of sequences whose values are in, if the engine works on these very requests."""
        done = 0
        if self.packed:
            left = self.requests[0].num_items_done
            for number in self.packed:
                left -= len(self.tries[number].paths)
                done += left >= 0
        return done + sum(
            request.finish_reason is not None
            for request, (_, node) in zip(self._separate, self.targets, strict=True)
            if not node
        )

    @property
    def num_cached(self) -> int:
        """Tokens of the shared prompt that were found in the prefix cache."""
        first = self.requests[:1] if self.packed else self._roots()[:1]
        return sum(request.num_cached for request in first)

    @property
    def num_cached_apart(self) -> int:
        """Tokens of all prompts that were found, where nothing is shared."""
        return sum(request.num_cached for request in self._roots())

    @property
    def _separate(self) -> tuple[Request, ...]:
        return self.requests[bool(self.packed) :]

    def _roots(self) -> list[Request]:
        return [r for r, (_, node) in zip(self._separate, self.targets, strict=True) if not node]

    def check_ended(self) -> None:
        """Check that all requests have results.

        Raises:
            InternalError: a request ended with an error.
        """
        for request in self.requests:
            if request.finish_reason != "length":
                why = request.stop_reason or request.finish_reason
                raise InternalError(f"the items have no scores: {why}.")

    def label_values(self) -> list[npt.NDArray[np.float64]]:
        """The (K,) values of the labels of each sequence; tokens of a label are summed up."""
        values = [np.full(len(trie.edges), np.nan) for trie in self.tries]
        at = 0
        for number in self.packed:
            count = len(self.tries[number].edges)
            values[number][:] = self.requests[0].scores[at : at + count]
            at += count
        for request, (number, node) in zip(self._separate, self.targets, strict=True):
            columns = [
                i for i, (at_node, _) in enumerate(self.tries[number].edges) if at_node == node
            ]
            values[number][columns] = request.scores
        return [
            np.array([own[list(label)].sum() for label in trie.labels])
            for own, trie in zip(values, self.tries, strict=True)
        ]


def make_run(
    inputs: InputProcessor,
    prefix: list[int],
    sequences: Sequence[list[int]],
    tries: Sequence[LabelTrie],
    *,
    longest_packed: int,
    is_relative: bool = False,
) -> ScoreRun:
    """Make the requests.

    Args:
        inputs: input processor of the model.
        prefix: token ids of the prompt before all sequences.
        sequences: token ids that fit the context after the prompt, with their labels.
        tries: trie of the labels of each sequence.
        longest_packed: tokens of a sequence that a step is sure to hold; 0: nothing is packed.
        is_relative: see `ScoreTask`.
    """
    packed = tuple(
        number
        for number, (own, trie) in enumerate(zip(sequences, tries, strict=True))
        if 0 < len(own) <= longest_packed - trie.depth
    )
    requests, targets = [], []
    if packed:
        items = tuple((*sequences[n], *path) for n in packed for path in tries[n].paths)
        # Reads repeat along the items: those of one sequence do where all have the same labels.
        is_uniform = all(tries[n] is tries[packed[0]] for n in packed)
        named = packed[:1] if is_uniform else packed
        reads = tuple(read for n in named for read in tries[n].reads)
        requests.append(inputs.score_request(prefix, ScoreTask(items, reads, is_relative)))
    for number in sorted(set(range(len(sequences))) - set(packed)):
        for node, token_ids in tries[number].nodes.items():
            task = ScoreTask((), ((ScoreRead(0, token_ids),),), is_relative)
            ids = [*prefix, *sequences[number], *node]
            requests.append(inputs.score_request(ids, task))
            targets.append((number, node))
    return ScoreRun(tuple(tries), tuple(requests), packed, tuple(targets))
