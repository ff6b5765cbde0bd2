"""What scoring asks of the engine: items behind a shared prefix, and labels as places to read.

The prefix is the request's prompt, an ordinary one: computed in chunks, kept, found again. Items
run behind it in packed passes: each sees the prefix and itself alone, its positions go on behind
the prefix, and nothing of it is written to the cache.

A label of several tokens needs log-probabilities behind its own first tokens too. The labels form a
trie; every node with children is one place to read, behind item + the node's tokens. Nodes on one
path share a sequence:

    labels  a | b c | b d e      nodes  () -> a, b    (b) -> c, d    (b d) -> e
    sequence  item b d           reads  behind item: a, b; behind b: c, d; behind d: e

Labels of one token have the root alone: one sequence per item, read at its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TILE_TOKENS, TILE_KEYS = 32, 128  # of the attention, as it is counted


@dataclass(frozen=True, slots=True)
class ScoreRead:
    """One place of a sequence.

    Attributes:
        back: tokens between this place and the sequence's last one; 0 is the last.
        token_ids: whose log-probabilities are wanted as the next token.
    """

    back: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """The sequences of one request.

    Attributes:
        items: token ids of each, none empty. Without any, the prompt itself is read, at its end.
        reads: what is read of a sequence; sequence i takes `reads[i % len(reads)]`.
        is_relative: values are logits, to be compared among the tokens of one read, instead of
            log-probabilities over the vocabulary. All reads name the same tokens then.
        sample_keys: if not None, there are no reads: the next token after each item is sampled, by
            the parameters of the request and the item's own key of noise (`seeds.py`).
    """

    items: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[ScoreRead, ...], ...]
    is_relative: bool = False
    sample_keys: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Of all items."""
        return sum(map(len, self.items))

    def num_values(self, num_sequences: int) -> int:
        """Log-probabilities of the first sequences, in the order of their reads."""
        counts = [sum(len(read.token_ids) for read in reads) for reads in self.reads]
        rounds, rest = divmod(num_sequences, len(counts))
        return rounds * sum(counts) + sum(counts[:rest])


def skipped_tiles(prefix_len: int, item_lens: Sequence[int]) -> int:
    """Tiles of attention, per head, that items do without: a causal mask would walk them too.

    Args:
        prefix_len: tokens before the items.
        item_lens: tokens of each, at least one item.
    """
    lens = np.array(item_lens)
    first = np.arange(0, lens.sum(), TILE_TOKENS)
    end = np.minimum(first + TILE_TOKENS, lens.sum())
    low = np.repeat(np.cumsum(lens) - lens, lens)[first]  # of the first item that a tile touches
    keys = np.stack((prefix_len + end, np.full_like(end, -prefix_len), low - end))
    # ceil of what is walked by a causal mask, less those of prefix and items: -ceil(x) = floor(-x).
    causal, prefix, own = -(-keys[0] // TILE_KEYS), keys[1] // TILE_KEYS, keys[2] // TILE_KEYS
    return int((causal + prefix + own).clip(0).sum())


Node = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """The places to read for some labels.

    Attributes:
        nodes: nodes with children, each with them; the root is first.
        paths: the sequences' tails: nodes that no other node goes on from.
        reads: of each path, as in `ScoreTask`.
        edges: (node, next token) of each value that one item yields, in order.
        labels: per label, the places of its tokens in `edges`.
    """

    nodes: dict[Node, tuple[int, ...]]
    paths: tuple[Node, ...]
    reads: tuple[tuple[ScoreRead, ...], ...]
    edges: tuple[tuple[Node, int], ...]
    labels: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(map(len, self.paths))


def make_trie(labels: Sequence[Sequence[int]]) -> LabelTrie:
    """Find what to read for labels; none may be empty or come twice."""
    children: dict[Node, list[int]] = {(): []}
    for label in labels:
        for i, token_id in enumerate(label):
            following = children.setdefault(tuple(label[:i]), [])
            if token_id not in following:
                following.append(token_id)
    inner = {node[:-1] for node in children if node}
    paths = tuple(node for node in children if node not in inner)
    edges: list[tuple[Node, int]] = []
    reads = []
    done: set[Node] = set()
    for path in paths:
        own = []
        for depth in range(len(path) + 1):
            node = path[:depth]
            if node in done:
                continue  # an earlier path goes through it
            done.add(node)
            own.append(ScoreRead(len(path) - depth, tuple(children[node])))
            edges += [(node, token_id) for token_id in children[node]]
        reads.append(tuple(own))
    place = {edge: i for i, edge in enumerate(edges)}
    return LabelTrie(
        nodes={node: tuple(ids) for node, ids in children.items()},
        paths=paths,
        reads=tuple(reads),
        edges=tuple(edges),
        labels=tuple(
            tuple(place[tuple(label[:i]), token_id] for i, token_id in enumerate(label))
            for label in labels
        ),
    )
