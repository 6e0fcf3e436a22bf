"""A rank group as its members see it: rank 0 leads, the others follow."""

import threading
from collections.abc import Callable

from model.parallel.collective import Collective, Ranks
from model.parallel.group import Follower, Leader, RankWatch
from model.parallel.shard import Shard
from model.parallel.wire import FrameKind


class RankGroup:
    """The group on rank 0.

    Attributes:
        ranks: Rank 0's shard, with its connections to the others.
        lost: Reason why the group computes no more. None while it computes.
    """

    def __init__(self, leader: Leader, shard: Shard, collective: Collective, seconds: float) -> None:
        self._leader, self.collective = leader, collective
        self.ranks = Ranks(shard, collective, leader.exchange)
        self.lost: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()  # the watch fails the group on its own thread while others add listeners
        self._watch = RankWatch(leader.sockets, self.fail, seconds, collective.lives, leader.last_words)

    def when_lost(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the reason once the group is lost, on any thread; at once if it is lost already."""
        with self._lock:
            self._listeners.append(listener)
            lost = self.lost
        if lost is not None:
            listener(lost)

    def fail(self, why: str) -> None:
        """Ends the group's work. The first reason counts; listeners are called outside the lock."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            listeners = list(self._listeners)
        self.collective.fail(why)
        for listener in listeners:
            listener(why)

    def started(self) -> None:
        """Starts to count silence: all ranks have loaded and done a step."""
        self._leader.started()
        self.collective.started()
        self._watch.hear()

    def broadcast(self, kind: FrameKind, content: bytes) -> None:
        """Sends a frame to all followers. Raises RankLost."""
        self._leader.broadcast(kind, content)

    def answers(self, kind: FrameKind) -> list[bytearray]:
        """Waits for a frame of each follower, in the order of ranks. Raises RankLost."""
        return self._leader.answers(kind)

    def close(self) -> None:
        """Closes the group: followers end when their connection does."""
        self._watch.close()
        self._leader.close()
        self.collective.close()


class FollowerGroup:
    """The group on a follower."""

    def __init__(
        self, follower: Follower, shard: Shard, collective: Collective, seconds: float, lost: Callable[[str], None]
    ) -> None:
        self.follower, self.collective = follower, collective
        self.ranks = Ranks(shard, collective, follower.exchange)

        def fail(why: str) -> None:
            collective.fail(why)
            lost(why)

        # A follower watches rank 0 alone. Rank 0 watches the others, so that one rank states why the group ends.
        self._watch = RankWatch({0: follower.socket}, fail, seconds, lambda: collective.lives()[:1], lambda _: "")

    def started(self) -> None:
        """Starts to count rank 0's silence: a step is done."""
        self.collective.started()
        self._watch.hear()

    def close(self) -> None:
        self._watch.close()
        self.follower.close()
        self.collective.close()
