"""Exemplars: the trace of one request behind a bucket of a histogram. OpenMetrics has them, the classic text not.

https://prometheus.io/docs/specs/om/open_metrics_spec/#exemplars
"""

import re
from collections.abc import Mapping

TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
SAMPLED = 1  # a flag of W3C Trace Context


def exemplar_of(trace: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the exemplar's labels for a request with these W3C headers.

    None where the caller sent no trace or does not sample it: no backend has that trace.
    """
    found = TRACEPARENT.fullmatch(trace.get("traceparent", ""))
    if found is None or not int(found[2], 16) & SAMPLED:
        return None
    return {"trace_id": found[1]}
