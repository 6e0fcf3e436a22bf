"""Starts real `quire gateway` processes."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from openai import AsyncOpenAI, OpenAI

from tests.support.forking import Quire
from tests.support.server import STOP_SECONDS, clean_environment

READY = re.compile(r"quire: ready: gateway (https?)://(\S+):(\d+)/v1 to ([^ ]+(?:, [^ ]+:\d+)*)(?:, metrics (\S+))?")


@dataclass
class RunningGateway:
    process: subprocess.Popen
    scheme: str
    host: str
    port: int
    metrics_url: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    def client(self, **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "secret", "max_retries": 0, "timeout": 60} | more)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=60)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), 30)

    def send(self, path: str, body: Any, **headers: str) -> socket.socket:
        """A request on a socket of its own."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: a", f"content-length: {len(data)}", "content-type: application/json"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        opened = self.connect()
        opened.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return opened

    def answer(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and what the JSON says."""
        with self.send(path, body, connection="close", **headers) as opened, opened.makefile("rb") as file:
            return read_answer(file.read())

    def health(self) -> tuple[int, Any]:
        """Status and what the JSON says."""
        status, _, said = self.ask("GET", "/health")
        return status, said

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and what the JSON says, of a request without a body."""
        lines = [f"{method} {path} HTTP/1.1", "host: a", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        with self.connect() as opened, opened.makefile("rb") as file:
            opened.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
            return read_answer(file.read())

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


def read_answer(data: bytes) -> tuple[int, dict[str, str], Any]:
    """Reads a whole answer that has a length."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    is_json = headers.get("content-type") == "application/json"
    return int(first.split()[1]), headers, json.loads(body) if is_json else body.decode() or None


@contextmanager
def running_gateway(servers: list[str], *flags: str, stderr: IO[str] | None = None) -> Iterator[RunningGateway]:
    """On a free port, in front of these; afterwards it ends as it should. stderr: where its log goes."""
    named = [part for server in servers for part in ("--server", server)]
    arguments = ["gateway", *named, "--port", "0", *flags]
    process = Quire(*arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean_environment())
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = READY.fullmatch(said.rstrip("\n"))
        assert found, f"the gateway said {said!r} and ended with {process.poll()}"
        gateway = RunningGateway(process, found[1], found[2], int(found[3]), found[5] or "")
        yield gateway
        if process.poll() is None:
            assert gateway.stop() == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
