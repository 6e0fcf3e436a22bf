"""A `Collective` of torch.distributed: gloo between CPUs of several machines, NCCL between GPUs.

Parts are gathered and added up here: a ring of gloo or NCCL adds them in an order that depends on where in the buffer a
number stands.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from model.errors import RankLost
from model.parallel.group import START_SECONDS
from model.parallel.shard import Shard
from model.parallel.sockets import host_port, listen

PATIENCE = 0.5  # seconds


class Distributed:
    """name: gloo or nccl. store: where all ranks find each other. host: this machine's address, that others reach it
    under. seconds: that a rank may be waited for, once all have done a step; the first may have kernels to compile.
    """

    def __init__(self, name: str, shard: Shard, store: TCPStore, host: str, seconds: float) -> None:
        self.name, self.shard, self._why = name, shard, ""
        self._options, self._seconds = AllgatherOptions(), seconds
        self._options.timeout = timedelta(seconds=START_SECONDS)
        self._group = (_nccl if name == "nccl" else _gloo)(store, shard, host, timedelta(seconds=seconds))

    def sum(self, x: Tensor) -> Tensor:
        parts = self._exchanged(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        width = max(widths)
        parts = self._exchanged(x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1])))
        self._options.timeout = timedelta(seconds=self._seconds)  # a step ends with this
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.shard.size)]
        try:
            self._group.allgather([parts], [x.contiguous()], self._options).wait()
        except RuntimeError as error:
            raise RankLost(self._reason(error)) from None
        if self._why:
            raise RankLost(self._why)
        return parts

    def _reason(self, error: RuntimeError) -> str:
        """Which rank it is, the watch knows: it sees the same at the same time."""
        deadline = time.monotonic() + PATIENCE
        while not self._why and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._why or f"a rank is gone, or was waited for in vain: {error}"

    def fail(self, why: str) -> None:
        self._why = self._why or why

    def lives(self) -> list[int]:
        return []

    def close(self) -> None:
        self.fail("this rank has ended")


def offer_store(host: str, size: int) -> tuple[TCPStore, int]:
    """Of rank 0: one that listens on this address alone, and its port."""
    listener = listen(host_port(host, 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=START_SECONDS)
    return TCPStore(host, port, size, True, wait, False, master_listen_fd=listener.detach()), port


def find_store(host: str, port: int, size: int) -> TCPStore:
    """Rank 0's."""
    return TCPStore(host, port, size, False, timedelta(seconds=START_SECONDS), False)


def _nccl(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:  # noqa: ARG001 - NCCL finds its own way
    from torch.distributed import ProcessGroupNCCL  # here: torch for CPUs has none

    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, shard.rank, shard.size, options)


def _gloo(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:
    kind: Any = ProcessGroupGloo  # of which torch declares less than there is
    options = kind._Options()
    options._timeout, options._devices = wait, [kind.create_device(hostname=host)]
    return kind(store, shard.rank, shard.size, options)
