"""The dashboard of the cluster: its engines, their starts and ends, and the resources of each process."""

from deploy.grafana.panels import MODEL, OF_MODEL, UP, GrafanaDashboard, Panel, Query, Row, of_owners, one, rate, total

EACH = "{{job}} {{instance}} {{replica}}"

REPLICAS = Row(
    "Engines",
    (
        Panel(
            "Engines",
            "Engines that take requests, that are wanted, and that an operator has drained, by their server.",
            "none",
            (
                Query(of_owners(f"quire_replicas{{{MODEL}}}"), "take requests {{model_name}}"),
                Query(total("quire_replicas_wanted"), "wanted {{model_name}}"),
                Query(of_owners(f"quire_replicas_drained{{{MODEL}}}"), "drained {{model_name}}"),
            ),
        ),
        Panel(
            "Starts and deaths",
            "Engines that became ready, and that died unasked, a second.",
            "none",
            (
                Query(rate("quire_engine_starts_total"), "starts {{model_name}}"),
                Query(
                    of_owners(f"rate(quire_engine_failures_total{{{MODEL}}}[$__rate_interval])"),
                    "deaths {{model_name}}",
                ),
            ),
        ),
        Panel(
            "Scaling",
            "Engines started or ended for the load, a second.",
            "none",
            one(rate("quire_replica_scalings_total", "direction"), "{{direction}} {{model_name}}"),
        ),
        Panel(
            "Requests moved",
            "Requests a second that left an engine before they had ended: it died, or it was drained.",
            "none",
            one(rate("quire_requests_moved_total", "cause"), "{{cause}} {{model_name}}"),
        ),
        Panel(
            "Cost of moves",
            "Tokens a second of requests that another engine got, and pages a second that were copied there.",
            "none",
            (
                Query(rate("quire_resubmitted_tokens_total"), "tokens {{model_name}}"),
                Query(rate("quire_kv_pages_transferred_total"), "pages copied {{model_name}}"),
                Query(rate("quire_request_resubmissions_total"), "requests {{model_name}}"),
            ),
        ),
        Panel(
            "Longest without progress",
            "Time without progress of engines that have work. Health says NOT_SERVING at --stall-timeout.",
            "s",
            one(f"max by (model_name) (quire_engine_stalled_seconds{{{MODEL}}})"),
        ),
    ),
)

EACH_ENGINE = Row(
    "Each target",
    (
        Panel("Running", "Sequences that run.", "none", one(f"quire_num_requests_running{{{MODEL}}}", EACH)),
        Panel("Waiting", "Requests in the queue.", "none", one(f"quire_num_requests_waiting{{{MODEL}}}", EACH)),
        Panel(
            "KV in use",
            "Part of the KV pages that is held.",
            "percentunit",
            one(f"quire_kv_cache_usage_ratio{{{MODEL}}}", EACH),
            top=1,
        ),
        Panel(
            "Processors",
            "Processor time a second of the process. Engines in processes of their own are targets of their own only "
            "with --metrics-targets.",
            "none",
            one(f"rate(process_cpu_seconds_total[$__rate_interval]) {OF_MODEL}", EACH),
        ),
        Panel(
            "Memory",
            "Resident memory of the process.",
            "bytes",
            one(f"process_resident_memory_bytes {OF_MODEL}", EACH),
        ),
        Panel(
            "Open files",
            "Share of the descriptors that the process may have open.",
            "percentunit",
            one(f"process_open_fds / process_max_fds {OF_MODEL}", EACH),
            top=1,
        ),
        Panel(
            "Up",
            "Whether Prometheus gets an answer: 0 where a target has ended, or never named its model.",
            "none",
            one(UP, EACH),
            top=1,
        ),
        Panel("Age", "Since the process started.", "s", one(f"time() - process_start_time_seconds {OF_MODEL}", EACH)),
        Panel(
            "Versions",
            "Targets by the version of Quire that they run.",
            "none",
            one(f"count by (version) (quire_build_info{{{MODEL}}})", "{{version}}"),
        ),
    ),
)

CLUSTER = GrafanaDashboard(
    "quire-cluster",
    "Quire: cluster",
    "Engines, their starts and ends, and the resources of each process.",
    (REPLICAS, EACH_ENGINE),
)
