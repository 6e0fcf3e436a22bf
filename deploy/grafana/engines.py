"""The dashboard of engines: their KV pages and their time."""

from deploy.grafana.panels import (
    MODEL,
    GrafanaDashboard,
    Panel,
    Query,
    Row,
    mean,
    one,
    quantile,
    quantiles,
    rate,
    ratio,
    total,
)

PAGES = total("quire_kv_pages")
PAGE_BYTES = f"max by (model_name) (quire_kv_page_bytes{{{MODEL}}})"
PAGE_TOKENS = f"max by (model_name) (quire_kv_page_tokens{{{MODEL}}})"
STEP, OVERHEAD, LIFETIME = (
    "quire_step_duration_seconds",
    "quire_step_overhead_seconds",
    "quire_kv_page_lifetime_seconds",
)

POOL = Row(
    "KV pages",
    (
        Panel(
            "Pages",
            "Held by sequences and steps; cached: held by no sequence, with content that a prompt may find.",
            "none",
            (
                Query(total("quire_kv_pages_used"), "held {{model_name}}"),
                Query(total("quire_kv_pages_cached"), "cached {{model_name}}"),
                Query(PAGES, "all {{model_name}}"),
            ),
        ),
        Panel(
            "Memory held",
            "Bytes of the pages that are held, now and at most.",
            "bytes",
            (
                Query(f"{total('quire_kv_pages_used')} * {PAGE_BYTES}", "now {{model_name}}"),
                Query(f"{total('quire_kv_pages_used_peak')} * {PAGE_BYTES}", "at most {{model_name}}"),
            ),
        ),
        Panel(
            "Sharing",
            "Pages that sequences would hold if each had copies of those that it shares, and those that are shared.",
            "none",
            (
                Query(total("quire_kv_pages_if_copied"), "if copied {{model_name}}"),
                Query(total("quire_kv_pages_shared"), "shared {{model_name}}"),
            ),
        ),
        Panel(
            "Empty places",
            "Places for tokens in running sequences' pages that hold none yet, of all that the pool has.",
            "percentunit",
            one(ratio(total("quire_kv_slots_unused"), f"{PAGES} * {PAGE_TOKENS}")),
        ),
        Panel(
            "Evicted",
            "Cached pages given up a second: for their place, by a reset, or since a device failed.",
            "none",
            one(rate("quire_kv_pages_evicted_total", "cause"), "{{cause}} {{model_name}}"),
        ),
        Panel(
            "Lifetime of cached pages",
            "Time from publication until the place was needed. Short ones: the pool is small for the load.",
            "s",
            quantiles(LIFETIME),
        ),
    ),
)

PREFIXES = Row(
    "Prefix cache and host tier",
    (
        Panel(
            "Hit ratio",
            "Part of the prompt tokens that were looked up and found.",
            "percentunit",
            one(ratio(rate("quire_prefix_cache_hits_total"), rate("quire_prefix_cache_queries_total"))),
            top=1,
        ),
        Panel(
            "Tokens looked up",
            "Prompt tokens a second, and those found.",
            "none",
            (
                Query(rate("quire_prefix_cache_queries_total"), "looked up {{model_name}}"),
                Query(rate("quire_prefix_cache_hits_total"), "found {{model_name}}"),
            ),
        ),
        Panel(
            "Pages to the host and back",
            "Pages copied a second; lost: those that came back changed, and were computed anew.",
            "none",
            (
                Query(rate("quire_kv_pages_swapped_out_total"), "out {{model_name}}"),
                Query(rate("quire_kv_pages_swapped_in_total"), "in {{model_name}}"),
                Query(rate("quire_kv_pages_swap_lost_total"), "lost {{model_name}}"),
            ),
        ),
        Panel(
            "Host tier",
            "Pages that have a copy in the host tier, and places in it.",
            "none",
            (
                Query(total("quire_kv_host_pages_used"), "used {{model_name}}"),
                Query(total("quire_kv_host_pages"), "all {{model_name}}"),
            ),
        ),
        Panel(
            "Ledger",
            "Pages that the ledger found wrong and set aside: any is a bug.",
            "none",
            one(total("quire_kv_ledger_imbalances_total")),
        ),
        Panel("Images", "Images that were encoded a second.", "none", one(rate("quire_images_encoded_total"))),
    ),
)

STEPS = Row(
    "Steps",
    (
        Panel("Step duration", "From a step's plan to its result.", "s", quantiles(STEP)),
        Panel(
            "Around the model",
            "Planning a step, packing it and taking in its result: 99% take less, and on average.",
            "s",
            (
                Query(quantile(OVERHEAD, 0.99), "p99 {{model_name}}"),
                Query(mean(OVERHEAD), "mean {{model_name}}"),
            ),
        ),
        Panel(
            "Share around the model",
            "Part of the steps' time that is not the model's. Near 1 the model is too small for this machine.",
            "percentunit",
            one(ratio(rate(OVERHEAD + "_sum"), rate(STEP + "_sum"))),
            top=1,
        ),
        Panel("Steps a second", "That engines finish.", "none", one(rate("quire_engine_steps_total"))),
        Panel(
            "Tokens computed",
            "Tokens a second whose KV was computed; again: after a preemption had thrown it away.",
            "none",
            (
                Query(rate("quire_computed_tokens_total"), "computed {{model_name}}"),
                Query(rate("quire_recomputed_tokens_total"), "again {{model_name}}"),
            ),
        ),
        Panel(
            "Draft tokens",
            "Draft tokens checked a second, and those that the model drew too; tokens that a constraint forced.",
            "none",
            (
                Query(rate("quire_spec_decode_draft_tokens_total"), "checked {{model_name}}"),
                Query(rate("quire_spec_decode_accepted_tokens_total"), "accepted {{model_name}}"),
                Query(rate("quire_jump_forward_tokens_total"), "forced {{model_name}}"),
            ),
        ),
        Panel(
            "Preemptions",
            "Sequences a second that lost their rows, by cause: a running one lacked pages, a more urgent one came, "
            "a hypothesis waited for others, or the host tier lost a copy.",
            "none",
            (
                Query(rate("quire_num_preemptions_total"), "all {{model_name}}"),
                Query(rate("quire_num_preemptions_by_cause_total", "cause"), "{{cause}} {{model_name}}"),
            ),
        ),
    ),
)

ENGINES = GrafanaDashboard(
    "quire-engines",
    "Quire: engines and KV cache",
    "KV pages and time of the engines.",
    (POOL, PREFIXES, STEPS),
)
