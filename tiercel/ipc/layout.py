"""How the ranks of one engine are spread over the hosts of a cluster: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.errors import NoHostError


@dataclass(frozen=True, slots=True)
class Layout:
    """Hosts of one engine.

    Attributes:
        num_hosts: hosts, each with as many ranks as the others.
        ranks_per_host: ranks of one host; they are consecutive.
    """

    num_hosts: int
    ranks_per_host: int

    def ranks(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)


def spread(num_ranks: int, num_engines: int, resource: str, hosts: Sequence[int]) -> Layout:
    """The layout with the fewest hosts; sums between hosts are slower than within one.

    Args:
        num_ranks: ranks of an engine, a power of two.
        num_engines: engines of the server, which all need hosts.
        resource: ``GPU`` or ``CPU``, for the error.
        hosts: how many each host of the cluster has, whether they are free or not.

    Raises:
        NoHostError: all engines together need more than the cluster has.
    """
    # Halves until so many parts of engines as are needed fit into the hosts.
    per_host = num_ranks
    while per_host and sum(count // per_host for count in hosts) * per_host < (
        num_ranks * num_engines
    ):
        per_host //= 2
    if not per_host:
        plural = "" if num_ranks * num_engines == 1 else "s"
        raise NoHostError(
            f"--replicas {num_engines} with --tensor-parallel-size {num_ranks} needs "
            f"{num_ranks * num_engines} {resource}{plural}: the Ray cluster has {sum(hosts)}.",
            hint="`ray status` lists what its hosts have.",
        )
    return Layout(num_ranks // per_host, per_host)
