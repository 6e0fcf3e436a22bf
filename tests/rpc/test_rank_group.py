"""Rank 0's side of a rank group: what it tells the other ranks as they start, and what it closes."""

import json
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from model.errors import RankLost
from model.parallel.group import TOKEN_BYTES
from model.parallel.members import RankGroup
from model.parallel.sockets import new_local
from model.settings import ModelSettings
from rpc.engines import group
from rpc.engines.follower import group_identity
from rpc.engines.group import STOP_SECONDS, EngineGroup, FollowerProcesses, GroupExecutor
from rpc.paths import demo_directory
from rpc.settings import EngineConfig
from scheduler.step import StepPlan, StepResult
from tests.support.processes import temporary_directory

DEMO = demo_directory()


def config_of(ranks: int) -> EngineConfig:
    return EngineConfig(model=ModelSettings(tensor_parallel=ranks))


class NoFollowers:
    """Followers that never come. started: addresses and tokens. closed: the grace of each `close`."""

    def __init__(self) -> None:
        self.started: list[tuple[str, bytes]] = []
        self.closed: list[float] = []

    @property
    def listen_on(self) -> str:
        return new_local()

    def start(self, address: str, token: bytes) -> None:
        self.started.append((address, token))

    def ended(self) -> str:
        return "rank 2 has no machine"

    def close(self, grace: float) -> None:
        self.closed.append(grace)


def test_followers_of_a_group_that_does_not_open_are_ended_at_once() -> None:
    """The others of them may have started, and would wait for one that never comes."""
    followers = NoFollowers()
    with temporary_directory(), pytest.raises(RankLost, match="rank 2 has no machine"):
        EngineGroup.open(config_of(3), DEMO, followers)
    assert followers.closed == [0.0]


def test_each_group_has_a_token_that_nobody_knows() -> None:
    followers = NoFollowers()
    for _ in range(2):
        with temporary_directory(), pytest.raises(RankLost):
            EngineGroup.open(config_of(2), DEMO, followers)
    (_, first), (_, second) = followers.started
    assert first != second
    assert len(first) == len(second) == TOKEN_BYTES
    assert bytes(TOKEN_BYTES) not in (first, second)


class Closing:
    """Stands for rank 0's end of a group and for its executor: writes down what is closed."""

    def __init__(self, log: list[str], name: str, lost: str | None = None) -> None:
        self.lost, self._log, self._name = lost, log, name

    def launch(self, plan: StepPlan) -> None:
        raise NotImplementedError

    def collect(self) -> StepResult:
        raise NotImplementedError

    def close(self) -> None:
        self._log.append(self._name)


@pytest.mark.parametrize(("lost", "grace"), [(None, STOP_SECONDS), ("rank 1 hangs", 0.0)])
def test_followers_have_time_to_end_unless_the_group_is_lost(
    lost: str | None, grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, followers = list[str](), NoFollowers()
    monkeypatch.setattr(followers, "close", lambda seconds: log.append(f"followers within {seconds:g} s"))
    led: RankGroup = Closing(log, "rank 0", lost)  # type: ignore[assignment]
    GroupExecutor(Closing(log, "executor"), EngineGroup(led, followers)).close()
    assert log == ["executor", "rank 0", f"followers within {grace:g} s"], "they end when their connections do"


TELLS = r"""#!/bin/sh
read -r line
printf '%s\n' "$CUDA_VISIBLE_DEVICES $* $line"
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FollowerProcesses:
    """Followers of three ranks on machines with GPUs 5, 3 and 7, each of which says what it was started with."""
    program = tmp_path / "tells"
    program.write_text(TELLS)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(group, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    return FollowerProcesses(config_of(3))


def test_each_rank_is_told_its_own_place_and_gpu(told: FollowerProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    told.start("unix:here", b"\x07" * TOKEN_BYTES)
    told.close(60.0)
    out, err = capfd.readouterr()
    assert out == "", "the standard output is the leader's, which may be a protocol"
    seen = {}
    for line in err.splitlines():
        gpu, *arguments, content = line.split(" ", 4)
        assert arguments == ["-P", "-m", "rpc.engines.follower_process"]
        said = json.loads(content)
        seen[said["rank"]] = gpu
        assert (said["size"], said["address"], said["token"]) == (3, "unix:here", "07" * TOKEN_BYTES)
        assert EngineConfig.from_json(said["config"]) == config_of(3)
    assert seen == {1: "3", 2: "7"}, "rank 0 takes the first one"


def test_one_that_does_not_end_by_itself_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    followers = FollowerProcesses(config_of(3))
    followers.start("unix:here", bytes(TOKEN_BYTES))
    assert followers.ended() == ""
    followers.close(0.0)
    assert [process.returncode for process in followers.processes] == [-signal.SIGKILL] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_program_that_is_not_there_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    followers = FollowerProcesses(config_of(2))
    followers.start("unix:here", bytes(TOKEN_BYTES))
    assert followers.ended() == "the processes of the other ranks could not be started"
    for thread in threading.enumerate():
        if thread.name == "quire-followers":
            thread.join()  # its exception is expected in this test, and in none after it


def test_ranks_compare_the_checkpoints_that_they_load(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    assert group_identity(tmp_path) == group_identity(DEMO) != {}
    config = tmp_path / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace("{", '{"rope_theta": 123.0, ', 1))
    assert group_identity(tmp_path) != group_identity(DEMO)
