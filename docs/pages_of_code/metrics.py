"""docs/reference/metrics.md, from the metrics that a server and a gateway make."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from docs.pages_of_code.tables import table, text
from rpc.gateway.metrics import GatewayMetrics
from rpc.observe.metrics import OUTCOMES, Metrics

HEAD = """\
# Metrics

Written by `make reference` from the code. [Observability](../guides/observability.md) says where they are served, and
[coming from vLLM](../guides/from-vllm.md#metrics) names those of vLLM that mean the same.

A counter has `_total` at its end; a histogram is the series `_bucket`, `_sum` and `_count`. Every metric of a server
has the label `model_name`. Labels beside it are in the last column.
"""
OWN = ("model_name", "le")
OUTCOME = ", ".join(f"`{outcome}`" for outcome in OUTCOMES)


def page() -> str:
    """Returns the text of the page."""
    server = Metrics("demo")
    server.watch(lambda: 0, lambda: 0, lambda: 0, lambda: 0, lambda: 0)
    server.engine_attached(1, 0, 1)
    server.request_ended("stop", "ann")
    server.tenants.tokens("ann", prompt=1, cached=1, generated=1)
    gateway = GatewayMetrics()
    return text(
        [
            HEAD,
            "## Of a server",
            "",
            *_rows(server.registry.collect()),
            f"Values of `outcome`: {OUTCOME}.",
            "",
            "## Of a gateway",
            "",
            *_rows(gateway.registry.collect()),
        ]
    )


def _rows(families: Iterable[Metric]) -> Iterator[str]:
    found = sorted(families, key=lambda family: family.name)
    return table(
        ("metric", "kind", "", "labels"),
        [(f"`{_name(family)}`", family.type, family.documentation, _labels(family)) for family in found],
    )


def _name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _labels(family: Metric) -> str:
    names = {label for sample in family.samples for label in sample.labels}
    return ", ".join(f"`{name}`" for name in sorted(names - set(OWN)))
