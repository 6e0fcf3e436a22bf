"""A bound on a resource that all tenants share."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.frontend.errors import RequestFailed


class Quota:
    """Counts how much of a resource each tenant holds, within a limit for all and one for each.

    Args:
        most: Amount that all tenants may hold together. A named tenant may hold half of it.
        what: Noun and verb of the resource, for errors.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held = Counter[str]()

    def check(self, tenant: str, amount: int = 1) -> None:
        """Raises RequestFailed where the tenant may not take this amount."""
        own, total, half = self._held[tenant], self._held.total(), max(1, self._most // 2)
        if tenant != DEFAULT_TENANT and own + amount > half:
            raise _full(f"{own} {self._what} for {tenant!r}, the limit for one tenant is {half}")
        if total + amount > self._most:
            raise _full(f"{total} {self._what}, the limit is {self._most}")

    def take(self, tenant: str, amount: int = 1) -> None:
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def held(self, tenant: str) -> Iterator[None]:
        """Holds an amount of 1 for the block.

        Raises:
            RequestFailed: The tenant may not take it.
        """
        self.check(tenant)
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)


def _full(message: str) -> RequestFailed:
    return RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", message, retry_after=1.0)
