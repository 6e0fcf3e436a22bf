"""Opens a rank group: connects all ranks, by a socket each for control and by a `Collective` for tensors."""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.parallel.collective import Collective
from model.parallel.gathering import gather
from model.parallel.group import Follower, Leader
from model.parallel.members import FollowerGroup, RankGroup
from model.parallel.shard import Shard
from model.parallel.sockets import address_of, split
from model.parallel.wire import FrameKind, pack_words, send, unpack_words

if TYPE_CHECKING:
    from model.cpu.kernels.program import Machine

log = logging.getLogger("quire.ranks")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of a rank group's connections.

    Attributes:
        gpu: Whether the model runs on a GPU.
        kernels: Directory of compiled kernels. None keeps none.
        seconds: Silence after which a rank counts as lost, once all have loaded.
    """

    gpu: bool
    kernels: Path | None
    seconds: float


def lead(
    listener: socket.socket,
    size: int,
    token: bytes,
    runs: Mapping[str, Any],
    settings: GroupSettings,
    ended: Callable[[], str] = str,
) -> RankGroup:
    """Opens the group as rank 0: waits for its followers.

    Args:
        listener: Socket that followers connect to. It is closed on return.
        size: The number of ranks, with rank 0.
        token: The group's token, which followers show.
        runs: Facts that all ranks must agree on, as in `gather`.
        settings: Settings of the connections.
        ended: Returns why a rank will never come, as in `gather`.

    Raises:
        RankLost: A rank did not come, or has ended.
        FollowerRefused: A follower runs something else.
        OSError: A socket failed.
    """
    shard, address = Shard(0, size), address_of(listener)
    try:
        leader = Leader(gather(listener, size, token, {"size": size, **runs}, ended), settings.seconds)
    finally:
        listener.close()
    try:
        here = listener.family == socket.AF_UNIX
        collective = _welcome(leader, shard, settings, "127.0.0.1" if here else split(address)[0], here)
    except BaseException:
        leader.close()
        raise
    log.info("%d ranks are connected by %s", size, collective.name)
    return RankGroup(leader, shard, collective, settings.seconds)


def _welcome(leader: Leader, shard: Shard, settings: GroupSettings, host: str, here: bool) -> Collective:
    """Opens the collective, and sends followers how to join it.

    Args:
        leader: Connections of the followers.
        shard: Rank 0's shard.
        settings: Settings of the connections.
        host: This machine's address.
        here: Whether all ranks run on this machine.
    """
    # Ranks of one machine without GPUs exchange tensors in shared memory; its kernels are compiled.
    machine = _machine(settings.kernels) if here and not settings.gpu else None
    if machine is not None:
        from model.cpu.shared_memory import SharedMemory, shared_memory

        file = shared_memory()
        for follower in leader.sockets.values():
            send(follower, FrameKind.WELCOME, pack_words({"collective": SharedMemory.name}))
            socket.send_fds(follower, [b"\0"], [file])
        return SharedMemory(machine, shard, file)
    from model.parallel.distributed import Distributed, offer_store

    name, (store, port) = "nccl" if settings.gpu else "gloo", offer_store(host, shard.size)
    for follower in leader.sockets.values():
        send(follower, FrameKind.WELCOME, pack_words({"collective": name, "host": host, "port": port}))
    return Distributed(name, shard, store, host, settings.seconds)


def join(
    address: str,
    shard: Shard,
    token: bytes,
    runs: Mapping[str, Any],
    settings: GroupSettings,
    lost: Callable[[str], None],
) -> FollowerGroup:
    """Opens the group as a follower.

    Args:
        address: Address of rank 0's listener.
        shard: This rank's shard.
        token: The group's token.
        runs: Facts that must equal rank 0's.
        settings: Settings of the connections.
        lost: Called with the reason once the group computes no more.

    Raises:
        RankLost: Rank 0 has ended.
        FollowerRefused: Rank 0 runs something else.
        OSError: A socket failed.
    """
    follower = Follower.join(address, shard.rank, token, {"size": shard.size, **runs})
    try:
        welcome = unpack_words(follower.answer(FrameKind.WELCOME))
        collective = _accepted(follower, welcome, shard, settings)
    except BaseException:
        follower.close()
        raise
    return FollowerGroup(follower, shard, collective, settings.seconds, lost)


def _accepted(follower: Follower, welcome: Mapping[str, Any], shard: Shard, settings: GroupSettings) -> Collective:
    """Joins the collective that rank 0's welcome names."""
    if "port" not in welcome:
        _, files, _, _ = socket.recv_fds(follower.socket, 1, 1)
        machine = _machine(settings.kernels)
        if machine is None or not files:
            raise OSError("rank 0 shares memory, which this rank cannot")
        from model.cpu.shared_memory import SharedMemory

        return SharedMemory(machine, shard, files[0])
    from model.parallel.distributed import Distributed, find_store

    host = str(welcome["host"])
    store = find_store(host, int(welcome["port"]), shard.size)
    name = follower.socket.getsockname()
    own = host if follower.socket.family == socket.AF_UNIX else name[0]
    return Distributed(str(welcome["collective"]), shard, store, own, settings.seconds)


def _machine(kernels: Path | None) -> "Machine | None":
    """Opens the CPU's compiler of kernels. None where it cannot be used: ranks then share no memory."""
    try:
        from model.cpu.kernels.machine import open_machine

        return open_machine(kernels)
    except (ImportError, OSError) as error:
        log.info("ranks do not share memory: %s", error)
        return None
