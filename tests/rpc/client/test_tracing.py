"""A client's calls name the span that they are made in."""

import re
import subprocess
import sys

from opentelemetry.sdk.trace import TracerProvider

from rpc.client import AsyncClient
from rpc.client.tracing import trace_metadata
from tests.rpc.client.test_resuming import message
from tests.rpc.client.test_resuming_async import Scripted, serving


def test_without_a_span_nothing_is_said() -> None:
    assert trace_metadata() == ()


def test_who_does_not_use_opentelemetry_does_not_load_it() -> None:
    code = "import rpc.client, rpc.client.tracing as t, sys; print(t.trace_metadata(), 'opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "() False\n"


async def test_a_call_names_its_span() -> None:
    service = Scripted([message(1, end=True)])
    with TracerProvider().get_tracer("test").start_as_current_span("outer") as span:
        async with serving(service) as (addresses, _), AsyncClient(addresses) as client:
            async for _ in client.stream("x"):
                pass
    inner = f"{span.get_span_context().span_id:016x}"
    assert re.fullmatch(rf"00-[0-9a-f]{{32}}-{inner}-0[13]", service.metadata[0]["traceparent"])
