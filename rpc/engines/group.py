"""The ranks of an engine: rank 0 is the engine itself, the others are processes on this machine, or whatever else runs
`rpc.engines.follower.run_follower`.
"""

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from model.loading import choose_device
from model.parallel.group import TOKEN_BYTES
from model.parallel.members import Led
from model.parallel.sockets import address_of, listen, new_local
from model.rank_group import lead
from rpc.engines.follower import means, runs
from rpc.settings import EngineConfig
from scheduler.step import Executor, StepPlan, StepResult

log = logging.getLogger("quire.engines")

STOP_SECONDS = 5.0


class Followers(Protocol):
    """Ranks 1 and up of one group. listen_on: where rank 0 is to listen for them, see `model.parallel.sockets`."""

    @property
    def listen_on(self) -> str: ...

    def start(self, address: str, token: bytes) -> None:
        """Has each of them run `run_follower`, with this address of rank 0; does not wait until they do."""

    def ended(self) -> str:
        """Why one of them will never come, "" while all may."""

    def close(self, grace: float) -> None:
        """Ends what does not end by itself within so many seconds; rank 0 has closed its connections."""


class FollowerProcesses:
    """`Followers` on this machine, in the session of this process: who kills that kills them too."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError where there are fewer GPUs than ranks that each want one."""
        self._config, self._gpus = config, gpus_of(config)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._done = threading.Event()

    @property
    def listen_on(self) -> str:
        return new_local()

    def start(self, address: str, token: bytes) -> None:
        started = threading.Event()

        def keep() -> None:
            """The kernel ends a process with the thread that started it: one thread starts them all, and stays."""
            try:
                for rank in range(1, self._config.model.tensor_parallel):
                    self._processes.append(self._start(rank, address, token))
            finally:
                started.set()
            self._done.wait()

        threading.Thread(target=keep, name="quire-followers", daemon=True).start()
        started.wait()

    def _start(self, rank: int, address: str, token: bytes) -> "subprocess.Popen[bytes]":
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": self._gpus[rank]} if self._gpus else {})
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rpc.engines.follower_process"],
            stdin=subprocess.PIPE,
            stdout=2,
            env=environment,
        )
        size = self._config.model.tensor_parallel
        line = {"rank": rank, "size": size, "address": address, "token": token.hex(), "config": self._config.to_json()}
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # `ended` says so
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()
        return process

    def ended(self) -> str:
        if len(self._processes) < self._config.model.tensor_parallel - 1:
            return "the processes of the other ranks could not be started"
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                return f"the process of rank {rank} ended with code {process.returncode} before it was ready"
        return ""

    def close(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if grace:
                    log.warning("the process %d of a rank did not end within %g s and is killed", process.pid, grace)
                process.kill()
                process.wait()
        self._done.set()


def gpus_of(config: EngineConfig) -> list[str]:
    """What each rank's is called, in their order (rank 0 takes the first that it sees); none on a CPU."""
    if choose_device(config.model.device) != "cuda":
        return []
    visible, size = os.environ.get("CUDA_VISIBLE_DEVICES"), config.model.tensor_parallel
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if len(names) < size:
        raise ValueError(f"--tensor-parallel is {size}, there are {len(names)} CUDA devices: each rank needs its own")
    return names


class Group:
    """All ranks of an engine, led from here."""

    def __init__(self, led: Led, followers: Followers) -> None:
        self.led, self._followers = led, followers

    @staticmethod
    def open(config: EngineConfig, directory: Path, followers: Followers) -> "Group":
        """directory: of the model. Waits until all ranks are there. Raises RankLost, ValueError, OSError."""
        token, settings = secrets.token_bytes(TOKEN_BYTES), config.model
        try:
            listener = listen(followers.listen_on)
            followers.start(address_of(listener), token)
            size = settings.tensor_parallel
            led = lead(listener, size, token, runs(directory), means(settings), followers.ended)
        except BaseException:
            followers.close(0.0)
            raise
        return Group(led, followers)

    def close(self) -> None:
        self.led.close()
        self._followers.close(STOP_SECONDS if self.led.lost is None else 0.0)


class Grouped:
    """`Executor` around rank 0's; its group ends with it."""

    def __init__(self, inner: Executor, group: Group) -> None:
        self._inner, self._group = inner, group

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()
        self._group.close()
