"""A Prometheus histogram that takes many observations at once: a step gives many tokens the same latency."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class CountedHistogram(Collector):
    """A histogram that takes many equal observations at once, with the label model_name.

    Args:
        name: Name of the metric.
        text: Help text.
        bounds: Upper bounds of the buckets, ascending; one more bucket is above them.
        model_name: Value of the label model_name.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._bounds, self._model_name = name, text, tuple(bounds), model_name
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds observations that were counted elsewhere.

        Args:
            counts: Count of observations in each bucket, [len(bounds) + 1].
            total: Sum of the observations.
        """
        for i, count in enumerate(counts):
            self._counts[i] += count
        self._sum += total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family
