"""Panels of the dashboards in situations that a running server has no example of: `promtool test rules`."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.build import PAGES, PLACE
from rpc.observe.metrics_http import metrics_app
from tests.deploy.test_alerts import looked_at, promtool
from tests.rpc.test_aliases import filled
from tests.support.prometheus import needs_prometheus

pytestmark = needs_prometheus
NAN = "rate(quire_requests_total[5m]) / rate(quire_requests_total[5m])"
BUILD = "quire_build_info"


def queries(page: str, title: str, shown: str = "m|n") -> list[str]:
    """Expressions of a panel. shown: the models that were chosen."""
    found = [
        target["expr"]
        for panel in json.loads((PLACE / f"{page}.json").read_text())["panels"]
        for target in panel.get("targets", ())
        if panel["title"] == title
    ]
    assert found, title
    return [chosen(expression, shown) for expression in found]


def chosen(expression: str, models: str = ".*") -> str:
    return expression.replace("$model_name", models).replace("$__rate_interval", "5m")


def of(instance: str, model: str = "", job: str = "quire") -> str:
    """Labels."""
    return f'{{job="{job}",instance="{instance}"' + (f',model_name="{model}"}}' if model else "}")


def check(directory: Path, *tests: dict[str, Any]) -> None:
    done = promtool(directory, list(tests))
    assert done.returncode == 0, done.stdout + done.stderr


def test_up_shows_what_does_not_answer_any_more_or_never_did(tmp_path: Path) -> None:
    """The metrics of a target end with its first scrape that fails; `up` goes on."""
    series = {
        f"up{of('lives', 'm')}".replace(',model_name="m"', ""): "1x60",
        f"up{of('ended')}": "1x9 0x60",
        f"up{of('never')}": "0x60",
        f"up{of('another')}": "1x60",
        f"up{of('machine', job='node')}": "1x60",
        f"{BUILD}{of('lives', 'm')}": "1x60",
        f"{BUILD}{of('ended', 'm')}": "1x9 stale",
        f"{BUILD}{of('another', 'n')}": "1x60",
    }

    def shown(models: str, **values: int) -> dict[str, Any]:
        (expression,) = queries("quire-cluster", "Up", models)
        wanted = [{"labels": f"up{of(name)}", "value": value} for name, value in values.items()]
        return looked_at(30, models, expression, series, wanted)

    check(tmp_path, shown("m", lives=1, ended=0, never=0), shown(".*", lives=1, ended=0, never=0, another=1))


def test_engines_are_counted_once_however_many_frontends_see_them(tmp_path: Path) -> None:
    """A frontend that has joined a server says quire_replicas, too, and that it wants none."""
    server, guest, other = of("server", "m"), of("guest", "m"), of("other", "n")
    series = {
        f"quire_replicas{server}": "2x30", f"quire_replicas{guest}": "2x30", f"quire_replicas{other}": "0x30",
        f"quire_replicas_drained{server}": "1x30", f"quire_replicas_drained{guest}": "1x30",
        f"quire_replicas_drained{other}": "0x30",
        f"quire_replicas_wanted{server}": "3x30", f"quire_replicas_wanted{guest}": "0x30",
        f"quire_replicas_wanted{other}": "1x30",
        f"quire_engine_failures_total{server}": "0+60x30", f"quire_engine_failures_total{guest}": "0+60x30",
        f"quire_engine_failures_total{other}": "0x30",
    }  # fmt: skip
    taking, wanted, drained = queries("quire-cluster", "Engines")
    (now,) = queries("quire-overview", "Engines")
    deaths = queries("quire-cluster", "Starts and deaths")[1]
    check(
        tmp_path,
        *(
            looked_at(20, name, expression, series, [
                {"labels": '{model_name="m"}', "value": of_server}, {"labels": '{model_name="n"}', "value": of_other},
            ])
            for name, expression, of_server, of_other in (
                ("now", now, 2, 0), ("take requests", taking, 2, 0), ("wanted", wanted, 3, 1),
                ("drained", drained, 1, 0), ("deaths", deaths, 1, 0),
            )
        ),
    )  # fmt: skip


def test_outcomes_that_no_request_has_are_left_out(tmp_path: Path) -> None:
    series = {
        f'quire_requests_total{of("server", "m")[:-1]},outcome="{outcome}"}}': values
        for outcome, values in (("stop", "0+60x30"), ("length", "0+30x30"), ("deadline", "7x30"), ("internal", "0x30"))
    }
    shown = [
        {"labels": f'{{model_name="m",outcome="{outcome}"}}', "value": value}
        for outcome, value in (("stop", 1), ("length", 0.5))
    ]
    expressions = [*queries("quire-overview", "Requests by outcome"), *queries("quire-requests", "Outcomes")]
    check(tmp_path, *(looked_at(20, "outcomes", expression, series, shown) for expression in expressions))


def test_a_server_s_start_is_marked_with_its_version_and_an_engine_s_is_not(tmp_path: Path) -> None:
    (starts,) = json.loads((PLACE / "quire-overview.json").read_text())["annotations"]["list"]
    series = {
        f"process_start_time_seconds{of('server')}": "1700000000x30",
        f"process_start_time_seconds{of('engine', job='quire-engines')}": "1700000009x30",
        f"process_start_time_seconds{of('machine', job='node')}": "1600000000x30",
        f'{BUILD}{{job="quire",instance="server",model_name="m",version="1.2"}}': "1x30",
        f'{BUILD}{{job="quire-engines",instance="engine",model_name="m",version="1.2"}}': "1x30",
        f"quire_replicas{of('server', 'm')}": "1x30",
    }
    labels = '{job="quire",instance="server",model_name="m",version="1.2"}'
    shown = [{"labels": labels, "value": 1700000000000}]
    check(tmp_path, looked_at(20, "starts", chosen(starts["expr"], "m|n"), series, shown))


def test_nothing_is_not_a_number_where_nothing_is_done(tmp_path: Path) -> None:
    text = b"".join(metrics_app(filled().registry)({"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics"}, print)).decode()
    series = {
        sample.name + re.sub(r"'(\w+)': '([^']*)'", r'\1="\2"', str({**sample.labels, "job": "quire"})):
        f"{sample.value}x60"
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip
    expressions = {
        chosen(target["expr"])
        for page in PAGES
        for panel in json.loads((PLACE / f"{page.name}.json").read_text())["panels"]
        for target in panel.get("targets", ())
    }
    assert len(expressions) > 80
    # NaN alone is not what it is.
    tested = [looked_at(30, each, f"({each}) != ({each})", series, []) for each in [NAN, *sorted(expressions)]]
    assert promtool(tmp_path, tested[:1]).returncode == 1
    check(tmp_path, tested[1] | {"promql_expr_test": [test["promql_expr_test"][0] for test in tested[1:]]})
