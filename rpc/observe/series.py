"""Makes the metrics of a server: in one registry, each with the label model_name."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from rpc.observe.histogram import CountedHistogram


class Series:
    """For the server of one model."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # a _created series beside each other one would double them
        self.registry, self._model_name = CollectorRegistry(), model_name

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """One for each value of a second label."""
        made = Counter(name, text, ["model_name", label], registry=self.registry)
        return {value: made.labels(self._model_name, value) for value in values}

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model_name)

    def counted(self, name: str, text: str, bounds: tuple[float, ...]) -> CountedHistogram:
        made = CountedHistogram(name, text, bounds, self._model_name)
        self.registry.register(made)
        return made
