"""The dashboard of the overview: health, traffic, latency."""

from deploy.grafana.panels import (
    MODEL,
    TOKENS_A_SECOND,
    GrafanaDashboard,
    Panel,
    Query,
    Row,
    of_owners,
    one,
    quantile,
    quantiles,
    rate,
    ratio,
    some,
    total,
)

TTFT, ITL = "quire_time_to_first_token_seconds", "quire_inter_token_latency_seconds"
FAULTS = "request_fault|quarantined|engine_failed|internal"

NOW = Row(
    "Now",
    (
        Panel(
            "Engines",
            "Engines that requests can go to.",
            "short",
            one(of_owners(f"quire_replicas{{{MODEL}}}")),
            now=True,
            width=3,
            colors=("red", (1, "green")),
            details="quire-cluster",
        ),
        Panel(
            "Requests",
            "Requests that end.",
            "reqps",
            one(rate("quire_requests_total")),
            now=True,
            width=3,
            details="quire-requests",
        ),
        Panel(
            "Failed",
            "Share of requests that failed by Quire's fault.",
            "percentunit",
            one(ratio(rate("quire_requests_total", outcome=FAULTS), rate("quire_requests_total"))),
            now=True,
            width=3,
            colors=("green", (0.001, "yellow"), (0.01, "red")),
            details="quire-requests",
        ),
        Panel(
            "Tokens",
            "Output, a second.",
            TOKENS_A_SECOND,
            one(rate("quire_generation_tokens_total")),
            now=True,
            width=3,
            details="quire-engines",
        ),
        Panel(
            "First token",
            "95% come sooner, from arrival.",
            "s",
            one(quantile(TTFT, 0.95)),
            now=True,
            width=3,
            colors=("green", (1, "yellow"), (2.5, "red")),
            details="quire-requests",
        ),
        Panel(
            "Next token",
            "95% come sooner after the one before.",
            "s",
            one(quantile(ITL, 0.95)),
            now=True,
            width=3,
            colors=("green", (0.05, "yellow"), (0.1, "red")),
            details="quire-requests",
        ),
        Panel(
            "KV in use",
            "Part of the KV pages that is held.",
            "percentunit",
            one(ratio(total("quire_kv_pages_used"), total("quire_kv_pages"))),
            now=True,
            width=3,
            colors=("green", (0.8, "yellow"), (0.95, "red")),
            details="quire-engines",
        ),
        Panel(
            "Waiting",
            "Requests in queues.",
            "short",
            one(total("quire_num_requests_waiting")),
            now=True,
            width=3,
            colors=("green", (10, "yellow")),
            details="quire-requests",
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Tokens a second",
            "Prompt tokens of requests that left the queue, those that the prefix cache had, and output tokens.",
            TOKENS_A_SECOND,
            (
                Query(rate("quire_prompt_tokens_total"), "prompt {{model_name}}"),
                Query(rate("quire_prompt_tokens_cached_total"), "of these cached {{model_name}}"),
                Query(rate("quire_generation_tokens_total"), "output {{model_name}}"),
            ),
        ),
        Panel(
            "Requests by outcome",
            "Requests by outcome; refused ones are among them. Outcomes without requests are left out.",
            "reqps",
            one(some(rate("quire_requests_total", "outcome")), "{{outcome}} {{model_name}}"),
            stacked=True,
        ),
        Panel(
            "Requests in the house",
            "Sequences that run, requests that wait in queues, and requests that wait for an engine.",
            "none",
            (
                Query(total("quire_num_requests_running"), "running {{model_name}}"),
                Query(total("quire_num_requests_waiting"), "waiting {{model_name}}"),
                Query(total("quire_num_requests_parked"), "for an engine {{model_name}}"),
            ),
        ),
    ),
)

LATENCY = Row(
    "Latency and memory",
    (
        Panel("Time to first token", "Time from arrival to the first token.", "s", quantiles(TTFT)),
        Panel("Time between tokens", "From a token to the next one of its sequence.", "s", quantiles(ITL)),
        Panel(
            "KV pages",
            "Held by sequences; and held by no sequence, kept for prompts that start alike.",
            "percentunit",
            (
                Query(ratio(total("quire_kv_pages_used"), total("quire_kv_pages")), "held {{model_name}}"),
                Query(ratio(total("quire_kv_pages_cached"), total("quire_kv_pages")), "cached {{model_name}}"),
            ),
            top=1,
            stacked=True,
        ),
    ),
)

OVERVIEW = GrafanaDashboard(
    "quire-overview", "Quire: overview", "Is it well, and how much does it do?", (NOW, TRAFFIC, LATENCY)
)
