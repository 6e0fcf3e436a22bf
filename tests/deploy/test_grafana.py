"""The dashboards' files: what the code makes, as Grafana reads it. tests/e2e/test_dashboards.py: they have data."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import generate_latest

from deploy.grafana.build import PAGES, PLACE, text_of
from deploy.grafana.panels import TAG, TOKENS_A_SECOND, UP, WIDTH
from tests.deploy.files import DEPLOY, read
from tests.rpc.test_aliases import filled

UNITS = {"none", "short", "s", "bytes", "percentunit", "reqps", TOKENS_A_SECOND}
each_dashboard = pytest.mark.parametrize("name", [page.name for page in PAGES])


def dashboard(name: str) -> dict[str, Any]:
    return json.loads((PLACE / f"{name}.json").read_text())


def panels(name: str) -> list[dict[str, Any]]:
    """But rows."""
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_code_makes() -> None:
    made = {page.name: text_of(page) for page in PAGES}
    assert {path.stem: path.read_text() for path in PLACE.glob("*.json")} == made, "run make dashboards"


@each_dashboard
def test_grafana_reads_it_and_it_can_be_used_anywhere(name: str) -> None:
    found = dashboard(name)
    assert Dashboard.from_json(found).uid == found["uid"] == name
    source, model = found["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert (model["name"], model["type"], model["datasource"]["uid"]) == ("model_name", "query", "${datasource}")
    assert (model["multi"], model["includeAll"]) == (True, True)
    assert not re.search(r'"uid": "(?!quire-|\$\{datasource\})', json.dumps(found)), "a source of one Grafana"


@each_dashboard
def test_every_panel_says_what_it_shows_and_in_which_unit(name: str) -> None:
    assert len({panel["title"] + panel["description"] for panel in panels(name)}) == len(panels(name))
    for panel in panels(name):
        assert len(panel["description"]) > 8, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters)) != []
        for target in panel["targets"]:
            assert "$model_name" in target["expr"], "another model's would be shown too"
            windows = set(re.findall(r"\[([^]]+)\]", target["expr"]))
            assert windows <= {"$__rate_interval"} or target["expr"] == UP, target["expr"]
            assert target["legendFormat"]


@each_dashboard
def test_no_panel_has_anothers_number_or_place(name: str) -> None:
    found = dashboard(name)["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken, panel["title"]
        taken |= cells


@each_dashboard
def test_a_large_figure_has_a_unit_and_colors_of_its_own(name: str) -> None:
    """Without thresholds Grafana shows each value from 80 on in red, whatever it is."""
    for panel in panels(name):
        if panel["type"] == "stat":
            defaults = panel["fieldConfig"]["defaults"]
            assert defaults["unit"] != "none", panel["title"]
            first, *others = defaults["thresholds"]["steps"]
            assert first["value"] is None
            assert [step["value"] for step in others] == sorted(step["value"] for step in others)


def test_figures_turn_red_where_alerts_are_woken() -> None:
    """Alerts and recording rules have the same bounds, as numbers in their expressions."""
    rules = (DEPLOY / "prometheus/rules/alerts.yml").read_text() + (
        DEPLOY / "prometheus/rules/recording.yml"
    ).read_text()
    stats = {panel["title"]: panel for panel in panels("quire-overview") if panel["type"] == "stat"}
    for title, expression in (
        ("Failed", "quire_requests_failed:ratio_rate5m > {}"),
        ("First token", 'quire_time_to_first_token_seconds_bucket{{le="{}"}}'),
        ("Next token", 'quire_inter_token_latency_seconds_bucket{{le="{}"}}'),
        ("KV in use", "quire_kv_cache_usage:ratio > {}"),
        ("Waiting", "(quire_num_requests_waiting) > {}"),
    ):
        bound = stats[title]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        assert expression.format(bound) in rules, (title, bound)
    engines = stats["Engines"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [(step["value"], step["color"]) for step in engines] == [(None, "red"), (1, "green")]


@each_dashboard
def test_dashboards_lead_to_each_other_with_models_and_time(name: str) -> None:
    found = dashboard(name)
    (link,) = found["links"]
    assert (link["type"], link["tags"], link["keepTime"], link["includeVars"]) == ("dashboards", [TAG], True, True)
    assert TAG in found["tags"]
    for panel in panels(name):
        for one in panel.get("links", ()):
            match = re.fullmatch(r"/d/(quire-\w+)\?\$\{__url_time_range\}&\$\{__all_variables\}", one["url"])
            assert match, one["url"]
            assert match[1] in {page.name for page in PAGES} - {name}
    assert name != "quire-overview" or any(panel.get("links") for panel in panels(name))


@each_dashboard
def test_starts_of_servers_are_marked(name: str) -> None:
    (starts,) = dashboard(name)["annotations"]["list"]
    assert (starts["datasource"]["uid"], starts["enable"], starts["useValueForTime"]) == ("${datasource}", True, True)
    assert "$model_name" in starts["expr"]
    labels = set(re.findall(r"{{(\w+)}}", starts["titleFormat"] + starts["textFormat"]))
    assert labels == {"version", "model_name", "instance"}


def test_panels_ask_for_what_there_is_and_leave_nothing_out() -> None:
    page = generate_latest(filled().registry).decode()
    recorded = {
        rule["record"]
        for group in read(DEPLOY / "prometheus/rules/recording.yml")[0]["groups"]
        for rule in group["rules"]
    }
    asked = "\n".join(target["expr"] for each in PAGES for panel in panels(each.name) for target in panel["targets"])
    names = set(re.findall(r"\b(?:quire|process)_\w+|\bmodel_name:[\w:]+", asked))
    known = set(re.findall(r"^(\w+)[{ ]", page, re.MULTILINE))
    assert names <= known | recorded, names - known - recorded
    families = set(re.findall(r"^# TYPE (quire_\w+)", page, re.MULTILINE))
    shown = "\n".join(names) + (DEPLOY / "prometheus/rules/recording.yml").read_text()
    assert {family for family in families if family not in shown} == set(), "metrics that no panel shows"


def test_provisioning_is_of_these_files() -> None:
    (source,) = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    prometheus = read(DEPLOY / "prometheus/prometheus.yml")[0]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert source["type"] == "prometheus"
    (provider,) = read(DEPLOY / "grafana/provisioning/dashboards/quire.yml")[0]["providers"]
    assert Path(provider["options"]["path"]).is_absolute()
