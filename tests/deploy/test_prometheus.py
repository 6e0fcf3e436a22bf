"""Prometheus's files: as its own tools read them, and that they are of metrics that there are."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from rpc.settings import ServerSettings
from tests.deploy.files import DEPLOY, groups, read
from tests.rpc.test_aliases import filled
from tests.support.prometheus import needs_prometheus

PLACE = DEPLOY / "prometheus"
CONFIGS = ("prometheus.yml", "kubernetes.yml")
DEPLOYMENTS = [
    PLACE.parent / name
    for name in (
        "kubernetes/base/raycluster.yaml",
        "kubernetes/plain/deployment.yaml",
        "helm/quire/templates/deployment.yaml",
    )
]


def promtool(*words: str, text: str = "") -> tuple[int, str]:
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("name", CONFIGS)
def test_prometheus_takes_its_configuration(name: str, tmp_path: Path) -> None:
    """And the rules that it names. Debian's has no kubernetes_sd_configs: what is around them is read."""
    config = read(PLACE / name)[0]
    made = {**config, "scrape_configs": [without_kubernetes(job) for job in config["scrape_configs"]]}
    made["rule_files"] = [str(PLACE / path) for path in config["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(made))
    assert promtool("check", "config", str(file))[0] == 0, promtool("check", "config", str(file))
    made["scrape_configs"][0]["static_config"] = []
    file.write_text(yaml.safe_dump(made))
    assert promtool("check", "config", str(file))[0] == 1


def without_kubernetes(job: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in job.items() if key != "kubernetes_sd_configs"}


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_the_metrics_and_would() -> None:
    page = generate_latest(filled().registry).decode()
    assert promtool("check", "metrics", text=page) == (0, "")
    code, said = promtool("check", "metrics", text=re.sub(r"quire_kv_pages\b", "quire_kv_pages_total", page))
    assert code == 3
    assert "_total" in said


def test_what_is_scraped_is_what_servers_show() -> None:
    jobs = {job["job_name"]: job for job in read(PLACE / "prometheus.yml")[0]["scrape_configs"]}
    assert jobs["quire"]["static_configs"] == [{"targets": [f"127.0.0.1:{ServerSettings().listen.metrics_port}"]}]
    assert len(jobs["quire-engines"]["file_sd_configs"]) == 1
    (pods,) = read(PLACE / "kubernetes.yml")[0]["scrape_configs"]
    assert pods["kubernetes_sd_configs"] == [{"role": "pod"}]
    (port,) = (rule["regex"] for rule in pods["relabel_configs"] if rule.get("action") == "keep")
    named = {path: path.read_text().count(f"name: {port}") for path in DEPLOYMENTS}
    assert set(named.values()) == {1}, "each of them shows its metrics where they are looked for"
    assert "frontend" in groups()
    first, second = (read(PLACE / name)[0] for name in CONFIGS)
    assert first["rule_files"] == second["rule_files"]
    assert first["global"] == second["global"]


def test_rules_ask_for_metrics_that_there_are() -> None:
    page = generate_latest(filled().registry).decode()
    known = set(re.findall(r"^(\w+)[{ ]", page, re.MULTILINE)) | {"up"}
    recorded = set()
    for name in ("recording.yml", "alerts.yml"):
        for group in read(PLACE / "rules" / name)[0]["groups"]:
            for rule in group["rules"]:
                asked = set(re.findall(r"\b(?:quire|process)_\w+|\bmodel_name:[\w:]+|\bup\b", rule["expr"]))
                assert asked, rule
                assert asked <= known | recorded, asked - known - recorded
                recorded |= {rule["record"]} if "record" in rule else set()
