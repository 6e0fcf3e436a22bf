"""A `quire serve` to measure: a running one, or one started for the run."""

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY = re.compile(r"quire: ready: model (\S+) .*gRPC (\S+), metrics (\S+), admin (\S+)")
STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Serving:
    """Addresses of a running server.

    Attributes:
        address: HOST:PORT of gRPC.
        metrics_url: URL of its Prometheus metrics.
        admin: HOST:PORT of AdminService; "" if unknown.
        pid: Process id of a server that was started for the run; 0 for another one.
    """

    address: str
    metrics_url: str
    admin: str = ""
    pid: int = 0

    def metrics(self) -> dict[str, float]:
        """Returns samples by name, summed over their labels. Raises OSError."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:  # noqa: S310 - an address the user gave
            lines = answer.read().decode().splitlines()
        samples: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                name = key.partition("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
        return samples


def serves(metrics_url: str, model: str) -> bool:
    """Returns whether a server of this model answers at the metrics address."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=2) as answer:  # noqa: S310
            return f'model_name="{model}"' in answer.read().decode()
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def started(*flags: str) -> Iterator[Serving]:
    """Starts a server on free ports, and ends it afterwards. Raises RuntimeError if it does not start."""
    quire = str(Path(sys.executable).parent / "quire")
    command = [quire, "serve", "--port", "0", "--metrics-port", "0", "--admin-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        found = READY.search(process.stdout.readline())
        if not found:
            raise RuntimeError(f"{' '.join(command)} did not start")
        yield Serving(found[2], found[3], found[4], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
