"""Prompts of a list, grouped by the starts that they share.

Sorted prompts form a tree: the children of a node share more tokens than the node does. A node may
run packed: its own start is computed once, and the remaining tokens of each prompt are an item. Or
its parts run one after the other and find the node's start in the prefix cache:

    template query-1 document-1      packed: template, then four items, each query computed twice
    template query-1 document-2      in parts: template and query 1, two items; query 2, two items
    template query-2 document-1
    template query-2 document-2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MIN_SHARED_TOKENS: Final = 16  # a shorter start, BOS or a role marker, saves nothing worth a pass
SPLIT_SHARE: Final = 0.25  # share of a node's tokens that running it in parts must save


@dataclass(frozen=True, slots=True)
class Family:
    """Prompts to run packed.

    Attributes:
        numbers: numbers of the prompts in their list, in order.
        num_shared: tokens of their shared start; every prompt has more.
    """

    numbers: tuple[int, ...]
    num_shared: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the sorted prompts [start, stop) run, and the tokens that this computes."""

    start: int
    stop: int
    num_tokens: int
    families: tuple[Family, ...]


@dataclass(slots=True)
class _Node:
    """Sorted prompts from `start` on that share `num_shared` tokens, as long as it is open."""

    num_shared: int
    start: int
    children: list[_Plan] = field(default_factory=list)


def find_families(prompts: Sequence[list[int]]) -> tuple[Family, ...]:
    """Group prompts into families; prompts that share too little are in none."""
    if not prompts:
        return ()
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    open_nodes = [_Node(0, 0)]
    for i in range(1, len(order)):
        num_shared = _num_equal(prompts[order[i - 1]], prompts[order[i]])
        start, inner = i - 1, None
        while num_shared < open_nodes[-1].num_shared:
            node = open_nodes.pop()
            start, inner = node.start, _plan(node, i, order, prompts)
            if num_shared <= open_nodes[-1].num_shared:
                open_nodes[-1].children.append(inner)
        if num_shared > open_nodes[-1].num_shared:
            open_nodes.append(_Node(num_shared, start, [inner] if inner is not None else []))
    plan = None
    while open_nodes:
        node = open_nodes.pop()
        if plan is not None:
            node.children.append(plan)
        plan = _plan(node, len(order), order, prompts)
    assert plan is not None, "the root is a node"
    return plan.families


def _plan(node: _Node, stop: int, order: Sequence[int], prompts: Sequence[list[int]]) -> _Plan:
    """Choose how the prompts of a complete node run."""
    numbers = tuple(sorted(order[node.start : stop]))
    lengths = [len(prompts[number]) for number in numbers]
    num_members = sum(child.stop - child.start for child in node.children)
    num_parts = len(node.children) + len(numbers) - num_members
    inner = sum(child.num_tokens for child in node.children)
    covered = {order[i] for child in node.children for i in range(child.start, child.stop)}
    inner += sum(len(prompts[number]) for number in numbers if number not in covered)
    in_parts = inner - (num_parts - 1) * node.num_shared
    num_shared = min(node.num_shared, min(lengths) - 1)
    packed = sum(lengths) - (len(numbers) - 1) * num_shared
    if num_shared >= MIN_SHARED_TOKENS and in_parts >= (1 - SPLIT_SHARE) * packed:
        return _Plan(node.start, stop, packed, (Family(numbers, num_shared),))
    families = tuple(family for child in node.children for family in child.families)
    return _Plan(node.start, stop, in_parts, families)


def _num_equal(first: list[int], second: list[int]) -> int:
    """Number of equal tokens at the start of both prompts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
