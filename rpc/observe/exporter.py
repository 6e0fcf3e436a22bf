"""An engine's own metrics: what it does, and what its process takes, on an HTTP port of its own."""

from prometheus_client import CollectorRegistry, disable_created_metrics

from rpc.observe.engines import EngineMetrics
from rpc.observe.page import start_page
from rpc.observe.process import show_process
from scheduler.events import StepOutputs


class EngineExporter:
    """host: an address of this machine; the port is a free one. address: where it can be scraped. Raises OSError."""

    def __init__(self, model_name: str, host: str) -> None:
        disable_created_metrics()
        registry = CollectorRegistry()
        show_process(registry, model_name)
        self._metrics = EngineMetrics(registry, model_name)
        bracketed = f"[{host}]" if ":" in host else host
        self.address = f"{bracketed}:{start_page(0, registry, host).server_port}"

    def attached(self, pages: int, page_size: int) -> None:
        """The engine is there. page_size: tokens."""
        self._metrics.attached(pages, page_size=page_size)

    def step(self, outputs: StepOutputs) -> None:
        self._metrics.step(outputs)
