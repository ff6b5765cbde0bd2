"""Oracle of prepare_step: the inputs of a step, token by token in plain Python."""

from collections.abc import Sequence

from torch import Tensor


def prepare_step(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    groups: Sequence[tuple[int, int]],
    draft_ids: Tensor | None = None,
    num_drafts: Tensor | None = None,
) -> tuple[list[int], list[int], list[int], list[list[int]], list[int]]:
    """(input_ids, positions, seq_lens, slots per group, num_computed afterwards).

    groups: (tokens per entry, entries per block) of each cache group.
    """
    scratch = token_ids.shape[0] - 1
    ids: list[int] = []
    positions: list[int] = []
    seq_lens: list[int] = []
    slots: list[list[int]] = [[] for _ in range(block_tables.shape[0])]
    computed = num_computed.tolist()
    for request, row in enumerate(rows.tolist()):
        count = int(cu_seqlens_q[request + 1] - cu_seqlens_q[request])
        start = 0 if row == scratch else computed[row]
        first = len(ids)
        for position in range(start, start + count):
            offset = position - start  # the first is the row's own token
            is_real = row != scratch
            is_real &= num_drafts is None or offset <= int(num_drafts[request])
            if not is_real:
                ids.append(0)
            elif draft_ids is not None and offset > 0:
                ids.append(int(draft_ids[row, offset]))
            else:
                ids.append(int(token_ids[row, position]))
            positions.append(position)
            for group, (tokens_per_entry, entries_per_block) in enumerate(groups):
                places = slots[group]
                if not is_real or (position + 1) % tokens_per_entry != 0:
                    places.append(-1)
                    continue
                block = int(block_tables[group, row, position // block_size])
                entry = position % block_size // tokens_per_entry % entries_per_block
                slot = block * entries_per_block + entry
                # An earlier token of the same request gives way.
                places[first:] = [-1 if place == slot else place for place in places[first:]]
                places.append(slot)
        seq_lens.append(start + count)
        if row != scratch:
            computed[row] = start + count
    return ids, positions, seq_lens, slots, computed
