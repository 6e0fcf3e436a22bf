"""What one stream may have in a server: so many requests, and so many bytes of them."""

import asyncio

MOST_BYTES = 2**26  # of a stream's requests that are not answered; a larger one is alone


class Room:
    """Of one stream, whose requests enter one after another. requests: that may be in it at once."""

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
        """It is over."""
        self._inside -= 1
        self._bytes -= size
        self._left.set()
