"""The trace that a bucket of the latency histogram names."""

import pytest

from rpc.observe.exemplars import exemplar_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-03", f"01-{TRACE}-{SPAN}-01-new"])
def test_a_sampled_trace_is_named(header: str) -> None:
    assert exemplar_of({"traceparent": header, "tracestate": "a=b"}) == {"trace_id": TRACE}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "abc",
        f"00-{TRACE}-{SPAN}-00",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}\n-{SPAN}-01",
        f'00-{TRACE}"}} 1-{SPAN}-01',
    ],
)
def test_a_trace_that_no_backend_has_is_not(header: str) -> None:
    assert exemplar_of({"traceparent": header} if header else {}) is None
