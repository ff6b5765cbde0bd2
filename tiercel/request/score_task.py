"""A scoring task: items after a shared prefix, and labels as positions to read.

The prefix is the request's prompt, an ordinary one: computed in chunks, kept, found again. Items
run after it in packed passes: each sees the prefix and itself alone, its positions continue those
of the prefix, and nothing of it is written to the cache.

A label of several tokens needs log-probabilities after its own first tokens too. The labels form a
trie; every node with children is one position to read, after item + the node's tokens. Nodes on
one path share a sequence:

    labels  a | b c | b d e      nodes  () -> a, b    (b) -> c, d    (b d) -> e
    sequence  item b d           reads  after item: a, b; after b: c, d; after d: e

Labels of one token have the root alone: one sequence per item, read at its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

TILE_TOKENS, TILE_KEYS = 32, 128  # of the attention, as it is counted


class ScoreRead(Struct, frozen=True):
    """One position of a sequence to read.

    Attributes:
        back: tokens between this position and the sequence's last one; 0 is the last.
        token_ids: token ids whose log-probabilities as the next token are wanted.
    """

    back: int
    token_ids: tuple[int, ...]


class ScoreTask(Struct, frozen=True):
    """The sequences of one request.

    Attributes:
        items: token ids of each item, none empty. Without items the prompt itself is read, at its
            end.
        reads: positions to read of a sequence; sequence i takes `reads[i % len(reads)]`.
        is_relative: whether values are logits, to be compared among the tokens of one read, instead
            of log-probabilities over the vocabulary. All reads name the same tokens then.
        sample_keys: keys of the noise (`seeds.py`), one per item, with which the next token after
            each item is sampled by the request's parameters; there are no reads then. None: nothing
            is sampled.
    """

    items: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[ScoreRead, ...], ...]
    is_relative: bool = False
    sample_keys: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all items."""
        return sum(map(len, self.items))

    def num_values(self, num_sequences: int) -> int:
        """Number of values of the first sequences."""
        counts = [sum(len(read.token_ids) for read in reads) for reads in self.reads]
        rounds, rest = divmod(num_sequences, len(counts))
        return rounds * sum(counts) + sum(counts[:rest])


def skipped_tiles(prefix_len: int, item_lens: Sequence[int]) -> int:
    """Count the attention tiles, per head, that packed items skip and a causal mask would read.

    Args:
        prefix_len: tokens before the items.
        item_lens: tokens of each item; there is at least one.
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


class LabelTrie(Struct, frozen=True):
    """The trie of some labels: the positions to read for them.

    Attributes:
        nodes: nodes with children, and the children of each; the root is first.
        paths: tails of the sequences: nodes that no other node continues.
        reads: positions to read of each path, as in `ScoreTask`.
        edges: (node, next token) of each value that one item yields, in order.
        labels: indices in `edges` of the tokens of each label.
    """

    nodes: dict[Node, tuple[int, ...]]
    paths: tuple[Node, ...]
    reads: tuple[tuple[ScoreRead, ...], ...]
    edges: tuple[tuple[Node, int], ...]
    labels: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        """Number of tokens of the longest path."""
        return max(map(len, self.paths))


def make_trie(labels: Sequence[Sequence[int]]) -> LabelTrie:
    """Make the trie of labels; none may be empty or come twice."""
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
    index = {edge: i for i, edge in enumerate(edges)}
    return LabelTrie(
        nodes={node: tuple(ids) for node, ids in children.items()},
        paths=paths,
        reads=tuple(reads),
        edges=tuple(edges),
        labels=tuple(
            tuple(index[tuple(label[:i]), token_id] for i, token_id in enumerate(label))
            for label in labels
        ),
    )
