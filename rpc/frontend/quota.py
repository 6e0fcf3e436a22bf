"""Something that there is so much of, for all tenants together."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cache_manager.page_names import DEFAULT_TENANT
from rpc.frontend.errors import RequestFailed


class Quota:
    """most: that all may have; of several tenants none has more than half. what: is had, for errors."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._held = Counter[str]()

    def check(self, tenant: str, amount: int = 1) -> None:
        """Raises RequestFailed where there is not so much left."""
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
        """One, for the block. Raises RequestFailed."""
        self.check(tenant)
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)


def _full(message: str) -> RequestFailed:
    return RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", message, retry_after=1.0)
