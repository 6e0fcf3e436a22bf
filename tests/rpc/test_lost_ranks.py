"""A rank that fails in an exchange: who notices it, what the engine says, and that no process is left.

Over gloo, which stands for NCCL too: `LikeNccl` fails in NCCL's way.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.parallel import distributed
from rpc.engines import group
from rpc.engines.launchers import EngineProcess
from rpc.engines.process import ProcessHost
from rpc.frontend.prepare import load_preparer
from rpc.settings import EngineConfig, EngineSettings
from scheduler.events import End, EndReason, StepOutputs, Submit
from scheduler.parameters import Stopping
from scheduler.spec import Spec
from tests.support.forking import ROOT, Forked
from tests.support.planted import plant
from tests.support.processes import is_alive, session, temporary_directory, wait_until
from tests.support.rank_engines import FOLLOWER, Apart, Running, config_of, followers_of, running
from tests.support.rank_faults import FAULT, failing

FAULTY = "tests.support.rank_faults"
SPECS = [Spec("To be", stopping=Stopping(max_tokens=200, ignore_eos=True))] * 4
PLANTED = "a rank is gone, or was waited for in vain: planted: connection reset by peer"


@contextmanager
def at_work(config: EngineConfig) -> Iterator[Running]:
    """An engine whose requests have tokens. Afterwards its followers have ended before the engine is stopped."""
    with running(config, Apart) as engine:
        engine.send(SPECS)
        engine.outputs.get(timeout=30)
        yield engine
        wait_until(lambda: not any(map(is_alive, engine.followers)), "the end of all followers")


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses the module that followers run, by a fork of a process that has imported torch."""

    def choose(module: str) -> None:
        def start(command: list[str], **options: Any) -> Forked:
            return Forked(module, command, command, **options)

        monkeypatch.setattr(group, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))

    return choose


def test_an_exchange_that_raises_on_rank_0_alone_fails_the_engine(
    followers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    followers(FOLLOWER)
    plant(monkeypatch, distributed, "open_gloo", failing("raises", tmp_path / "now"))
    with at_work(config_of(2)) as two:
        (tmp_path / "now").touch()
        assert two.failure() == f"RankLost: {PLANTED}"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", f"rank 1 has failed: {PLANTED}"),
        # gloo aborts a rank that gets more than it expects.
        ("smaller", "rank 1 has ended"),
    ],
)
def test_a_follower_whose_exchange_fails_ends_the_engine(
    fault: str, why: str, followers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    followers(FAULTY)
    monkeypatch.setenv(FAULT, f"{fault} {tmp_path / 'now'}")
    with at_work(config_of(2)) as two:
        (tmp_path / "now").touch()
        assert two.failure() == f"RankLost: {why}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_follower_that_is_stopped_is_waited_for_until_the_timeout(
    ranks: int, followers: Callable[[str], None]
) -> None:
    """It is killed then, though it cannot see the end of the others."""
    followers(FOLLOWER)
    with at_work(config_of(ranks)) as several:
        several.followers[-1].send_signal(signal.SIGSTOP)
        assert "a rank is gone, or was waited for in vain" in several.failure()


class LikeNcclLauncher:
    """Starts engines whose exchanges fail as NCCL's do."""

    async def start(self, address: str, environment: Mapping[str, str]) -> EngineProcess:
        variables = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", FAULTY, address, stdin=PIPE, stdout=PIPE, start_new_session=True, env=variables
        )  # fmt: skip

    async def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout", "why"),
    [
        (signal.SIGKILL, 3600.0, "rank 1 has ended"),
        (signal.SIGSTOP, 2.0, "its process has hung up|the link broke"),
    ],
)
async def test_exchanges_that_raise_nothing_end_the_engine_and_its_requests(
    how: signal.Signals, timeout: float, why: str
) -> None:
    """The engine's thread waits for ever. A rank's end is reported beside it; else the watchdog ends the process."""
    config = config_of(2)
    config = replace(config, model=replace(config.model, tensor_parallel_timeout=timeout))
    host = ProcessHost(LikeNcclLauncher(), config, EngineSettings())
    outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()
    with temporary_directory():
        try:
            engine = await host.launch(outputs.put_nowait)
            pid = int(engine.place.removeprefix("process "))
            (follower,) = followers_of(pid)
            preparer = load_preparer(config.model)
            engine.send([Submit(i, preparer.prepare(spec, engine.info.limits)) for i, spec in enumerate(SPECS)])
            await asyncio.wait_for(outputs.get(), 30)
            follower.send_signal(how)
            ends: list[End] = []
            async with asyncio.timeout(30):  # of all: outputs without ends come as signs of life
                while len(ends) < len(SPECS):
                    ends += (await outputs.get()).ends
            assert {end.reason for end in ends} == {EndReason.ENGINE_FAILED}
            assert [end.attempt for end in ends] == list(range(len(SPECS)))
            assert re.search(why, engine.failure or "")
        finally:
            await host.stop()
    assert session(pid) == []
