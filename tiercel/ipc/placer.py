"""The process that asks Ray for the hosts of one engine, and holds them until it ends.

It is a process of its own, because Ray's library may end the process that uses it: the server then
loses one engine, not its clients. The supervisor starts and ends it with the engine, so that each
restart asks Ray again, and a host that was lost is not asked. Ray frees the hosts when this process
is gone, however it ends. Requests and tensors do not come here.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any, Final, NoReturn

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tiercel.errors import ArgumentError, EngineDeadError, NoHostError, TiercelError
from tiercel.ipc.engine_host import Address, EngineHost
from tiercel.ipc.last_words import describe_failure, leave
from tiercel.ipc.layout import Layout, spread
from tiercel.ipc.messages import FromEngine, Place, Progress, ToEngine
from tiercel.version import __version__

_LINE_CHARS: Final = 300
_POLL_S: Final = 0.5
Send = Callable[[FromEngine], None]


def place(order: Place, messages: Iterator[ToEngine], send: Send) -> NoReturn:
    """Start an engine on hosts of a cluster and wait for its end, or for that of the server."""
    threading.Thread(target=_end_with_server, args=(messages,), daemon=True).start()
    try:
        _place(order, send)
    except Exception as error:  # noqa: BLE001 - whatever it was, the server must be told
        send(describe_failure(error))
    leave()


def _end_with_server(messages: Iterator[ToEngine]) -> None:
    for _ in messages:
        pass
    leave()


def _place(order: Place, send: Send) -> NoReturn:
    deadline = perf_counter() + order.seconds
    send(Progress(f"Waiting for a host of {order.cluster}", 0, 0, 0.0))
    _check_head(order)
    with _told(f"the Ray cluster at {order.cluster} cannot be used"):
        ray.init(
            order.cluster, log_to_driver=False, configure_logging=False, include_dashboard=False
        )
    layout = _wait_layout(order, deadline)
    bundle = {order.resource: layout.ranks_per_host}
    group = placement_group([bundle] * layout.num_hosts, strategy="PACK")
    if not group.wait(max(1.0, deadline - perf_counter())):
        raise NoHostError(
            f"no host of the Ray cluster at {order.cluster} had {layout.ranks_per_host} free "
            f"{order.resource}(s) within {order.seconds:.3g} s.",
            hint="`ray status` lists what is used.",
        )
    with _told("an engine cannot be started on a host of the Ray cluster"):
        hosts = [_make_host(order, layout, group, number) for number in range(layout.num_hosts)]
        addresses: list[Address] = ray.get([host.address.remote() for host in hosts])
    for address in addresses:
        if address.version != __version__:
            raise ArgumentError(
                f"host {address.host} has Tiercel {address.version}, the server {__version__}.",
                hint="All hosts need the same version.",
            )
    first = addresses[0]
    per_host = layout.ranks_per_host if layout.num_hosts > 1 else 0
    ends = {hosts[0].run_engine.remote(order.host, order.port, order.token, per_host): first}
    for number in range(1, layout.num_hosts):
        ranks = list(layout.ranks(number))
        run = hosts[number].run_ranks.remote(first.host, first.port, order.token, ranks)
        ends[run] = addresses[number]
    (ended, *_), _ = ray.wait(list(ends))
    with _told(f"host {ends[ended].host} was lost"):
        raise EngineDeadError(f"the process on {ends[ended].host} {ray.get(ended)}")


def _check_head(order: Place) -> None:
    """See that something answers: Ray itself would try for long, and end this process."""
    host, _, port = order.cluster.rpartition(":")
    try:
        address = (host.strip("[]"), int(port))
        socket.create_connection(address, order.seconds).close()
    except OSError as error:
        why = error.strerror or f"no answer within {order.seconds:.3g} s"
        raise NoHostError(
            f"--nodes {order.cluster}: the head of the Ray cluster cannot be reached: {why}.",
            hint="`ray start` prints its address.",
        ) from None


def _wait_layout(order: Place, deadline: float) -> Layout:
    """Wait until the cluster has enough hosts: they may come later than the server, or come back.

    Raises:
        NoHostError: it has not.
    """
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        counts = [int(resources.get(order.resource, 0)) for resources in nodes]
        try:
            return spread(order.num_ranks, order.num_engines, order.resource, counts)
        except NoHostError:
            if perf_counter() > deadline:
                raise
        sleep(_POLL_S)


def _make_host(order: Place, layout: Layout, group: object, number: int) -> Any:
    """The actor on the host of a bundle."""
    is_gpu = order.resource == "GPU"
    actor = ray.remote(EngineHost).options(
        num_gpus=layout.ranks_per_host if is_gpu else 0,
        num_cpus=0 if is_gpu else layout.ranks_per_host,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number
        ),
    )
    return actor.remote(ray.util.get_node_ip_address, order.shared)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn an error of Ray into one line."""
    try:
        yield
    except TiercelError:
        raise
    except Exception as error:  # Ray raises classes of many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = getattr(error, "cause", None)
        line = str(cause) if cause is not None else (lines or [type(error).__name__])[0]
        raise EngineDeadError(f"{what}: {line:.{_LINE_CHARS}}") from error
