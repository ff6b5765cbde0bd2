"""Groups of processes: sums in the order of ranks, gathers, and what is said of a lost rank."""

import socket
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.parallel.ranks import rank_pool
from tiercel.errors import ArgumentError, RankLostError
from tiercel.parallel import SINGLE, Group, connect

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of(rank, shape, dtype=torch.float32):
    """What a rank contributes: sizes so far apart that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank + 1)
    x = torch.randn(shape, generator=generator) * 10.0 ** (rank * 3)
    return x.to(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8).numpy()


def sum_parts(group, shape, dtype):
    return bits(group.all_reduce(part_of(group.rank, shape, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (0, 4)], ids=str)
def test_sums_are_made_in_the_order_of_ranks(four_ranks, shape, dtype):
    total = part_of(0, shape, dtype).float()
    for rank in range(1, 4):
        total = total + part_of(rank, shape, dtype).float()
    for found in four_ranks.run(sum_parts, shape, dtype):
        assert np.array_equal(found, bits(total.to(dtype)))


def test_the_order_of_the_cases_above_shows():
    """In another order the sum has other bits, so that equal ones say something."""
    parts = [part_of(rank, (3, 5)) for rank in range(4)]
    forwards = parts[0] + parts[1] + parts[2] + parts[3]
    assert not torch.equal(forwards, parts[3] + parts[2] + parts[1] + parts[0])


def gather_parts(group, dim):
    return bits(group.all_gather(part_of(group.rank, (2, 3, 5), torch.bfloat16), dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_gathered_in_the_order_of_ranks(two_ranks, dim):
    expected = torch.cat([part_of(rank, (2, 3, 5), torch.bfloat16) for rank in range(2)], dim)
    for found in two_ranks.run(gather_parts, dim):
        assert np.array_equal(found, bits(expected))


def rows_of(rank, count, dtype):
    return part_of(rank, (count, 3, 2), dtype)


def gather_and_scatter(group, counts, dtype):
    """Rows of all ranks, and the sums of what each rank adds to them."""
    # One row fewer than planned, where there is one: a zero takes its place.
    own = rows_of(group.rank, counts[group.rank], dtype)[: max(1, counts[group.rank] - 1)]
    rows = group.gather_rows(own, counts)
    part = part_of(group.rank, (sum(counts), 7), dtype)
    return bits(rows), bits(group.scatter_sums(part, counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(4, 1, 7, 3), (3, 3, 3, 3), (1, 1, 1, 9)], ids=str)
def test_rows_come_together_and_each_rank_gets_its_sums(four_ranks, counts, dtype):
    rows = []
    for rank, count in enumerate(counts):
        own = rows_of(rank, count, dtype)
        own[max(1, count - 1) :] = 0
        rows.append(own)
    total = part_of(0, (sum(counts), 7), dtype).float()
    for rank in range(1, 4):
        total = total + part_of(rank, (sum(counts), 7), dtype).float()
    sums = total.to(dtype).split(list(counts))
    for rank, (found, own_sums) in enumerate(four_ranks.run(gather_and_scatter, counts, dtype)):
        assert np.array_equal(found, bits(torch.cat(rows)))
        assert np.array_equal(own_sums, bits(sums[rank]))


def bytes_of(rank, length):
    return bytes((rank + place) % 256 for place in range(length))


def exchange(group, lengths):
    return group.exchange(bytes_of(group.rank, lengths[group.rank]))


@pytest.mark.parametrize("lengths", [(0, 5), (4088, 1), (4089, 3), (20_000, 0)], ids=str)
def test_bytes_of_any_length_are_exchanged(two_ranks, lengths):
    """Those that fit the first collective, and longer ones."""
    wanted = [bytes_of(rank, length) for rank, length in enumerate(lengths)]
    assert two_ranks.run(exchange, lengths) == [wanted, wanted]
    assert SINGLE.exchange(b"abc") == [b"abc"]


def top_of(rank, logits, count):
    """The largest values of a rank's columns, in the order that `merge_top` asks for."""
    columns = logits.shape[1] // 4
    own = logits[:, rank * columns : (rank + 1) * columns]
    values, ids = own.sort(dim=1, descending=True, stable=True)
    return values[:, :count].contiguous(), ids[:, :count] + rank * columns


def merge(group, logits, count):
    values, ids = group.merge_top(*top_of(group.rank, torch.from_numpy(logits), count), count)
    return values.numpy(), ids.numpy()


@pytest.mark.parametrize("count", [1, 3])
def test_the_top_of_shards_is_the_top_of_all(four_ranks, count):
    """With so few values most rows have ties, within a rank and between ranks."""
    logits = torch.randint(-2, 3, (31, 20), generator=torch.Generator().manual_seed(1)).float()
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    for found_values, found_ids in four_ranks.run(merge, logits.numpy(), count):
        assert np.array_equal(found_values, values[:, :count].numpy())
        assert np.array_equal(found_ids, ids[:, :count].numpy())


def test_a_place_where_ranks_cannot_meet_is_named():
    """A port in use, and a disk that is full."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        places = [
            (f"tcp://127.0.0.1:{port}", "address already in use"),
            ("file:///dev/full", "No space left on device"),
        ]
        for address, words in places:
            with pytest.raises(RankLostError, match=f"the other ranks at {address}.*{words}"):
                connect(0, 2, torch.device("cpu"), address, 2.0)


def share(group, source):
    return group.broadcast(part_of(group.rank, (3,)), source).numpy()


def test_a_broadcast_brings_the_sources_values(two_ranks):
    for source in range(2):
        for found in two_ranks.run(share, source):
            assert np.array_equal(found, part_of(source, (3,)).numpy())


def meet_late(group):
    group.meet("the case", 30.0)
    return group.rank


def test_ranks_meet(two_ranks):
    assert two_ranks.run(meet_late) == [0, 1]


def test_a_group_of_one_returns_what_it_is_given():
    x, ids = torch.randn(2, 3), torch.arange(6).view(2, 3)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.all_gather(x) is x
    assert SINGLE.broadcast(x) is x
    values, found = SINGLE.merge_top(x, ids, 2)
    assert torch.equal(values, x[:, :2])
    assert torch.equal(found, ids[:, :2])
    SINGLE.meet("nothing", 0.0)
    SINGLE.close()
    assert connect(0, 1, torch.device("cpu"), "tcp://nowhere:1") is SINGLE


@dataclass
class CountedSums:
    """Stands in for a kernel: sums are those of the group without it."""

    group: Group
    max_bytes: int
    calls: int = 0

    def all_reduce(self, x):
        self.calls += 1
        return self.group.all_reduce(x)

    def all_gather(self, x):
        self.calls += 1
        return self.group.all_gather(x)


def sums_of_a_kernel(group):
    kernel = CountedSums(group, 64)
    own = replace(group, small_sums=kernel)
    own.all_reduce(torch.ones(16))
    own.all_gather(torch.ones(16))
    return kernel.calls


def test_a_kernel_sums_and_gathers_nothing_on_a_cpu(two_ranks):
    assert two_ranks.run(sums_of_a_kernel) == [0, 0]


def leave_alone(group):
    """Rank 1 goes away; rank 0 waits for it."""
    if group.rank == 1:
        return ""
    try:
        group.meet("loading", 1.0)
    except RankLostError as error:
        return str(error)
    return "rank 1 was there"


def test_a_rank_that_does_not_come_is_named():
    with rank_pool(2) as pool:
        message, _ = pool.run(leave_alone)
    assert "rank 0 of 2 waited for all ranks to finish loading, up to 1 s" in message


def sum_alone(group):
    if group.rank == 1:
        group.close()
        return ""
    try:
        group.all_reduce(torch.ones(3, 64))
    except RankLostError as error:
        return str(error)
    return "rank 1 was there"


def test_a_sum_without_a_rank_names_what_was_summed():
    with rank_pool(2, timeout_s=2.0) as pool:
        message, _ = pool.run(sum_alone)
    assert "rank 0 of 2 waited for the sum of (3, 64) float32" in message


def meet_again(group, folder):
    """Leave; then rank 0 waits somewhere alone, and both meet elsewhere, twice."""
    group.close()
    if group.rank == 0:
        with pytest.raises(RankLostError, match="rank 0 of 2 waited for the other ranks"):
            connect(0, 2, torch.device("cpu"), (folder / "alone").as_uri(), timeout_s=0.2)
    names, sums = [], []
    for number in range(2):
        address = (folder / f"elsewhere{number}").as_uri()
        group = connect(group.rank, 2, torch.device("cpu"), address, timeout_s=20.0)
        sums.append(group.all_reduce(torch.ones(1)).item())
        names.append(group.processes.group_name)
        if not number:
            group.close()
    return names, sums


def test_ranks_meet_again_whatever_each_has_tried(tmp_path):
    """Under names of their own: PyTorch keeps what GPUs share by the name of a group."""
    with rank_pool(2) as pool:
        (names, sums), others = pool.run(meet_again, tmp_path)
    assert (names, sums) == others
    assert sums == [2.0, 2.0]
    assert names[0] != names[1]


def test_impossible_ranks_are_refused():
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        connect(2, 2, torch.device("cpu"), "tcp://localhost:1")
    with pytest.raises(ArgumentError, match="nowhere"):
        connect(0, 2, torch.device("cpu"), "nowhere://x")


def test_ranks_that_do_not_come_to_connect_are_named(tmp_path):
    with pytest.raises(RankLostError, match="rank 0 of 2 waited for the other ranks at file"):
        connect(0, 2, torch.device("cpu"), f"file://{tmp_path}/alone", timeout_s=1.0)
