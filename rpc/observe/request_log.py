"""A log line for each request that has ended."""

import logging

from rpc.observe.records import RequestRecord

log = logging.getLogger("quire.requests")


def log_request(record: RequestRecord) -> None:
    """Logs a request that has ended: a sentence, which has its figures as fields too where lines are JSON."""
    first = record.first_token
    log.info(
        "request %s of %s: %s, %d prompt + %d generated tokens, %s, %.3f s in all",
        record.request_id,
        record.spec.tenant,
        record.outcome,
        record.prompt_tokens,
        record.completion_tokens,
        "no first token" if first is None else f"the first after {first:.3f} s",
        record.seconds,
        extra={
            "request_id": record.request_id,
            "tenant": record.spec.tenant,
            "outcome": record.outcome,
            "prompt_tokens": record.prompt_tokens,
            "cached_prompt_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "first_token_seconds": first,
            **{f"{phase.name}_seconds": phase.seconds for phase in record.phases},
            "seconds": record.seconds,
            "submissions": record.submissions,
            "attempt": record.attempt,
            "traceparent": record.trace.get("traceparent"),
        },
    )
