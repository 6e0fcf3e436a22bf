"""Ranks whose exchanges fail in a planted way, over gloo: as a follower's process, and as an engine's process.

A fault begins when a file is there, so that the ranks have started by then.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

FAULT = "QUIRE_TEST_RANK_FAULT"  # of a follower: name and file of its fault
LONG = timedelta(hours=1)

Fault = Callable[[Any, Tensor, Tensor], Any]


def _raises(group: Any, parts: Tensor, x: Tensor) -> Any:
    raise RuntimeError("planted: connection reset by peer")


def _smaller(group: Any, parts: Tensor, x: Tensor) -> Any:
    """Makes half of the exchange, as a rank that computes another step."""
    half = x.numel() // 2
    return group._allgather_base(parts.flatten()[: half * (len(parts) // len(x))], x.flatten()[:half])


FAULTS: dict[str, Fault] = {"raises": _raises, "smaller": _smaller}


class FailingGroup:
    """A process group with a fault, once a file is there."""

    def __init__(self, group: Any, fault: Fault, file: Path) -> None:
        self._group, self._fault, self._file = group, fault, file

    def _allgather_base(self, parts: Tensor, x: Tensor, options: AllgatherOptions) -> Any:
        if self._file.exists():
            return self._fault(self._group, parts, x)
        return self._group._allgather_base(parts, x, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class LikeNccl:
    """A process group that fails as NCCL's does: no exchange raises, and a watchdog aborts the process."""

    def __init__(self, group: Any) -> None:
        """`group` is one of gloo without a timeout of its own."""
        self._group, self._timeout = group, LONG

    def _allgather_base(self, parts: Tensor, x: Tensor, options: AllgatherOptions) -> "Unraised":
        return Unraised(self._group._allgather_base(parts, x, options), self._timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


class Unraised:
    """An exchange of `LikeNccl`."""

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        watchdog = threading.Timer(self._timeout.total_seconds(), os.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._work.wait()
        except RuntimeError:
            threading.Event().wait()  # the thread waits for the device, whose kernel waits for the rank
        watchdog.cancel()


def failing(name: str, file: Path) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a stand-in for `open_gloo`, as `plant` takes one, with a fault by its name."""
    return lambda made: lambda *arguments: FailingGroup(made(*arguments), FAULTS[name], file)


def main() -> None:
    """Runs a follower with the fault that its environment names."""
    from model.parallel import distributed
    from rpc.engines import follower_process

    name, file = os.environ[FAULT].split(" ", 1)
    distributed.open_gloo = failing(name, Path(file))(distributed.open_gloo)
    follower_process.main()


def engine(arguments: Sequence[str]) -> None:
    """Runs an engine's process whose exchanges fail as NCCL's do, and none of whose steps counts as too long."""
    from model.parallel import distributed
    from rpc.engines import engine_process, group
    from scheduler import engine as module

    made = distributed.open_gloo
    distributed.open_gloo = lambda store, shard, host, _: LikeNccl(made(store, shard, host, LONG))
    group.new_local = lambda: "127.0.0.1:0"  # as on several machines: ranks that share memory need no process group
    module.LEAST_TIMEOUT = LONG.total_seconds()
    sys.argv[1:] = arguments
    engine_process.main()


if __name__ == "__main__":
    engine(sys.argv[1:])
