"""Bounds the requests of one stream that a server holds: their count, and their bytes."""

import asyncio

MOST_BYTES = 2**26  # bytes of a stream's unanswered requests; a larger request runs without others


class Room:
    """The room of one stream, whose requests enter one after another.

    Args:
        requests: Count of requests that may be inside at once.
        most_bytes: Bytes of requests that may be inside at once.
    """

    def __init__(self, requests: int, most_bytes: int = MOST_BYTES) -> None:
        self._requests, self._most_bytes = requests, most_bytes
        self._inside = self._bytes = 0
        self._left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Returns when a request of this many bytes has a place."""
        while self._inside and (self._inside == self._requests or self._bytes + size > self._most_bytes):
            self._left.clear()
            await self._left.wait()
        self._inside += 1
        self._bytes += size

    def leave(self, size: int, _task: object = None) -> None:
        """Gives back the room of a request that is over."""
        self._inside -= 1
        self._bytes -= size
        self._left.set()
