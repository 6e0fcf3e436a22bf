"""Makes metric families that all have the label model_name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from rpc.observe.histogram import CountedHistogram

C = TypeVar("C", bound=Collector)


class ReadCounters(Collector):
    """Counters of one metric whose values are read at each scrape. See `Families.read_counters`."""

    def __init__(
        self, name: str, text: str, model_name: str, label: str, reads: Mapping[str, Callable[[], float]]
    ) -> None:
        self._name, self._text, self._model_name, self._label, self._reads = name, text, model_name, label, reads

    def collect(self) -> Iterator[CounterMetricFamily]:
        labels = ["model_name", self._label] if self._label else ["model_name"]
        family = CounterMetricFamily(self._name, self._text, labels=labels)
        for value, read in self._reads.items():
            family.add_metric([self._model_name, value] if self._label else [self._model_name], read())
        yield family


class Families:
    """Makes the families of one model, in one registry.

    Args:
        registry: Registry that the families are added to.
        model_name: Value of the label model_name.

    Attributes:
        made: All families by name, that of a counter without _total.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._model = registry, model_name
        self.made: dict[str, Collector] = {}

    def gauge(self, name: str, text: str, read: Callable[[], float] | None = None) -> Gauge:
        """Makes a gauge.

        Args:
            name: Name of the metric.
            text: Help text.
            read: Returns the value at each scrape, on any thread; None: the value is set.
        """
        made = self._keep(name, Gauge(name, text, ["model_name"], registry=None)).labels(self._model)
        if read is not None:
            made.set_function(read)
        return made

    def counter(self, name: str, text: str) -> Counter:
        return self._keep(name, Counter(name, text, ["model_name"], registry=None)).labels(self._model)

    def read_counters(self, name: str, text: str, label: str, reads: Mapping[str, Callable[[], float]]) -> None:
        """Makes a counter for each value of another label, or one alone, whose values are read at each scrape.

        Args:
            name: Name of the metric.
            text: Help text.
            label: Name of the other label; "" for none.
            reads: By value of that label, what returns the count, on any thread. Without a label it has the key "".
        """
        self._keep(name, ReadCounters(name, text, self._model, label, reads))

    def counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """Makes a counter for each value of another label."""
        family = self._keep(name, Counter(name, text, ["model_name", label], registry=None))
        return {value: family.labels(self._model, value) for value in values}

    def labelled(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Returns a function that takes values of these labels and returns their counter, made at its first use."""
        family = self._keep(name, Counter(name, text, ["model_name", *labels], registry=None))
        return partial(family.labels, self._model)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, ["model_name"], registry=None, buckets=buckets)
        return self._keep(name, made).labels(self._model)

    def counted(self, name: str, text: str, bounds: tuple[float, ...]) -> CountedHistogram:
        """Makes a histogram that takes many equal observations at once."""
        return self._keep(name, CountedHistogram(name, text, bounds, self._model))

    def _keep(self, name: str, made: C) -> C:
        self.made[name] = made
        self._registry.register(made)
        return made
