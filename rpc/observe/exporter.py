"""An engine's own metrics and those of its process, on an HTTP port of their own."""

from prometheus_client import CollectorRegistry, disable_created_metrics

from rpc.observe.engines import EngineMetrics
from rpc.observe.metrics_http import serve_metrics
from rpc.observe.process import register_process
from scheduler.events import StepOutputs


class EngineExporter:
    """Serves the metrics of the engine in this process, on a free port.

    Args:
        model_name: Value of the label model_name.
        host: Address of this machine.

    Attributes:
        address: HOST:PORT that Prometheus scrapes.

    Raises:
        OSError: No port can be opened on the host.
    """

    def __init__(self, model_name: str, host: str) -> None:
        disable_created_metrics()
        registry = CollectorRegistry()
        register_process(registry, model_name)
        self._metrics = EngineMetrics(registry, model_name)
        bracketed = f"[{host}]" if ":" in host else host
        self.address = f"{bracketed}:{serve_metrics(0, registry, host).server_port}"

    def attached(self, pages: int, page_size: int) -> None:
        """Counts the start of the engine, and sets its count of pages and the tokens of one."""
        self._metrics.attached(pages, page_size=page_size)

    def step(self, outputs: StepOutputs) -> None:
        self._metrics.step(outputs)
