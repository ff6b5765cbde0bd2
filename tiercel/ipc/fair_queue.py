"""A queue whose clients are served in turn.

Many items of one client delay the one item of another by one item at most. Each client's own items
stay in their order.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client; not for several threads without a lock."""

    def __init__(self) -> None:
        self._by_client: dict[str, deque[T]] = {}  # the first client is served next; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def count(self, client: str) -> int:
        """Items of one client."""
        return len(self._by_client.get(client, ()))

    def put(self, client: str, item: T) -> None:
        """Add an item after the client's other ones."""
        self._by_client.setdefault(client, deque()).append(item)

    def take(self) -> T | None:
        """Remove the next item; None if there is none."""
        client = next(iter(self._by_client), None)
        if client is None:
            return None
        items = self._by_client.pop(client)
        item = items.popleft()
        if items:
            self._by_client[client] = items  # its next turn comes after the others'
        return item

    def remove(self, client: str, item: T) -> None:
        """Remove an item; nothing happens if it was taken."""
        items = self._by_client.get(client, deque())
        if item in items:
            items.remove(item)
            if not items:
                del self._by_client[client]
