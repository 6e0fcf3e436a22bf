"""Metrics that an engine shows itself, and settings of the server's."""

import urllib.request

import pytest

from rpc.observe.exporter import EngineExporter
from rpc.observe.settings import ObserveSettings


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
def test_the_address_is_one_that_prometheus_can_read(host: str, shown: str) -> None:
    exporter = EngineExporter("m", host)
    exporter.attached(pages=9, page_size=16)
    assert exporter.address.startswith(shown)
    with urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'quire_kv_pages{model_name="m"} 9.0' in text
    assert "quire_tenant" not in text, "tenants are the server's"


@pytest.mark.parametrize(
    "endpoint", ["", "collector:4317", "ftp://a:1", "http://", "http://a:4317/v1/traces", "http://a/"]
)
def test_an_endpoint_is_an_address_without_a_path(endpoint: str) -> None:
    """OTLP over gRPC has none: the path of OTLP over HTTP would be ignored, and every trace with it."""
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint is .*must be http://HOST:PORT"):
        ObserveSettings(otlp_traces_endpoint=endpoint)
    assert ObserveSettings(otlp_traces_endpoint="https://a:4317").otlp_traces_endpoint == "https://a:4317"
