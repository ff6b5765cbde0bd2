"""Oracle of the indices of a step of DeepSeek-V4: request by request, token by token."""

from dataclasses import dataclass, field


@dataclass
class Compressed:
    """What one kind of compression needs; lists as the op's tensors."""

    phase: list[int] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    entry_slots: list[int] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)
    stored: list[list[int]] = field(default_factory=list)


def step_rows(query_lens: list[int], rows: list[int]) -> list[int]:
    """The row of each token."""
    return [row for row, count in zip(rows, query_lens, strict=True) for _ in range(count)]


def compressed(
    query_lens: list[int],
    starts: list[int],
    entry_slots: list[int],
    input_blocks: list[list[int]],
    sizes: tuple[int, int, int, int],
    capacity: int,
) -> Compressed:
    """Entries that a step completes, and where their terms are.

    Args:
        query_lens: new tokens of each request.
        starts: position of the first of them.
        entry_slots: of each token; -1 for none.
        input_blocks: blocks of the inputs of each request.
        sizes: tokens of an entry, its terms, tokens of a block, stored rows of a block.
        capacity: length of the result.
    """
    ratio, num_terms, block_size, stored_rows = sizes
    out = Compressed()
    token = 0
    for count, start, blocks in zip(query_lens, starts, input_blocks, strict=True):
        first = token
        for position in range(start, start + count):
            out.phase.append(position % ratio)
            out.visible.append((position + 1) // ratio)
            if position % ratio == ratio - 1 and entry_slots[token] >= 0:
                out.entries.append(position // ratio)
                out.entry_slots.append(entry_slots[token])
                fresh, stored = [-1] * num_terms, [-1] * num_terms
                for term in range(num_terms):
                    back = num_terms - 1 - term
                    if position - back < 0:
                        continue
                    if token - back >= first:
                        fresh[term] = token - back
                    else:
                        block = blocks[(position - back) // block_size]
                        stored[term] = block * stored_rows + (position - back) % stored_rows
                out.fresh.append(fresh)
                out.stored.append(stored)
            token += 1
    for _ in range(capacity - len(out.entries)):
        out.entries.append(-1)
        out.entry_slots.append(-1)
        out.fresh.append([-1] * num_terms)
        out.stored.append([-1] * num_terms)
    return out
