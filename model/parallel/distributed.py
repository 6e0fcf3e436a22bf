"""`Collective` of torch.distributed: gloo between CPUs of several machines, NCCL between GPUs.

Parts are gathered and added here. A ring reduction of gloo or NCCL would add them in an order that depends on the place
of a number in the buffer.
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

REASON_SECONDS = 0.5  # seconds to wait for the watch's reason after a failed exchange


class Distributed:
    """`Collective` over a torch process group."""

    def __init__(self, name: str, shard: Shard, store: TCPStore, host: str, seconds: float) -> None:
        """Joins the process group.

        Args:
            name: gloo or nccl.
            shard: This rank's shard.
            store: Store in which ranks find each other.
            host: This machine's address, as others reach it.
            seconds: Timeout of a wait, once all have done a step. The first step may compile kernels, so it has
                START_SECONDS.
        """
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
        self._options.timeout = timedelta(seconds=self._seconds)  # a step ends with `gather`, so the first is done
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
        """Returns the reason of a failure: the watch's, which sees it at the same time and knows the rank."""
        deadline = time.monotonic() + REASON_SECONDS
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
    """Opens rank 0's store, which listens on this address alone. Returns it and its port."""
    listener = listen(host_port(host, 0))
    port = listener.getsockname()[1]
    wait = timedelta(seconds=START_SECONDS)
    return TCPStore(host, port, size, True, wait, False, master_listen_fd=listener.detach()), port


def find_store(host: str, port: int, size: int) -> TCPStore:
    """Connects to rank 0's store."""
    return TCPStore(host, port, size, False, timedelta(seconds=START_SECONDS), False)


def _nccl(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:  # noqa: ARG001 - NCCL finds its own way
    from torch.distributed import ProcessGroupNCCL  # here: torch for CPUs has none

    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, shard.rank, shard.size, options)


def _gloo(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:
    kind: Any = ProcessGroupGloo  # torch's type stubs lack `_Options` and `create_device`
    options = kind._Options()
    options._timeout, options._devices = wait, [kind.create_device(hostname=host)]
    return kind(store, shard.rank, shard.size, options)
