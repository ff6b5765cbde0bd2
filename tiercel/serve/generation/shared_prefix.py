"""Completions that one request of the engine computes together, as prompts that share a prefix.

See `request/shared_start.py`.
"""

from __future__ import annotations

from tiercel.ipc.streams import TokenStream
from tiercel.request.shared_start import SharedStart
from tiercel.serve.generation.admission import early_end_error


class SharedPrefixStreams:
    """Distributes the result of a carrier to streams of its members, which the engine never sees.

    Attributes:
        streams: streams of the members.
    """

    def __init__(self, shared: SharedStart, carrier: TokenStream) -> None:
        self.streams = [TokenStream(member, carrier.submitted_s) for member in shared.members]
        self._shared = shared
        self._carrier = carrier
        carrier.on_progress = self._advance

    async def distribute(self) -> None:
        """Wait for the carrier and push each member its update.

        Raises:
            TiercelError: the carrier ended early, and so do its members.
        """
        async for update in self._carrier:
            if update.finish_reason in ("error", "abort"):
                raise early_end_error(update)
        members = zip(self.streams, self._shared.num_cached, self._shared.updates(), strict=True)
        for stream, num_cached, update in members:
            self._enter(stream, num_cached)
            stream.push(update)

    def _enter(self, stream: TokenStream, num_cached: int) -> None:
        assert self._carrier.entered_s is not None, "the engine has reported a step of it"
        stream.enter(self._carrier.entered_s, num_cached)

    def _advance(self, num_computed: int) -> None:
        """Report the progress of the shared prefix as that of the first member's prompt."""
        self._enter(self.streams[0], self._shared.carrier.num_cached)
        self.streams[0].advance(num_computed)
