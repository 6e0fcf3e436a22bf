"""Opens a group: all ranks connected, by a socket each for what is to be done and by a `Collective` for the sums."""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.parallel.collective import Collective
from model.parallel.gathering import gather
from model.parallel.group import Follower, Leader
from model.parallel.members import Joined, Led
from model.parallel.shard import Shard
from model.parallel.sockets import address_of, split
from model.parallel.wire import Kind, pack_words, send, unpack_words

if TYPE_CHECKING:
    from model.cpu.kernels.program import Machine

log = logging.getLogger("quire.ranks")


@dataclass(frozen=True, slots=True)
class Means:
    """What a group may be connected with. gpu: the model runs on one. kernels: where compiled ones are kept, None keeps
    none. seconds: that a rank may be silent, once all have loaded.
    """

    gpu: bool
    kernels: Path | None
    seconds: float


def lead(
    listener: socket.socket,
    size: int,
    token: bytes,
    runs: Mapping[str, Any],
    means: Means,
    ended: Callable[[], str] = str,
) -> Led:
    """Waits for the followers of a group of so many ranks. listener: is closed then. runs, ended: as in
    `gather`. Raises RankLost, Refused, OSError.
    """
    shard, address = Shard(0, size), address_of(listener)
    try:
        leader = Leader(gather(listener, size, token, {"size": size, **runs}, ended), means.seconds)
    finally:
        listener.close()
    try:
        here = listener.family == socket.AF_UNIX
        collective = _welcome(leader, shard, means, "127.0.0.1" if here else split(address)[0], here)
    except BaseException:
        leader.close()
        raise
    log.info("%d ranks are connected by %s", size, collective.name)
    return Led(leader, shard, collective, means.seconds)


def _welcome(leader: Leader, shard: Shard, means: Means, host: str, here: bool) -> Collective:
    """host: this machine's. here: all ranks run on it."""
    machine = _machine(means.kernels) if here and not means.gpu else None
    if machine is not None:
        from model.cpu.shared_memory import SharedMemory, shared_memory

        file = shared_memory()
        for follower in leader.sockets.values():
            send(follower, Kind.WELCOME, pack_words({"collective": SharedMemory.name}))
            socket.send_fds(follower, [b"\0"], [file])
        return SharedMemory(machine, shard, file)
    from model.parallel.distributed import Distributed, offer_store

    name, (store, port) = "nccl" if means.gpu else "gloo", offer_store(host, shard.size)
    for follower in leader.sockets.values():
        send(follower, Kind.WELCOME, pack_words({"collective": name, "host": host, "port": port}))
    return Distributed(name, shard, store, host, means.seconds)


def join(
    address: str,
    shard: Shard,
    token: bytes,
    runs: Mapping[str, Any],
    means: Means,
    lost: Callable[[str], None],
) -> Joined:
    """As a follower. lost: is told why the group computes no more. Raises RankLost, Refused, OSError."""
    follower = Follower.join(address, shard.rank, token, {"size": shard.size, **runs})
    try:
        welcome = unpack_words(follower.answer(Kind.WELCOME))
        collective = _accepted(follower, welcome, shard, means)
    except BaseException:
        follower.close()
        raise
    return Joined(follower, shard, collective, means.seconds, lost)


def _accepted(follower: Follower, welcome: Mapping[str, Any], shard: Shard, means: Means) -> Collective:
    if "port" not in welcome:
        _, files, _, _ = socket.recv_fds(follower.socket, 1, 1)
        machine = _machine(means.kernels)
        if machine is None or not files:
            raise OSError("rank 0 shares memory, which this rank cannot")
        from model.cpu.shared_memory import SharedMemory

        return SharedMemory(machine, shard, files[0])
    from model.parallel.distributed import Distributed, find_store

    host = str(welcome["host"])
    store = find_store(host, int(welcome["port"]), shard.size)
    name = follower.socket.getsockname()
    own = host if follower.socket.family == socket.AF_UNIX else name[0]
    return Distributed(str(welcome["collective"]), shard, store, own, means.seconds)


def _machine(kernels: Path | None) -> "Machine | None":
    try:
        from model.cpu.kernels.machine import open_machine

        return open_machine(kernels)
    except (ImportError, OSError) as error:
        log.info("ranks do not share memory: %s", error)
        return None
