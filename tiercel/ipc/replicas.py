"""Several engines of one model behind the interface of `EngineClient`.

Each engine is an `EngineClient` of its own, with its process, its queue and its restarts. A request
goes to one of them (`routing.py`) and stays there. An engine that dies loses its own requests
alone; new ones go to the others until it is ready again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiercel.errors import ArgumentError, EngineDeadError
from tiercel.ipc.client import EngineClient, not_ready_error, queue_full_error
from tiercel.ipc.messages import EngineInfo
from tiercel.ipc.routing import Candidate, KnownBlocks, block_keys, choose
from tiercel.ipc.streams import TokenStream
from tiercel.ipc.supervisor import EngineState
from tiercel.params import LIMITS
from tiercel.request.request import Request

# What must be equal in all engines, because it decides what is answered or refused.
_COMMON: Final = (
    "model_name", "architecture", "vocab_size", "hidden_size", "max_model_len", "max_num_seqs",
    "block_size", "dtype", "tokenizer", "chat_template",
)  # fmt: skip


@dataclass(slots=True)
class _Cache:
    """What one engine has probably cached.

    Attributes:
        blocks: keys of its blocks.
        info: the engine that has computed them; another one has an empty cache.
        last_turn: when a request went there last.
    """

    blocks: KnownBlocks
    info: EngineInfo | None = None
    last_turn: int = 0


class Replicas:
    """The engines of one server."""

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        *,
        max_waiting: int = LIMITS.max_waiting_requests,
    ) -> None:
        """Set up; nothing is started.

        Args:
            replicas: clients of the engines, two or more, with the same siblings.
            max_waiting: requests that may wait for a row of any engine.
        """
        self.replicas = tuple(replicas)
        self._max_waiting = max_waiting
        self._caches = [_Cache(KnownBlocks(0)) for _ in self.replicas]
        self._num_turns = 0
        self._has_started = False

    @property
    def state(self) -> EngineState:
        """The state of the engine that is most ready; until all are ready once, of the least."""
        states = [client.state for client in self.replicas]
        if not self._has_started:
            return EngineState.DEAD if EngineState.DEAD in states else _first(states, _STARTING)
        return _first(states, _RUNNING)

    @property
    def progress(self) -> float:
        """Progress of the first start of all engines; later of the one that is ready first."""
        shares = [client.progress for client in self.replicas]
        return max(shares) if self._has_started else min(shares)

    @property
    def final_error(self) -> EngineDeadError:
        """What a request gets once all engines are dead; meaningless before."""
        dead = [client for client in self.replicas if client.state is EngineState.DEAD]
        return (dead or self.replicas)[0].final_error

    @property
    def info(self) -> EngineInfo | None:
        """The description of the engine with the smallest cache; None before all were ready."""
        infos = [client.info for client in self.replicas if client.info is not None]
        if not self._has_started:
            return None
        return min(infos, key=lambda info: info.num_blocks)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return sum(client.num_waiting for client in self.replicas)

    async def start(self) -> None:
        """Start all processes; returns once they run, long before they are ready.

        Raises:
            EngineDeadError: a process cannot be started.
        """
        for client in self.replicas:
            await client.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until every engine has loaded the model.

        Raises:
            TiercelError: the first error of any engine.
            ArgumentError: engines of several hosts have loaded different models.
        """
        infos = await asyncio.gather(*(client.wait_ready() for client in self.replicas))
        _check_alike(infos)
        self._has_started = True
        info = self.info
        assert info is not None, "an engine is ready once it has sent its info"
        return info

    async def wait_ended(self) -> None:
        """Wait until there will be no engine any more."""
        await asyncio.gather(*(client.wait_ended() for client in self.replicas))

    def check_room(self, count: int = 1) -> None:
        """Refuse requests that do not fit the queue.

        Raises:
            QueueFullError, EngineDeadError: see `EngineClient.check_room`.
        """
        state, ready = self.state, self._ready()
        if state is not EngineState.READY:
            raise self.final_error if state is EngineState.DEAD else not_ready_error(state)
        waiting = sum(client.num_waiting for client in ready)
        waiting += max(0, count - sum(client.num_spare for client in ready))
        if waiting > self._max_waiting or all(client.is_clogged for client in ready):
            each = -(-waiting // len(ready))
            seconds = min(client.retry_after(each) for client in ready)
            raise queue_full_error(self._max_waiting, seconds)

    def submit(self, request: Request) -> TokenStream:
        """Hand a request to an engine; see `EngineClient.submit`."""
        self.check_room()
        ready = [c for c in self._ready() if not c.is_clogged]
        keys = self._keys_of(request, ready[0].info)
        chosen = choose([self._candidate(client, keys) for client in ready])
        self._num_turns += 1
        cache = self._cache(chosen.number)
        cache.last_turn = self._num_turns
        cache.blocks.note(keys)
        return self.replicas[chosen.number].submit(request)

    def abort(self, request: Request) -> None:
        """End a request in any state; see `EngineClient.abort`."""
        for client in self.replicas:
            client.abort(request)

    def stop(self, request: Request, stop_string: str) -> None:
        """End a request whose text reached a stop string; see `EngineClient.stop`."""
        for client in self.replicas:
            client.stop(request, stop_string)

    async def forget(self) -> None:
        """Let all engines count from zero again and keep no prefix; nothing may be under way."""
        await asyncio.gather(*(client.forget() for client in self.replicas))
        for cache in self._caches:
            cache.blocks.clear()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End all engines; see `EngineClient.close`."""
        await asyncio.gather(*(client.close(drain_seconds) for client in self.replicas))

    def _ready(self) -> list[EngineClient]:
        return [client for client in self.replicas if client.state is EngineState.READY]

    def _candidate(self, client: EngineClient, keys: Sequence[int]) -> Candidate:
        number = self.replicas.index(client)
        assert client.info is not None, "it is ready"
        cache = self._cache(number)
        return Candidate(
            number,
            waiting_tokens=client.num_waiting_tokens,
            known_tokens=cache.blocks.count(keys) * client.info.block_size,
            num_requests=client.num_live,
            last_turn=cache.last_turn,
        )

    def _cache(self, number: int) -> _Cache:
        """What an engine has cached: nothing after a restart."""
        cache, info = self._caches[number], self.replicas[number].info
        if info is not cache.info:
            cache.info = info
            cache.blocks = KnownBlocks(0 if info is None else info.num_blocks)
        return cache

    def _keys_of(self, request: Request, info: EngineInfo | None) -> list[int]:
        """Keys of the blocks that a prefix cache could have; none if it is not used."""
        if info is None or not info.has_prefix_cache or request.reads_prompt:
            return []
        return block_keys(request.prompt_token_ids, info.block_size)


def _check_alike(infos: Sequence[EngineInfo]) -> None:
    for number, info in enumerate(infos):
        for name in _COMMON:
            if getattr(info, name) != getattr(infos[0], name):
                raise ArgumentError(
                    f"engine {number} differs from engine 0 in {name}.",
                    hint="All hosts need the same files and the same kind of GPU.",
                )


# From the state that decides to the one that counts only if all engines have it.
_RUNNING = (
    EngineState.READY,
    EngineState.DRAINING,
    EngineState.LOADING,
    EngineState.RESTARTING,
    EngineState.DEAD,
)
_STARTING = (
    EngineState.DRAINING,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.READY,
)


def _first(states: Sequence[EngineState], order: Sequence[EngineState]) -> EngineState:
    return next(state for state in order if state in states)
