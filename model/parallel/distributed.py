"""`Collective` of torch.distributed: gloo between CPUs of several machines, NCCL between GPUs.

Parts are gathered and added here. A ring reduction of gloo or NCCL would add them in an order that depends on the place
of a number in the buffer.

With gloo an exchange that fails, or takes longer than the timeout, raises here. With NCCL it raises nothing: an
exchange is put on the stream of the device, and the thread then waits for the device. torch has a thread of its own for
that, the watchdog of ProcessGroupNCCL. It aborts the process at the first exchange that has failed or takes longer.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from model.errors import RankLost
from model.parallel.group import START_SECONDS
from model.parallel.shard import Shard
from model.parallel.sockets import host_port, listen

REASON_SECONDS = 0.5  # seconds to wait for the watch's reason after a failed exchange

WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # 1 would leave out the watchdog
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # abort the process, without a call of NCCL, which may hang too
}
"""Environment variables that NCCL's process group reads, without which a failure would not end the process."""

AT_ONCE = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
"""Defaults of others. torch's own default lets the watchdog wait 60 s, for a dump, before it aborts the process."""


class Distributed:
    """`Collective` over a torch process group."""

    def __init__(self, name: str, shard: Shard, store: TCPStore, host: str, seconds: float) -> None:
        """Joins the process group.

        Args:
            name: gloo or nccl.
            shard: This rank's shard.
            store: Store in which ranks find each other.
            host: This machine's address, as others reach it.
            seconds: Timeout of an exchange, once all have done a step. The first step may compile kernels, so it has
                START_SECONDS.
        """
        self.name, self.shard, self._why = name, shard, ""
        self._seconds, self._starts = timedelta(seconds=seconds), True
        self._group = (open_nccl if name == "nccl" else open_gloo)(store, shard, host, self._seconds)
        # Of the group and not of each exchange: NCCL does not read the timeout in an exchange's options.
        self._group._set_default_timeout(timedelta(seconds=START_SECONDS))

    def sum(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        # Into one tensor: NCCL would copy each part out of it. gloo takes ranks and rows as one dimension alone.
        parts = x.new_empty((self.shard.size * len(x), x.shape[1]))
        try:
            self._group._allgather_base(parts, x.contiguous()).wait()
        except RuntimeError as error:
            raise RankLost(self._reason(error)) from None
        if self._why:
            raise RankLost(self._why)
        return parts.view(self.shard.size, *x.shape)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        width = max(widths)
        parts = self.all_gather(x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1])))
        if self._starts:  # a step ends with `gather`, so the first is done
            self._starts = False
            self._group._set_default_timeout(self._seconds)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

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


def open_nccl(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:  # noqa: ARG001 - NCCL finds its own way
    from torch.distributed import ProcessGroupNCCL  # here: torch for CPUs has none

    os.environ.update(WATCHDOG)
    for name, value in AT_ONCE.items():
        os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, shard.rank, shard.size, options)


def open_gloo(store: TCPStore, shard: Shard, host: str, wait: timedelta) -> Any:
    kind: Any = ProcessGroupGloo  # torch's type stubs lack `_Options` and `create_device`
    options = kind._Options()
    options._timeout, options._devices = wait, [kind.create_device(hostname=host)]
    return kind(store, shard.rank, shard.size, options)
