"""The dashboard of requests: their latencies by phase, beside the SLOs."""

from deploy.grafana.panels import (
    MODEL,
    TOKENS_A_SECOND,
    GrafanaDashboard,
    Panel,
    Query,
    Row,
    one,
    quantiles,
    rate,
    some,
    total,
)

BUDGET = 0.01  # share of late answers that the alerts allow


def late(name: str) -> tuple[Query, ...]:
    """Returns the burn rate of the recording rules: 1 uses up the budget exactly at its end."""
    recorded = f"model_name:quire_{name}_late:ratio_rate"
    return tuple(
        Query(f"{recorded}{window}{{{MODEL}}} / {BUDGET}", f"{window} {{{{model_name}}}}")
        for window in ("5m", "1h", "6h")
    )


PROMISES = Row(
    "Promises",
    (
        Panel(
            "Burn of the budget: first tokens",
            "Late: after 2.5 s. 1% may be; at 1 that is used up exactly, at 14.4 an alert fires.",
            "none",
            late("time_to_first_token"),
        ),
        Panel(
            "Burn of the budget: next tokens",
            "Late: 0.1 s after the one before. 1% may be; at 14.4 an alert fires.",
            "none",
            late("inter_token_latency"),
        ),
        Panel(
            "Failed and refused",
            "Share of requests that failed by Quire's fault, and that were refused for want of room, in five minutes.",
            "percentunit",
            (
                Query(f"model_name:quire_requests_failed:ratio_rate5m{{{MODEL}}}", "failed {{model_name}}"),
                Query(f"model_name:quire_requests_refused:ratio_rate5m{{{MODEL}}}", "refused {{model_name}}"),
            ),
        ),
    ),
)

TIMES = Row(
    "Where the time goes",
    (
        Panel("Queue", "Time from arrival to a batch row.", "s", quantiles("quire_request_queue_time_seconds")),
        Panel(
            "Prefill", "Time from a batch row to the first token.", "s", quantiles("quire_request_prefill_time_seconds")
        ),
        Panel("Decode", "From the first token to the last.", "s", quantiles("quire_request_decode_time_seconds")),
        Panel(
            "Whole request",
            "Time from arrival to the end, whatever the outcome.",
            "s",
            quantiles("quire_e2e_request_latency_seconds"),
        ),
        Panel(
            "Time to first token",
            "Time from arrival to the first token.",
            "s",
            quantiles("quire_time_to_first_token_seconds"),
        ),
        Panel(
            "Time per output token",
            "Mean time between two tokens, request by request.",
            "s",
            quantiles("quire_request_time_per_output_token_seconds"),
        ),
    ),
)

SIZES = Row(
    "Requested work",
    (
        Panel("Prompt length", "Tokens of a prompt.", "none", quantiles("quire_request_prompt_tokens")),
        Panel("Output length", "Tokens of a sequence.", "none", quantiles("quire_request_generation_tokens")),
        Panel(
            "Outcomes",
            "Requests by outcome. Outcomes without requests are left out.",
            "reqps",
            one(some(rate("quire_requests_total", "outcome")), "{{outcome}} {{model_name}}"),
            stacked=True,
        ),
        Panel(
            "Queue",
            "Requests that wait, in queues and for an engine.",
            "none",
            (
                Query(total("quire_num_requests_waiting"), "queued {{model_name}}"),
                Query(total("quire_num_requests_parked"), "for an engine {{model_name}}"),
            ),
        ),
        Panel("Tokens in the queue", "Prompt tokens that wait.", "none", one(total("quire_num_tokens_waiting"))),
        Panel("Live requests", "Taken and not ended.", "none", one(total("quire_num_requests_live"))),
        Panel(
            "Calls turned away",
            "Calls without a token, or without an operator's. They do not count as requests.",
            "reqps",
            one(rate("quire_calls_denied_total", "reason"), "{{reason}} {{model_name}}"),
            stacked=True,
        ),
    ),
)

TENANTS = Row(
    "Tenants",
    (
        Panel(
            "Requests by tenant",
            "Requests that end, by the tenant of their token; refused ones are among them.",
            "reqps",
            one(some(rate("quire_tenant_requests_total", "tenant")), "{{tenant}} {{model_name}}"),
            stacked=True,
        ),
        Panel(
            "Prompt tokens by tenant",
            "A second, counted when a request ends, and those that the prefix cache had.",
            TOKENS_A_SECOND,
            (
                Query(some(rate("quire_tenant_prompt_tokens_total", "tenant")), "{{tenant}} {{model_name}}"),
                Query(
                    some(rate("quire_tenant_prompt_tokens_cached_total", "tenant")),
                    "of these cached {{tenant}} {{model_name}}",
                ),
            ),
        ),
        Panel(
            "Output tokens by tenant",
            "A second, counted when a request ends.",
            TOKENS_A_SECOND,
            one(some(rate("quire_tenant_generation_tokens_total", "tenant")), "{{tenant}} {{model_name}}"),
            stacked=True,
        ),
    ),
)

REQUESTS = GrafanaDashboard(
    "quire-requests",
    "Quire: requests and SLOs",
    "Latencies of requests by phase, beside the SLOs.",
    (PROMISES, TIMES, SIZES, TENANTS),
)
