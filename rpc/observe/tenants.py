"""Requests and tokens by tenant, for bills. Their sums over tenants are the totals without that label."""

from collections.abc import Iterable

from rpc.observe.families import Families

MOST_TENANTS = 1000  # label values of one server, however often its token file changes
OTHERS = "(others)"  # no tenant can have this name
USUAL = ("stop", "length")


class TenantMetrics:
    """Counters with the label tenant, of requests that have ended.

    Tenants come from the token file, never from a client's message, so the file bounds the count of series. Tenants
    beyond MOST_TENANTS share one label value.
    """

    def __init__(self, make: Families) -> None:
        self._known = set[str]()
        self._requests = make.labelled("quire_tenant_requests", "Requests by tenant and outcome.", "tenant", "outcome")
        self._prompt_tokens = make.labelled(
            "quire_tenant_prompt_tokens",
            "Prompt tokens of ended requests that had left the queue, by tenant.",
            "tenant",
        )
        self._cached_tokens = make.labelled(
            "quire_tenant_prompt_tokens_cached", "Prompt tokens that the prefix cache had, by tenant.", "tenant"
        )
        self._generation_tokens = make.labelled(
            "quire_tenant_generation_tokens", "Output tokens of ended requests, by tenant.", "tenant"
        )

    def expect(self, tenants: Iterable[str]) -> None:
        """Shows these tenants from now on, at 0: PromQL sees no increase in a counter that appears above 0."""
        for tenant in tenants:
            name = self._name(tenant)
            for counters in (self._prompt_tokens, self._cached_tokens, self._generation_tokens):
                counters(name)
            for outcome in USUAL:
                self._requests(name, outcome)

    def request_ended(self, tenant: str, outcome: str) -> None:
        self._requests(self._name(tenant), outcome).inc()

    def tokens(self, tenant: str, prompt: int, cached: int, generated: int) -> None:
        """Adds the tokens of a request that has ended."""
        name = self._name(tenant)
        self._prompt_tokens(name).inc(prompt)
        self._cached_tokens(name).inc(cached)
        self._generation_tokens(name).inc(generated)

    def _name(self, tenant: str) -> str:
        if tenant not in self._known:
            if len(self._known) == MOST_TENANTS:
                return OTHERS
            self._known.add(tenant)
        return tenant
