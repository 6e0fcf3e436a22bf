"""The rank group of an engine. Rank 0 is the engine itself; the followers run `rpc.engines.follower.run_follower`.

Followers are processes on this machine (`FollowerProcesses`) or actors on others (`rpc.cluster`).
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
from model.parallel.members import RankGroup
from model.parallel.sockets import address_of, listen, new_local
from model.rank_group import lead
from rpc.engines.follower import group_identity, group_settings
from rpc.engines.gpus import listed_gpus
from rpc.settings import EngineConfig
from scheduler.step import Executor, StepPlan, StepResult

log = logging.getLogger("quire.engines")

STOP_SECONDS = 5.0


class Followers(Protocol):
    """Ranks 1 and up of one group."""

    @property
    def listen_on(self) -> str:
        """Address on which rank 0 is to listen for them, see `model.parallel.sockets`."""

    def start(self, address: str, token: bytes) -> None:
        """Has each follower run `run_follower`, without a wait until they do.

        Args:
            address: Address of rank 0.
            token: Secret of the group.
        """

    def ended(self) -> str:
        """Returns why a follower will never connect, "" while all may."""

    def close(self, grace: float) -> None:
        """Ends the followers, after rank 0 has closed its connections.

        Args:
            grace: Seconds in which a follower may end by itself; then it is killed.
        """


class FollowerProcesses:
    """`Followers` on this machine, in the session of this process, so that a kill of the session ends them too.

    Args:
        config: Configuration of the engine.

    Attributes:
        processes: Processes of ranks 1 and up, in order.

    Raises:
        ValueError: The machine has fewer GPUs than ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._gpus = config, gpus_of(config)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._done = threading.Event()

    @property
    def listen_on(self) -> str:
        return new_local()

    def start(self, address: str, token: bytes) -> None:
        started = threading.Event()

        def keep() -> None:
            """Starts the processes and stays: the kernel ends a process with the thread that started it."""
            try:
                for rank in range(1, self._config.model.tensor_parallel):
                    self.processes.append(self._start(rank, address, token))
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
            with suppress(BrokenPipeError):  # the process has ended, and `ended` reports it
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()
        return process

    def ended(self) -> str:
        if len(self.processes) < self._config.model.tensor_parallel - 1:
            return "the processes of the other ranks could not be started"
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                return f"the process of rank {rank} ended with code {process.returncode} before it was ready"
        return ""

    def close(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for process in self.processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if grace:
                    log.warning("the process %d of a rank did not end within %g s and is killed", process.pid, grace)
                process.kill()
                process.wait()
        self._done.set()


def gpus_of(config: EngineConfig) -> list[str]:
    """Returns the GPU of each rank as CUDA_VISIBLE_DEVICES names it; an empty list on a CPU.

    Rank 0 takes the first GPU that it sees, so its entry is the first.

    Raises:
        ValueError: The machine has fewer GPUs than ranks.
    """
    if choose_device(config.model.device) != "cuda":
        return []
    visible, size = os.environ.get("CUDA_VISIBLE_DEVICES"), config.model.tensor_parallel
    count = torch.cuda.device_count()
    names = listed_gpus(visible, 0) if visible else [str(number) for number in range(count)]
    if (usable := min(len(names), count)) < size:  # CUDA stops reading names at the first that is none
        raise ValueError(f"--tensor-parallel is {size}, there are {usable} CUDA devices: each rank needs its own")
    return names


class EngineGroup:
    """The rank group of an engine, as its rank 0 holds it.

    Attributes:
        ranks: Connections to the followers.
    """

    def __init__(self, ranks: RankGroup, followers: Followers) -> None:
        self.ranks, self._followers = ranks, followers

    @staticmethod
    def open(config: EngineConfig, directory: Path, followers: Followers) -> "EngineGroup":
        """Starts the followers, and waits until all have connected.

        Args:
            config: Configuration of the engine.
            directory: Directory of the model.
            followers: The followers, which are closed if this raises.

        Raises:
            RankLost: A follower will never connect.
            ValueError: The ranks cannot form a group.
            OSError: Rank 0 cannot listen.
        """
        token, settings = secrets.token_bytes(TOKEN_BYTES), config.model
        try:
            listener = listen(followers.listen_on)
            followers.start(address_of(listener), token)
            size = settings.tensor_parallel
            ranks = lead(listener, size, token, group_identity(directory), group_settings(settings), followers.ended)
        except BaseException:
            followers.close(0.0)
            raise
        return EngineGroup(ranks, followers)

    def close(self) -> None:
        self.ranks.close()
        self._followers.close(STOP_SECONDS if self.ranks.lost is None else 0.0)


class GroupExecutor:
    """`Executor` of rank 0 that closes its group with itself."""

    def __init__(self, inner: Executor, group: EngineGroup) -> None:
        self._inner, self._group = inner, group

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()
        self._group.close()
