"""Metrics with the label model_name, as they are made here."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rpc.observe.histogram import CountedHistogram


class Families:
    """Of one model, in one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._model = registry, model_name

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One for each value of another label."""
        family = Counter(name, text, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets).labels(self._model)

    def counted(self, name: str, text: str, bounds: tuple[float, ...]) -> CountedHistogram:
        """For what is observed many times at once."""
        made = CountedHistogram(name, text, bounds, self._model)
        self._registry.register(made)
        return made
