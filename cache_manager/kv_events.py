"""KV events: block hashes stored and removed, for routers that send a request to the engine with its prefix."""

from collections.abc import Iterable

from cache_manager.block_hash import BlockHash


class KVEventLog:
    """Block hashes that were published and removed since the last `take`."""

    def __init__(self) -> None:
        self._there: dict[BlockHash, bool] = {}  # by hash: whether its last event was `stored`

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        self._there.update(dict.fromkeys(hashes, True))

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        self._there.update(dict.fromkeys(hashes, False))

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Returns the events and clears the log.

        Returns:
            Removed hashes and stored hashes. A hash with several events is in the list of the last one.
        """
        there, self._there = self._there, {}
        return [block_hash for block_hash, here in there.items() if not here], [
            block_hash for block_hash, here in there.items() if here
        ]
