"""Starts real `quire serve` processes for end-to-end tests."""

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.forking import QUIRE, Quire, run_quire

READY = re.compile(r"quire: ready: model (\S+) .*gRPC (\S+), metrics (\S+), admin ([^\s,]+)(?:, dashboard (\S+))?")
START_SECONDS = 120
STOP_SECONDS = 60


@dataclass
class RunningServer:
    process: subprocess.Popen
    model: str
    address: str
    metrics_url: str
    admin: str
    dashboard: str | None = None

    def metrics(self) -> dict[str, float]:
        """Samples by "name" or "name{outcome}"; the model_name label is left out."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:  # noqa: S310 - our own loopback port
            text = answer.read().decode()
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                key = re.sub(r'model_name="[^"]*",?', "", key).replace(",}", "}").replace("{}", "")
                samples[re.sub(r'\{outcome="(\w+)"\}', r"{\1}", key)] = float(value)
        return samples

    def wait_for_metric(self, name: str, value: float, seconds: float = 30) -> None:
        """Polls until the metric has this value; fails with what it had."""
        self.wait_until(lambda metrics: metrics[name], value, seconds)

    def wait_until(self, figure: Callable[[dict[str, float]], float], value: float, seconds: float = 30) -> None:
        """Polls until a figure made of the metrics has this value; fails with what it was."""
        deadline = time.monotonic() + seconds
        while (now := figure(self.metrics())) != value:
            assert time.monotonic() < deadline, f"the figure is {now}, not {value}, after {seconds} s"
            time.sleep(0.02)

    def stub(self, channel: grpc.Channel) -> pb_grpc.GenerationServiceStub:
        return pb_grpc.GenerationServiceStub(channel)

    def stop(self, with_signal: int = signal.SIGTERM) -> int:
        self.process.send_signal(with_signal)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def running_server(
    *flags: str, stderr: IO[str] | None = None, forked: bool = True, **variables: str
) -> Iterator[RunningServer]:
    """A server on free ports. Afterwards every page is free and the process gone.

    Args:
        stderr: Where its standard error goes; None: to the test's.
        forked: Whether the test's fork server starts it; False: the installed command, in a new interpreter.
        variables: Of its environment.
    """
    with _running("serve", *flags, stderr=stderr, forked=forked, **variables) as server:
        yield server
        if server.process.poll() is None:
            server.wait_for_metric("quire_num_requests_running", 0)
            server.wait_for_metric("quire_kv_pages_used", 0)


@contextmanager
def running_alone(*flags: str) -> Iterator[RunningServer]:
    """As `running_server`, whose engines show their metrics themselves."""
    with _running("serve", *flags) as server:
        yield server


@contextmanager
def running_frontend(join: str, *flags: str) -> Iterator[RunningServer]:
    """On free ports, with the engines of the server that has this --join-address. Afterwards the process is gone."""
    with _running("frontend", "--join", join, *flags) as server:
        yield server


@contextmanager
def _running(
    command: str, *flags: str, stderr: IO[str] | None = None, forked: bool = True, **variables: str
) -> Iterator[RunningServer]:
    arguments = [command, "--port", "0", "--metrics-port", "0", "--admin-port", "0", *flags]
    options = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True, "env": clean_environment() | variables}
    process = Quire(*arguments, **options) if forked else subprocess.Popen([QUIRE, *arguments], **options)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = READY.search(said)
        assert found, f"the server said {said!r} and ended with {process.poll()}"
        server = RunningServer(process, *found.groups())
        yield server
        if process.poll() is None:
            assert server.stop() == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}


def quire(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a `quire` command to its end; variables: of its environment."""
    return run_quire(*arguments, env=clean_environment() | variables)


def stream_request(prompt: str | list[int], max_tokens: int, **sampling: float) -> pb.StreamGenerateRequest:
    """Asks for token ids too; end tokens are ignored, so that lengths are known."""
    spec = pb.GenerationSpec(
        sampling=pb.SamplingParameters(**sampling),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
    return pb.StreamGenerateRequest(spec=spec)


def details(error: grpc.RpcError) -> dict[str, object]:
    """google.rpc details by type name."""
    status = rpc_status.from_call(error)
    assert status is not None, "the error carries no google.rpc.Status"
    found = {}
    for packed in status.details:
        name = packed.TypeName().removeprefix("google.rpc.")
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found
