"""Each alert fires when it should and is silent when all but that is so: `promtool test rules` on made-up series."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.files import DEPLOY, ROOT, commands, flags, read
from tests.deploy.test_agreement import parameters
from tests.support.prometheus import needs_prometheus

RULES = DEPLOY / "prometheus/rules"
MODEL = 'model_name="m"'
SCRAPED = 'quire_build_info{job="quire",instance="a",model_name="m",version="1"}'


def ratio(part: str, whole: str, fires: str, silent: str, minutes: int = 60) -> dict[str, Any]:
    """Two counters, by what the first grows in a minute; the second by 100."""
    return {part: (f"0+{fires}x{minutes}", f"0+{silent}x{minutes}"), whole: f"0+100x{minutes}"}


def late(name: str, bound: str, fires: str, silent: str, minutes: int) -> dict[str, Any]:
    """A histogram: how many of 100 in a minute are below the bound."""
    part, whole = f'quire_{name}_seconds_bucket{{{MODEL},le="{bound}"}}', f"quire_{name}_seconds_count{{{MODEL}}}"
    return ratio(part, whole, fires, silent, minutes)


def with_requests(given: dict[str, Any]) -> dict[str, Any]:
    """And 100 first tokens in a minute: alerts about tokens are of requests, which may be of any length."""
    return {f"quire_time_to_first_token_seconds_count{{{MODEL}}}": "0+100x150"} | given


def outcomes(outcome: str, fires: str, silent: str) -> dict[str, Any]:
    failed, others = (f'quire_requests_total{{{MODEL},outcome="{name}"}}' for name in (outcome, "stop"))
    return ratio(failed, others, fires, silent)


# By alert: minutes after which it is looked at, and series with their values where it fires and where it does not.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "QuireScrapeDown": (3, {'up{job="quire-engines",instance="a"}': ("1 0x9", "1x9")}),
    "QuireNotScraped": (9, {SCRAPED: ("_x99", "1x99")}),
    "QuireNoEngine": (4, {f"quire_replicas{{{MODEL}}}": ("1 0x9", "1 0 1x9")}),
    "QuireReplicasMissing": (
        15,
        {
            f"quire_replicas{{{MODEL}}}": "1x30",
            f"quire_replicas_drained{{{MODEL}}}": ("0x30", "1x30"),
            f"quire_replicas_wanted{{{MODEL}}}": "2x30",
        },
    ),
    "QuireEngineStalled": (3, {f"quire_engine_stalled_seconds{{{MODEL}}}": ("0 40+60x9", "0 29x9")}),
    "QuireEnginesDie": (30, {f"quire_engine_failures_total{{{MODEL}}}": ("0x9 1 2 3 4x40", "0x9 1 2x40")}),
    "QuireQuarantine": (30, {f'quire_requests_total{{{MODEL},outcome="quarantined"}}': ("0x9 1x40", "1x50")}),
    "QuireQueueGrows": (25, {f"quire_num_requests_waiting{{{MODEL}}}": ("0+5x40", "90-2x40")}),
    "QuireQueueTimeHigh": (
        30,
        {
            f'quire_request_queue_time_seconds_bucket{{{MODEL},le="5.0"}}': ("0+90x60", "0+96x60"),
            f'quire_request_queue_time_seconds_bucket{{{MODEL},le="10.0"}}': "0+100x60",
            f'quire_request_queue_time_seconds_bucket{{{MODEL},le="+Inf"}}': "0+100x60",
        },
    ),
    "QuireRefusesRequests": (30, outcomes("queue_full", "8", "3")),
    "QuireKvPressure": (
        15,
        {f"quire_kv_pages_used{{{MODEL}}}": ("97x30", "94x30"), f"quire_kv_pages{{{MODEL}}}": "100x30"},
    ),
    "QuirePreemptionStorm": (
        30,
        ratio(f"quire_recomputed_tokens_total{{{MODEL}}}", f"quire_computed_tokens_total{{{MODEL}}}", "25", "15"),
    ),
    "QuireFilesRunOut": (
        9,
        {
            'process_open_fds{job="quire",instance="a"}': ("90x30", "70x30"),
            'process_max_fds{job="quire",instance="a"}': "100x30",
        },
    ),
    "QuireErrors": (30, outcomes("engine_failed", "2", "0.5")),
    # 20 of 100 are late, then 10: more than 14.4 and less; 8 and 5: more than 6 and less.
    "QuireFirstTokensLateFast": (90, late("time_to_first_token", "2.5", "80", "90", 30)),
    "QuireFirstTokensLateSlow": (420, late("time_to_first_token", "2.5", "92", "95", 120)),
    "QuireTokensLateFast": (90, with_requests(late("inter_token_latency", "0.1", "80", "90", 30))),
    "QuireTokensLateSlow": (420, with_requests(late("inter_token_latency", "0.1", "92", "95", 120))),
    "QuireLedgerImbalance": (30, {f"quire_kv_ledger_imbalances_total{{{MODEL}}}": ("0x9 1x40", "1x50")}),
    "QuireHostCopiesLost": (30, {f"quire_kv_pages_swap_lost_total{{{MODEL}}}": ("0x9 2x40", "2x50")}),
}


# By alert: minutes after which it is looked at, and series of a server that had one request, a slow one.
ONE = f"quire_time_to_first_token_seconds_count{{{MODEL}}}"
ONE_SLOW_REQUEST: dict[str, tuple[int, dict[str, str]]] = {
    f"Quire{what}Late{pace}": (minutes, series)
    for pace, minutes in (("Fast", 14), ("Slow", 30))
    for what, series in (
        ("FirstTokens", {ONE: "0x9 1x60", f'quire_time_to_first_token_seconds_bucket{{{MODEL},le="2.5"}}': "0x70"}),
        (
            "Tokens",
            {
                ONE: "0x9 1x60",
                f'quire_inter_token_latency_seconds_bucket{{{MODEL},le="0.1"}}': "0x70",
                f"quire_inter_token_latency_seconds_count{{{MODEL}}}": "0x9 500x60",
            },
        ),
    )
}

SERVER, GUEST = (f'{{job="quire",instance="{name}",{MODEL}}}' for name in ("server", "guest"))
# By alert: two targets that see the same engines, of a server and of a frontend that has joined it; who it is about.
TWO_TARGETS: dict[str, tuple[int, dict[str, str], list[str]]] = {
    # Each for itself: either may have lost what the other reaches, and refuses requests then.
    "QuireNoEngine": (4, {f"quire_replicas{SERVER}": "1x9", f"quire_replicas{GUEST}": "1 0x9"}, ["guest"]),
    "QuireReplicasMissing": (
        15,
        {f"quire_replicas{at}": "1x30" for at in (SERVER, GUEST)}
        | {f"quire_replicas_drained{at}": "0x30" for at in (SERVER, GUEST)}
        | {f"quire_replicas_wanted{SERVER}": "2x30", f"quire_replicas_wanted{GUEST}": "0x30"},
        ["server"],
    ),
}

STEPS = {False: 1, True: 4}
"""Minutes between two values: what looks at hours needs fewer, though no more than five apart."""


def is_slow(alert: str) -> bool:
    return alert.endswith(("Fast", "Slow"))


def alerts() -> dict[str, dict[str, Any]]:
    groups = read(RULES / "alerts.yml")[0]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def unit(alert: str, fires: bool) -> dict[str, Any]:
    """One test as promtool reads it."""
    minutes, given = CASES[alert]
    step = STEPS[is_slow(alert)]
    series = {SCRAPED: "1x600"} | {
        name: values if isinstance(values, str) else values[0 if fires else 1] for name, values in given.items()
    }
    wanted = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else []
    expression = f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
    return looked_at(minutes, alert, expression, series, wanted, step)


def looked_at(
    minutes: int, name: str, expression: str, series: dict[str, str], wanted: list[dict[str, Any]], step: int = 1
) -> dict[str, Any]:
    """As promtool reads it: what an expression is then. step: minutes between two values."""
    return {
        "name": name,
        "interval": f"{step}m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": f"{minutes}m", "exp_samples": wanted}],
    }


def promtool(directory: Path, tests: list[dict[str, Any]], step: int = 1) -> subprocess.CompletedProcess[str]:
    """step: minutes between two evaluations."""
    file = directory / "test.yml"
    rules = [str(RULES / name) for name in ("recording.yml", "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": f"{step}m", "tests": tests}))
    return subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=120)


@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert set(CASES) == set(alerts())
    for slow, step in STEPS.items():
        tests = [unit(alert, fires) for alert in CASES if is_slow(alert) is slow for fires in (True, False)]
        done = promtool(tmp_path, tests, step)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_one_slow_request_of_an_idle_server_wakes_nobody(tmp_path: Path) -> None:
    assert set(ONE_SLOW_REQUEST) == {alert for alert in alerts() if "Late" in alert}
    tests = [
        looked_at(minutes, alert, f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', series, [])
        for alert, (minutes, series) in ONE_SLOW_REQUEST.items()
    ]
    done = promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_an_alert_is_of_the_target_that_it_is_about(tmp_path: Path) -> None:
    tests = []
    for alert, (minutes, series, about) in TWO_TARGETS.items():
        wanted = [{"labels": f'{{instance="{name}"}}', "value": 1} for name in about]
        expression = f'count by (instance) (ALERTS{{alertname="{alert}",alertstate="firing"}})'
        tests.append(looked_at(minutes, alert, expression, series, wanted))
    done = promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_finds_one_that_does_not_fire(tmp_path: Path) -> None:
    wrong = unit("QuireNoEngine", True)
    wrong["input_series"][-1]["values"] = "1x9"
    assert promtool(tmp_path, [wrong]).returncode == 1


def test_each_alert_has_its_section_in_the_runbook_and_each_section_its_alert() -> None:
    page = (ROOT / "docs/guides/runbook.md").read_text()
    sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert sections == list(alerts()), "in the order of the alerts"
    for name, rule in alerts().items():
        path, anchor = rule["annotations"]["runbook_url"].split("#")
        assert (path, anchor) == ("docs/guides/runbook.md", name.lower())
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_the_runbook_s_addresses_become_those_of_a_site(tmp_path: Path) -> None:
    """By the command that deploy/README.md gives."""
    (command,) = re.findall(r"^sed .*runbook_url.*$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    place = tmp_path / "deploy/prometheus/rules"
    place.mkdir(parents=True)
    (place / "alerts.yml").write_text((RULES / "alerts.yml").read_text())
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    urls = re.findall(r"runbook_url: (.*)", (place / "alerts.yml").read_text())
    assert urls == [f"https://ADDRESS/docs/guides/runbook.md#{name.lower()}" for name in alerts()]


def test_what_the_runbook_names_is_there() -> None:
    page = (ROOT / "docs/guides/runbook.md").read_text()
    called = list(commands(page, "quire"))
    assert len(called) >= 3
    for words in called:
        assert set(flags(words)) <= parameters(words), words
    known = parameters(["serve"])
    for flag in re.findall(r"`(--[a-z-]+)", page):
        assert flag in known, flag
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / "docs/guides" / target).exists(), target
