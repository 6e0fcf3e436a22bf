"""Groups whose followers are threads of this process: with sockets and shared memory, as between processes."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from model.errors import RankLost
from model.identity import checkpoint_identity
from model.loading import Computer, load_computer
from model.parallel.follow import follow
from model.parallel.members import RankGroup
from model.parallel.shard import Shard
from model.parallel.sockets import address_of, listen, new_local
from model.rank_group import GroupSettings, join, lead
from model.settings import ALONE, ModelSettings


def _has_ipv6() -> bool:
    try:
        listen("[::1]:0").close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


class ThreadGroup:
    """A group of ranks for `load`. failed: what ended followers, but for the end of the group. computers: of
    followers, by rank.
    """

    def __init__(
        self,
        directory: Path,
        settings: ModelSettings,
        size: int,
        rows: int,
        recompute: bool = False,
        apart: bool = False,
    ) -> None:
        """apart: as if they ran on several machines."""
        token, runs = os.urandom(32), {"checkpoint": checkpoint_identity(directory).hex()}
        means = GroupSettings(False, settings.kernel_directory, settings.tensor_parallel_timeout)
        self.failed: list[BaseException] = []
        self.computers: dict[int, Computer] = {}
        listener = listen("127.0.0.1:0" if apart else new_local())
        address, threads = address_of(listener), torch.get_num_threads()

        def run(rank: int) -> None:
            torch.set_num_threads(threads)
            try:
                joined = join(address, Shard(rank, size), token, runs, means, lambda _: None)
                try:
                    computer = load_computer(directory, settings, rows, recompute, ALONE, joined.ranks)
                    self.computers[rank] = computer
                    follow(computer.parts, joined)
                finally:
                    joined.close()
            except RankLost:
                pass  # the other side has failed
            except BaseException as error:
                self.failed.append(error)

        self.threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        self.led: RankGroup = lead(listener, size, token, runs, means)

    def close(self) -> None:
        self.led.close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), "a follower does not end"


def close_all(groups: Sequence[ThreadGroup]) -> None:
    for group in groups:
        group.close()
        assert not group.failed
