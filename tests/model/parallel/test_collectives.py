"""Collectives of ranks: sums in the order of ranks, in memory that no rank writes too early, and no endless wait."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from model.cpu.shared_memory import SharedMemory, shared_memory
from model.errors import RankLost
from model.parallel.collective import Collective
from model.parallel.distributed import Distributed, find_store, offer_store
from model.parallel.group import START_SECONDS
from model.parallel.shard import Shard
from model.parallel.sums import LEAST_SAVED, add_in_order, sum_of_ranks
from model.parallel.unconnected import Unconnected
from tests.support.kernels import the_machine

HOST = "127.0.0.1"
NAMED = "/dev/shm"  # noqa: S108 - looked into
KINDS = ("shared", "gloo")
each_kind = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def group(
    kind: str, size: int, seconds: float = 10.0, of: type[SharedMemory] = SharedMemory
) -> Iterator[list[Collective]]:
    """The collectives of all ranks, in this process."""
    made: list[Collective] = []
    if kind == "shared":
        file = shared_memory()
        made += [of(the_machine(), Shard(rank, size), os.dup(file)) for rank in range(size)]
        os.close(file)
    else:
        own, port = offer_store(HOST, size)
        stores = [own, *(find_store(HOST, port, size) for _ in range(size - 1))]
        with ThreadPoolExecutor(size) as pool:
            made += pool.map(
                lambda rank: Distributed("gloo", Shard(rank, size), stores[rank], HOST, seconds), range(size)
            )
    try:
        yield made
    finally:
        for collective in made:
            collective.close()


T = TypeVar("T")


def together(members: list[Collective], do: Callable[[int, Collective], T]) -> list[T]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(do, range(len(members)), members))


def part_of(rank: int, number: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a rank's part of an exchange of this number."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.randn(rows, width, generator=generator) * 10**rank).to(dtype)


def sum_of(size: int, number: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    total = part_of(0, number, rows, width, dtype).float()
    for rank in range(1, size):
        total = total + part_of(rank, number, rows, width, dtype).float()
    return total.to(dtype)


@each_kind
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_ranks(kind: str, size: int, dtype: torch.dtype) -> None:
    """Shapes grow and shrink, one after the other."""
    shapes = [(1, 64), (3, 48), (70, 96), (1, 16), (300, 100), (2, 7)]
    with group(kind, size) as members:
        made = together(
            members, lambda rank, one: [one.sum(part_of(rank, i, *shape, dtype)) for i, shape in enumerate(shapes)]
        )
    for sums in made:
        for i, (total, shape) in enumerate(zip(sums, shapes, strict=True)):
            assert total.dtype == dtype
            assert torch.equal(total, sum_of(size, i, *shape, dtype))


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_two_exchanges_has_the_bits_of_one(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, divided = [(1, 64), (7, 48), (70, 96), (129, 257)], list[int]()
    all_to_all = Distributed.all_to_all

    def counted(own: Distributed, x: Tensor) -> Tensor:
        divided.append(own.shard.rank)
        return all_to_all(own, x)

    monkeypatch.setattr(Distributed, "all_to_all", counted)
    for least, times in ((2**40, 0), (1, len(shapes) * size)):
        monkeypatch.setitem(LEAST_SAVED, "gloo", least)
        divided.clear()
        with group("gloo", size) as members:
            made = together(
                members, lambda rank, one: [one.sum(part_of(rank, i, *shape, dtype)) for i, shape in enumerate(shapes)]
            )
        assert len(divided) == times
        for sums in made:
            for i, (total, shape) in enumerate(zip(sums, shapes, strict=True)):
                assert total.dtype == dtype
                assert torch.equal(total, sum_of(size, i, *shape, dtype))


@given(st.integers(2, 9), st.integers(1, 40), st.integers(1, 300))
def test_two_exchanges_bring_what_one_saves(ranks: int, rows: int, width: int) -> None:
    """All ranks choose alike, as the choice is by the shape; nothing is saved between two."""
    x, chosen = torch.zeros(rows, width), list[str]()
    whole, twice = (ranks - 1) * x.nbytes, 2 * (ranks - 1) * x.nbytes / ranks

    class Seen(Unconnected):
        def all_to_all(self, x: Tensor) -> Tensor:
            chosen.append("two")
            return super().all_to_all(x)

    for least in (0, 1, whole // 2, whole):
        chosen.clear()
        sum_of_ranks(x, ranks, Seen(Shard(0, ranks)), add_in_order, least)
        assert (chosen == ["two"]) == (whole - int(twice) >= least)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_all_parts(kind: str, dtype: torch.dtype) -> None:
    """Between sums, in the same order on all ranks; one of them has no rows."""
    shapes = [(5, 48), (0, 16), (70, 96), (1, 7)]

    def do(rank: int, one: Collective) -> list[Tensor]:
        made = []
        for i, shape in enumerate(shapes):
            made += [one.all_gather(part_of(rank, i, *shape, dtype)), one.sum(part_of(rank, i, *shape, dtype))]
        return made

    with group(kind, 3) as members:
        made = together(members, do)
    for found in made:
        for i, shape in enumerate(shapes):
            expected = torch.stack([part_of(rank, i, *shape, dtype) for rank in range(3)])
            assert found[2 * i].dtype == dtype
            assert torch.equal(found[2 * i], expected)
            assert torch.equal(found[2 * i + 1], sum_of(3, i, *shape, dtype))


@each_kind
def test_rank_0_gets_all_side_by_side(kind: str) -> None:
    widths = [32, 7, 40]
    with group(kind, 3) as members:
        made = together(members, lambda rank, one: one.gather(part_of(rank, 0, 5, widths[rank]), widths))
    assert torch.equal(made[0], torch.cat([part_of(rank, 0, 5, width) for rank, width in enumerate(widths)], 1))


class Slow(SharedMemory):
    """Rank 1 looks at what it was given when the others have gone on."""

    def _exchanged(self, x: Tensor, room: int, widest: int = 0) -> list[Tensor]:
        parts = super()._exchanged(x, room, widest)
        if self.shard.rank == 1:
            time.sleep(0.003)
        return parts


class OneRoom(Slow):
    """And they write where it looks."""

    def _exchanged(self, x: Tensor, room: int, widest: int = 0) -> list[Tensor]:
        return super()._exchanged(x, 0, widest)


def exchanges(of: type[SharedMemory]) -> bool:
    """Whether 60 exchanges give all ranks what they should."""
    with group("shared", 3, of=of) as members:

        def do(rank: int, one: Collective) -> list[Tensor]:
            made = []
            for i in range(60):
                made.append(one.sum(part_of(rank, i, 1 + i % 7, 32)))
                if i % 5 == 0:
                    one.gather(part_of(rank, i, 2, 16), [16] * 3)
            return made

        made = together(members, do)
    return all(torch.equal(sums[i], sum_of(3, i, 1 + i % 7, 32)) for sums in made for i in range(60))


def test_nobody_writes_where_a_slow_rank_still_reads() -> None:
    assert exchanges(Slow)
    assert not exchanges(OneRoom)


class SlowFirst(SharedMemory):
    """Rank 0 looks at parts of logits when the others have gone on to the next ones."""

    def _exchanged(self, x: Tensor, room: int, widest: int = 0) -> list[Tensor]:
        parts = super()._exchanged(x, room, widest)
        if self.shard.rank == 0:
            time.sleep(0.003)
        return parts


class Unmet(SlowFirst):
    """And they do not wait for it."""

    begins = False

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.begins = True
        return super().gather(x, widths)

    def meet(self) -> None:
        if not self.begins:
            super().meet()
        self.begins = False


def gatherings(of: type[SharedMemory]) -> bool:
    """Whether rank 0 gets the parts of 20 gatherings in a row, as of the logits of prompts."""
    with group("shared", 3, of=of) as members:
        together(members, lambda rank, one: one.gather(torch.ones(4, 16), [16] * 3))
        made = together(
            members, lambda rank, one: [one.gather(part_of(rank, i, 1 + i % 4, 16), [16] * 3) for i in range(20)]
        )
    whole = [torch.cat([part_of(rank, i, 1 + i % 4, 16) for rank in range(3)], 1) for i in range(20)]
    return all(map(torch.equal, made[0], whole))


def test_parts_of_logits_stay_until_rank_0_has_read_them() -> None:
    assert gatherings(SlowFirst)
    assert not gatherings(Unmet)


def test_a_rank_that_never_comes_is_not_waited_for_once_it_is_missed() -> None:
    with group("shared", 2) as members:
        threading.Timer(0.2, members[0].fail, ["rank 1 has ended"]).start()
        with pytest.raises(RankLost, match="rank 1 has ended"):
            members[0].sum(torch.ones(1, 16))
        with pytest.raises(RankLost, match="rank 1 has ended"):
            members[0].sum(torch.ones(1, 16))


def test_gloo_does_not_wait_for_ever() -> None:
    with group("gloo", 2, seconds=0.5) as members:
        together(members, lambda rank, one: one.gather(torch.ones(1, 16), [16, 16]))
        for one in members:
            one.started()
        with pytest.raises(RankLost, match="a rank is gone, or was waited for in vain"):
            members[0].sum(torch.ones(1, 16))


class FakeNccl:
    """Stands for torch's process group of NCCL.

    Attributes:
        environment: The variables for NCCL when it was made.
        timeouts: The one that it was made with, and those that followed.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.environment = {name: value for name, value in os.environ.items() if "NCCL" in name}
        self.timeouts = [timeout]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)

    def _allgather_base(self, parts: Tensor, x: Tensor, options: AllgatherOptions) -> "FakeNccl":
        assert not options.asyncOp, "NCCL would use a stream of its own"
        parts.view(-1, *x.shape).copy_(x)
        return self

    def wait(self) -> None:
        """Returns at once, as the wait for a device's stream does."""


class FakeNcclType:
    """Stands for the type of these groups. made: all that were made."""

    Options = SimpleNamespace

    def __init__(self) -> None:
        self.made: list[FakeNccl] = []

    def __call__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> FakeNccl:
        self.made.append(FakeNccl(vars(options)["_timeout"]))
        return self.made[-1]


def nccl(monkeypatch: pytest.MonkeyPatch, **environment: str) -> tuple[Distributed, FakeNccl]:
    """A collective over a fake group, made in this environment."""
    kind = FakeNcclType()
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", kind, raising=False)
    monkeypatch.setattr(os, "environ", environment)
    collective = Distributed("nccl", Shard(0, 2), None, HOST, 10.0)  # type: ignore[arg-type]
    return collective, kind.made[0]


def test_a_failure_of_nccl_ends_the_process_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's exchanges raise nothing: torch's watchdog has to be there, to abort, and not to wait for a dump."""
    chosen = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "INFO"}
    due = {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_DEBUG": "INFO"}
    dump = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    assert nccl(monkeypatch, **chosen)[1].environment == due | {dump: "0"}
    assert nccl(monkeypatch, **chosen, **{dump: "500"})[1].environment == due | {dump: "500"}


def test_exchanges_of_nccl_have_long_until_the_first_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is the group's: NCCL does not read that of an exchange."""
    collective, group = nccl(monkeypatch)
    long, short = timedelta(seconds=START_SECONDS), timedelta(seconds=10)
    for _ in range(2):  # as graphs are recorded
        collective.sum(torch.ones(1, 4))
        collective.gather(torch.ones(1, 4), [4, 4])
    assert group.timeouts[-1] == long
    for _ in range(2):
        collective.started()
        assert group.timeouts[-1] == short
    assert group.timeouts.count(short) == 2, "at first, and once all have done a step"


def test_memory_has_no_name_and_ends_with_its_last_user() -> None:
    before = set(os.listdir(NAMED)), len(os.listdir("/proc/self/fd"))
    with group("shared", 2) as members:
        together(members, lambda rank, one: one.sum(part_of(rank, 0, 100, 100)))
        assert not set(os.listdir(NAMED)) - before[0]
    del members
    assert len(os.listdir("/proc/self/fd")) == before[1]
