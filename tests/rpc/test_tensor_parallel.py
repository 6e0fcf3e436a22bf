"""An engine whose model is divided among processes: what it answers, what it says when one ends, what is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.settings import ModelSettings
from rpc.engines import follower, group
from rpc.engines.assembly import assemble
from rpc.engines.follower import set_threads
from rpc.settings import EngineConfig
from scheduler.parameters import Beam, Sampling, Stopping
from scheduler.spec import Spec
from tests.support.forking import Forked
from tests.support.planted import plant
from tests.support.processes import is_alive, temporary_directory, wait_until
from tests.support.rank_engines import CONFIG, FOLLOWER, Apart, config_of, followers_of, running
from tests.support.ranks import needs_ipv6

LONG = Stopping(max_tokens=200, ignore_eos=True)
SHORT = Stopping(max_tokens=12, ignore_eos=True)

OTHERS = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.9, top_k=20, seed=1)]
SPECS = [Spec(f"Speech {i}: what, " * (1 + i % 3), sampling=OTHERS[i % 3], stopping=SHORT) for i in range(9)] + [
    Spec("What light", sampling=Sampling(temperature=1.0, seed=2, sequence_count=3), stopping=SHORT),
    Spec("What light", sampling=Sampling(beam=Beam(3), sequence_count=2), stopping=SHORT),
    Spec(
        "To be, or not to be",
        sampling=Sampling(
            temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((7, 2.0),)
        ),
        stopping=SHORT,
    ),
]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers that need not import torch."""

    def start(command: list[str], **options: Any) -> Forked:
        return Forked(FOLLOWER, command, command, **options)

    monkeypatch.setattr(group, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


@pytest.fixture(scope="module")
def of_one() -> dict[tuple[int, int], list[int]]:
    with running(config_of(1)) as one:
        return one.tokens(SPECS)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_process(ranks: int, of_one: dict[tuple[int, int], list[int]]) -> None:
    with running(config_of(ranks)) as several:
        assert several.tokens(SPECS) == of_one
        assert several.tokens(SPECS) == of_one, "out of the prefix cache"
        assert several.parts.scheduler.stats().prefix_hits > 0


@pytest.mark.usefixtures("forked")
def test_two_steps_in_flight_and_chunks(of_one: dict[tuple[int, int], list[int]]) -> None:
    with running(config_of(2, steps_in_flight=2, prefill_chunk=5)) as two:
        assert two.tokens(SPECS) == of_one


@pytest.mark.usefixtures("forked")
def test_a_killed_follower_fails_the_engine_at_once() -> None:
    with running(config_of(2)) as two:
        two.send([Spec("To be", stopping=LONG)] * 4)
        two.outputs.get(timeout=30)
        two.followers[0].kill()
        assert two.failure() == "RankLost: rank 1 has ended"


class ApartByIpv6(group.FollowerProcesses):
    """The same with addresses of the other kind."""

    @property
    def listen_on(self) -> str:
        return "[::1]:0"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("apart", [Apart, pytest.param(ApartByIpv6, marks=needs_ipv6)])
def test_followers_that_are_reached_over_tcp(
    of_one: dict[tuple[int, int], list[int]], apart: type[group.FollowerProcesses]
) -> None:
    with running(config_of(2), apart) as two:
        assert two.tokens(SPECS) == of_one
        two.send([Spec("To be", stopping=LONG)] * 4)
        two.outputs.get(timeout=30)
        two.followers[0].kill()
        assert two.failure() == "RankLost: rank 1 has ended"


@pytest.mark.usefixtures("forked")
def test_also_one_that_is_idle() -> None:
    with running(config_of(2)) as two:
        two.followers[0].kill()
        wait_until(lambda: two.engine.failure is not None, "the failure")
        assert two.engine.failure == "ExecutorLost: rank 1 has ended"


@pytest.mark.usefixtures("forked")
def test_a_stopped_follower_is_missed_after_the_deadline() -> None:
    with running(config_of(4)) as four:
        four.send([Spec("To be", stopping=LONG)] * 4)
        four.outputs.get(timeout=30)
        four.followers[1].send_signal(signal.SIGSTOP)
        why = four.failure()
        assert "has shown no sign of life for 2 s: it was stopped, or hangs" in why


SCRIPT = """
import sys, time
from rpc.engines.assembly import assemble
from rpc.settings import EngineConfig
parts = assemble(EngineConfig.from_json(sys.stdin.readline()))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["starts", "runs", "runs and its follower is stopped"])
@pytest.mark.slow
def test_nothing_is_left_of_a_killed_leader(when: str) -> None:
    """Not even of a follower that cannot see its end, nor of a group whose ranks have not met."""
    with (
        temporary_directory() as place,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as leader,
    ):
        assert leader.stdin is not None
        assert leader.stdout is not None
        leader.stdin.write(config_of(2).to_json() + "\n")
        leader.stdin.flush()
        if when == "starts":
            wait_until(lambda: bool(followers_of(leader.pid)), "a follower", 30)
        else:
            assert leader.stdout.readline() == "ready\n"
        followers = followers_of(leader.pid)
        assert len(followers) == 1
        if when == "runs and its follower is stopped":
            followers[0].send_signal(signal.SIGSTOP)
        leader.kill()
        leader.wait()
        wait_until(lambda: not any(map(is_alive, followers)), "the end of all followers", 5)
        assert list(place.iterdir()) == []


def test_a_follower_that_cannot_start_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.sys, "executable", "/bin/false")
    with (
        temporary_directory(),
        pytest.raises(ValueError, match="the process of rank 1 ended with code 1 before it was re"),
    ):
        assemble(config_of(2))


@pytest.mark.usefixtures("forked")
def test_what_a_follower_cannot_load_is_told_with_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are to be kept where they cannot."""

    def too_much(to_json: Callable[[EngineConfig], str]) -> Callable[[EngineConfig], str]:
        return lambda config: to_json(replace(config, model=replace(config.model, kv_cache_memory=2**60)))

    plant(monkeypatch, EngineConfig, "to_json", too_much)
    with (
        temporary_directory(),
        pytest.raises(
            ValueError, match="rank 1 has failed: ValueError: --kv-cache-memory is 1152921504606846976 bytes"
        ),
    ):
        assemble(config_of(2))


@pytest.mark.parametrize(
    ("asked", "ranks", "engines", "each"),
    [(None, 1, 1, 4), (None, 2, 1, 2), (None, 8, 1, 1), (None, 2, 2, 1), (None, 1, 2, 2), (3, 2, 2, 3)],
)
def test_ranks_and_engines_share_the_cores(asked: int | None, ranks: int, engines: int, each: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        model = replace(CONFIG.model, tensor_parallel=ranks)
        set_threads(replace(CONFIG, threads=asked, model=model, engines_here=engines))
        assert torch.get_num_threads() == each
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "variables", "engines", "each"),
    [(2, {}, 1, 2), (3, {}, 2, 1), (64, {}, 1, 4), (None, {}, 1, 4), (1, {"OMP_NUM_THREADS": "4"}, 1, 4)],
)
def test_threads_are_no_more_than_a_containers_quota(
    quota: int | None, variables: dict[str, str], engines: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(follower, "processors", lambda: quota)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        set_threads(replace(CONFIG, threads=None, engines_here=engines))
        assert torch.get_num_threads() == each
    finally:
        torch.set_num_threads(before)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert group.gpus_of(config_of(2)) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,9,3")  # 9 is none: CUDA reads no further, and counts one
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--tensor-parallel is 2, there are 1 CUDA devices"):
        group.gpus_of(config_of(2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    assert group.gpus_of(config_of(3)) == ["5", "3", "7"]
    with pytest.raises(ValueError, match="--tensor-parallel is 4, there are 3 CUDA devices"):
        group.gpus_of(config_of(4))


def test_an_exchange_on_gpus_has_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, given, wanted in (("cuda", 10.0, 60.0), ("cuda", 90.0, 90.0), ("cpu", 10.0, 10.0)):
        monkeypatch.setattr(follower, "choose_device", lambda _, chosen=device: chosen)
        assert follower.group_settings(ModelSettings(tensor_parallel_timeout=given)).seconds == wanted


def test_what_cannot_be_divided_starts_nothing() -> None:
    with temporary_directory() as place:
        with pytest.raises(ValueError, match="--tensor-parallel is 5: the model has"):
            assemble(config_of(5))
        assert list(place.iterdir()) == []
        assert followers_of(os.getpid()) == []
