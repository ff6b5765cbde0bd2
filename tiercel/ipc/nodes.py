"""An engine on hosts of a Ray cluster, as the supervisor sees it: like a process of this machine.

    this process  --socket pair-->  placer: asks Ray for hosts, holds them     (placer.py)
         ^                             |  Ray
         |                          a process on each host (engine_host.py), parent of
         +--------- TCP -----------  the engine process

The engine is lost when either connection is. Ending the placer ends the engine's processes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import msgspec

from tiercel import env
from tiercel.config import LoadOptions
from tiercel.errors import ArgumentError, NoHostError, TiercelError
from tiercel.ipc.knock import Listener, listen, make_token, own_address
from tiercel.ipc.messages import Failed, FromEngine, Outputs, Place, Start, encode
from tiercel.ipc.spawn import Connection, EngineProcess, OnMessage, start_with

PLACE_S: Final = 60.0  # until an engine must have come to life on some host
_SPARE_S: Final = 5.0  # of these, for the placer to say why


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster.

    Attributes:
        host: name or address of its head.
        port: port of its head.
        own: address of this machine by which it reaches the head, and hosts reach it.
    """

    host: str
    port: int
    own: str

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read ``host:port``; nothing is sent there yet.

        Raises:
            ArgumentError: it is something else, or an unknown name.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ArgumentError(
                f"--nodes {text}: not the address of a Ray cluster.",
                hint="Write that of its head, which `ray start` prints, as host:port.",
            )
        try:
            return Cluster(host, int(port), own_address(host, int(port)))
        except OSError as error:
            raise ArgumentError(f"--nodes {text}: {error.strerror or error}.") from None

    @property
    def address(self) -> str:
        """The address as text."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(
        self, num_engines: int, options: LoadOptions, on_message: OnMessage
    ) -> NodeEngine:
        """Start an engine on some host of the cluster; returns once hosts are looked for.

        Args:
            num_engines: engines of the server.
            options: options of the load.
            on_message: callback for each message, on this event loop.

        Raises:
            OSError: no process or no socket can be made.
        """
        token = make_token()
        listener = Listener(listen(self.own), token)
        order = Place(
            cluster=self.address,
            num_ranks=options.tensor_parallel_size,
            num_engines=num_engines,
            resource="CPU" if options.device == "cpu" else "GPU",
            host=self.own,
            port=listener.port,
            token=token,
            seconds=PLACE_S - _SPARE_S,
            shared=env.shared_variables(),
        )
        placer = await start_with(order, on_message, has_hub_token=False)
        return NodeEngine(placer, listener, Start(options, token), on_message)


class NodeEngine:
    """A started engine; see `StartedEngine`."""

    def __init__(
        self, placer: EngineProcess, listener: Listener, start: Start, on_message: OnMessage
    ) -> None:
        """Set up, and wait for the engine in a task.

        Args:
            placer: process that finds a host.
            listener: where the engine knocks.
            start: first message to the engine.
            on_message: callback for each message of the engine.
        """
        self._placer = placer
        self._listener = listener
        self._on_message = on_message
        self._link: Connection | None = None
        self._meeting = asyncio.create_task(self._meet(start))

    @property
    def pid(self) -> int:
        """The process id of the placer."""
        return self._placer.pid

    @property
    def unsent_bytes(self) -> int:
        """See `EngineProcess`."""
        transport = None if self._link is None else self._link.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    @property
    def failed(self) -> Failed | None:
        """What the engine said when it ended, or the placer of it."""
        said = None if self._link is None else self._link.failed
        return said or self._placer.failed

    def give_up(self, why: TiercelError) -> None:
        """Kill it; `why` counts as what it said."""
        self._placer.give_up(why)
        self._close_link()

    def send(self, frame: bytes) -> None:
        """See `EngineProcess`."""
        transport = None if self._link is None else self._link.transport
        if transport is not None and not transport.is_closing():
            transport.write(frame)

    def close(self) -> None:
        """Close the connections: all processes end when they notice."""
        self._close_link()
        self._placer.close()

    async def wait_lost(self) -> None:
        """Wait until the engine or the placer has ended, or the engine did not come."""
        placer = asyncio.create_task(self._placer.wait_lost())
        await asyncio.wait((placer, self._meeting), return_when=asyncio.FIRST_COMPLETED)
        if self._link is not None:
            await asyncio.wait((placer, self._link.lost), return_when=asyncio.FIRST_COMPLETED)
        placer.cancel()

    def dump_stacks(self) -> None:
        """Nothing: no signal reaches a process of another host."""

    def kill(self) -> None:
        """Kill the placer; Ray then ends the processes on the hosts."""
        self._placer.kill()
        self._close_link()

    async def reap(self, grace_s: float) -> int:
        """Wait until the placer is gone; until then it may say how the engine ended."""
        self._close_link()
        return await self._placer.reap(grace_s)

    async def _meet(self, start: Start) -> None:
        """Let the engine in and tell it what to load."""
        loop = asyncio.get_running_loop()
        accepted = await loop.run_in_executor(None, self._listener.accept, PLACE_S)
        is_late = not self._listener.is_closed
        self._listener.close()
        if accepted is None:
            if is_late and self._placer.failed is None:
                why = f"no host of the Ray cluster was reached within {PLACE_S:.3g} s."
                self._placer.give_up(NoHostError(why, hint="`ray status` lists its hosts."))
            return
        sock, _ = accepted
        _, link = await loop.create_connection(lambda: Connection(self._hear), sock=sock)
        self._link = link
        self.send(encode(start))

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):  # the clock of another host
            message = msgspec.structs.replace(message, started_s=perf_counter())
        self._on_message(message)

    def _close_link(self) -> None:
        self._listener.close()
        if self._link is not None:
            self._link.close()
