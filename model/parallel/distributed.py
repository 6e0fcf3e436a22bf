"""`Collective` of torch.distributed: gloo between CPUs of several machines, NCCL between GPUs.

Parts are exchanged and then added, see `model.parallel.sums`.

With gloo an exchange that fails, or takes longer than the timeout, raises here. With NCCL it raises nothing: an
exchange is put on the stream of the device, and the thread then waits for the device. torch has a thread of its own for
that, the watchdog of ProcessGroupNCCL. It aborts the process at the first exchange that has failed or takes longer.
It does not see exchanges in CUDA graphs, but each step begins with one that is in none (`model.parallel.steps`), and
the next step's stays behind a graph that hangs.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # type: ignore[attr-defined]

from model.errors import RankLost
from model.parallel.group import START_SECONDS
from model.parallel.shard import Shard
from model.parallel.sockets import host_port, listen
from model.parallel.sums import LEAST_SAVED, Adder, add_in_order, sum_of_ranks

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
            seconds: Timeout of an exchange from `started` on. Before, ranks may compile kernels, so it is
                START_SECONDS.
        """
        self.name, self.shard, self.runs_ahead, self._why = name, shard, name == "nccl", ""
        self._seconds, self._starts = timedelta(seconds=seconds), True
        self._group = (open_nccl if name == "nccl" else open_gloo)(store, shard, host, self._seconds)
        # Of the group and not of each exchange: NCCL does not read the timeout in an exchange's options.
        self._group._set_default_timeout(timedelta(seconds=START_SECONDS))
        # On the stream of the caller. NCCL's own would keep a tensor's memory from those that a graph makes after it.
        self._of_all_gather, self._of_all_to_all = AllgatherOptions(), AllToAllOptions()
        self._of_all_gather.asyncOp = self._of_all_to_all.asyncOp = False

    def sum(self, x: Tensor, add: Adder = add_in_order) -> Tensor:
        return sum_of_ranks(x, self.shard.size, self, add, LEAST_SAVED[self.name])

    def all_gather(self, x: Tensor) -> Tensor:
        # Into one tensor: NCCL would copy each part out of it. gloo takes ranks and rows as one dimension alone.
        parts, x = x.new_empty((self.shard.size * len(x), x.shape[1])), x.contiguous()
        self._exchange(lambda: self._group._allgather_base(parts, x, self._of_all_gather))
        return parts.view(self.shard.size, *x.shape)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Returns row `rank` of all ranks' x [ranks, width], as [ranks, width] in the order of ranks."""
        x = x.contiguous()
        parts = torch.empty_like(x)
        self._exchange(lambda: self._group.alltoall_base(parts, x, [], [], self._of_all_to_all))
        return parts

    def _exchange(self, start: Callable[[], Any]) -> None:
        """Makes an exchange. Raises RankLost."""
        try:
            start().wait()
        except RuntimeError as error:
            raise RankLost(self._reason(error)) from None
        if self._why:
            raise RankLost(self._why)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        width = max(widths)
        parts = self.all_gather(x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1])))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def started(self) -> None:
        if self._starts:
            self._starts = False
            self._group._set_default_timeout(self._seconds)

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
