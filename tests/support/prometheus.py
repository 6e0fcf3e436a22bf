"""A real Prometheus that scrapes what a test tells it."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="there is no prometheus (Debian: prometheus)",
)
INTERVAL = "500ms"  # between scrapes, and between evaluations of rules


@dataclass(frozen=True)
class Prometheus:
    address: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values, as they are now."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def exemplars(self, name: str) -> list[dict[str, str]]:
        """Their labels, by bucket and time."""
        now = time.time()
        found = self.get("query_exemplars", query=name, start=str(now - 3600), end=str(now + 60))
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def names(self) -> set[str]:
        """Returns the names of all metrics that it knows."""
        return set(self.get("label/__name__/values"))

    def up(self) -> dict[tuple[str, str], float]:
        """By job and instance."""
        return {(labels["job"], labels["instance"]): value for labels, value in self.query("up")}

    def wait_until_scraped(self, count: int) -> None:
        """Waits until `count` targets were scraped, each at least once."""
        wait_until(lambda: list(self.up().values()) == [1.0] * count, f"{count} targets", 20)


@contextmanager
def running_prometheus(
    directory: Path,
    targets: Mapping[str, Sequence[str]],
    files: Mapping[str, str] | None = None,
    rules: Sequence[Path] = (),
) -> Iterator[Prometheus]:
    """targets: HOST:PORT by job. files: of targets, as file_sd_configs have them, by job."""
    jobs: list[dict[str, Any]] = [
        {"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in targets.items()
    ]
    for job, path in (files or {}).items():
        jobs.append({"job_name": job, "file_sd_configs": [{"files": [path], "refresh_interval": "1s"}]})
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": jobs,
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = ["prometheus", f"--web.listen-address={address}", "--log.level=warn", "--enable-feature=exemplar-storage"]
    command += [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: _is_ready(address), "a Prometheus that is ready", 20)
            yield Prometheus(address)
        finally:
            process.kill()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
            return True
    except OSError:
        return False
