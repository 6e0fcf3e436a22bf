"""For tests of servers whose engine is a process: the tree and what it leaves, long calls and how they end."""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.forking import FORKS, Quire
from tests.support.server import READY, RunningServer, clean_environment, stream_request

PATIENCE = 30.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Polls; fails with `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree(pid: int) -> list[psutil.Process]:
    """The living processes below this one, without the tests' own fork server."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if is_alive(child) and child.pid != FORKS.pid]
    except psutil.NoSuchProcess:
        return []


def session(leader: int) -> list[psutil.Process]:
    """The living processes of a session; they may have other parents than they had."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and is_alive(process):
                members.append(process)
        except ProcessLookupError:
            continue
    return members


def find(pid: int, text: str, seconds: float = PATIENCE) -> psutil.Process:
    """The one process below this one whose command line, or title, has the text; waits for it."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [process for process in tree(pid) if text in _command_line(process)]
        return len(found) == 1

    wait_until(look, f"a process {text!r} below {pid}", seconds)
    return found[0]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def has_loaded(pid: int, library: str) -> bool:
    """Whether a file of this name is mapped into the process."""
    return library in Path(f"/proc/{pid}/maps").read_text()


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Makes the directory of this process's and its servers' files; afterwards nothing may be left in it.

    Its name is short: a server whose TMPDIR is long uses /tmp, since the paths of sockets have a limit.
    """
    with pytest.MonkeyPatch.context() as patch:
        directory = Path(tempfile.mkdtemp(prefix="q", dir="/tmp"))
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))  # which this process has read already
        try:
            yield directory
            wait_until(lambda: not list(directory.iterdir()), f"{directory} empty", 20)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def started_server(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """As `running_server`, but not waited for. Its output can be read from its pipes.

    It is the first of a session and process group of its own, and is killed if it still runs in the end.
    """
    arguments = ["serve", "--port", "0", "--metrics-port", "0", "--admin-port", "0", *flags]
    pipe = subprocess.PIPE
    with Quire(
        *arguments, stdout=pipe, stderr=pipe, text=True, env=clean_environment(), start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def when_ready(process: subprocess.Popen[str]) -> RunningServer:
    """Waits until `started_server`'s process is ready."""
    assert process.stdout is not None
    found = READY.search(line := process.stdout.readline())
    assert found, f"the server said {line!r}"
    return RunningServer(process, *found.groups())


# Calls.

STREAMED, UNARY, BATCHED = 32, 4, 6
REQUESTS = STREAMED + UNARY + BATCHED


def request_of(tokens: int = 250, seed: int = 0) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=stream_request("A", tokens, temperature=1, seed=seed).spec)


def long_calls(stub: pb_grpc.GenerationServiceStub) -> list[Coroutine[Any, Any, list[grpc.StatusCode]]]:
    """Long calls of all kinds; each gives the status codes that it met."""

    async def stream(seed: int) -> list[grpc.StatusCode]:
        call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=request_of(seed=seed).spec), timeout=120)
        with suppress(grpc.RpcError):
            async for _ in call:
                pass
        return [await call.code()]

    async def unary(seed: int) -> list[grpc.StatusCode]:
        return [await code_of(stub.Generate(request_of(seed=seed), timeout=120))]

    async def batch() -> list[grpc.StatusCode]:
        request = pb.BatchGenerateRequest(requests=[request_of(seed=seed) for seed in range(BATCHED)])
        by_number = {code.value[0]: code for code in grpc.StatusCode}
        return [by_number[answer.error.code] async for answer in stub.BatchGenerate(request, timeout=120)]

    return [*(stream(seed) for seed in range(STREAMED)), *(unary(seed) for seed in range(UNARY)), batch()]


async def code_of(call: aio.UnaryUnaryCall) -> grpc.StatusCode:
    with suppress(grpc.RpcError):
        await call
    return await call.code()


async def some_tokens(stub: pb_grpc.GenerationServiceStub) -> list[list[int]]:
    answers = await asyncio.gather(*(stub.Generate(request_of(20, seed)) for seed in range(4)))
    return [list(answer.sequences[0].token_ids) for answer in answers]


async def statuses_of(health: health_pb2_grpc.HealthStub, count: int) -> list[int]:
    """Returns the first `count` statuses."""
    statuses: list[int] = []
    call = health.Watch(health_pb2.HealthCheckRequest())
    async for answer in call:
        statuses.append(answer.status)
        if len(statuses) == count:
            call.cancel()
            break
    return statuses
