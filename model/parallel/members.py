"""A rank group as its members see it: rank 0 leads, the others follow."""

import threading
from collections.abc import Callable

from model.parallel.collective import Collective, Ranks
from model.parallel.group import Follower, Leader, Watch
from model.parallel.shard import Shard
from model.parallel.wire import Kind


class Led:
    """The group as rank 0 has it. lost: why it computes no more, None while it does."""

    def __init__(self, leader: Leader, shard: Shard, collective: Collective, seconds: float) -> None:
        self._leader, self.collective = leader, collective
        self.ranks = Ranks(shard, collective, leader.exchange)
        self.lost: str | None = None
        self._told: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._watch = Watch(leader.sockets, self.fail, seconds, collective.lives, leader.last_words)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """tell: is told why, on any thread; at once if it has happened."""
        with self._lock:
            self._told.append(tell)
            lost = self.lost
        if lost is not None:
            tell(lost)

    def fail(self, why: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            told = list(self._told)
        self.collective.fail(why)
        for tell in told:
            tell(why)

    def started(self) -> None:
        """All have loaded and done a step: from now on nobody may take long."""
        self._leader.started()
        self._watch.hear()

    def tell(self, kind: Kind, content: bytes) -> None:
        """All followers. Raises RankLost."""
        self._leader.tell(kind, content)

    def answers(self, kind: Kind) -> list[bytearray]:
        """What each follower replies. Raises RankLost."""
        return self._leader.answers(kind)

    def close(self) -> None:
        """Ends it: followers end when their connection does."""
        self._watch.close()
        self._leader.close()
        self.collective.close()


class Joined:
    """The group as a follower has it."""

    def __init__(
        self, follower: Follower, shard: Shard, collective: Collective, seconds: float, lost: Callable[[str], None]
    ) -> None:
        self.follower, self.collective = follower, collective
        self.ranks = Ranks(shard, collective, follower.exchange)

        def fail(why: str) -> None:
            collective.fail(why)
            lost(why)

        # Who else is silent, rank 0 sees: it alone says why the group ends.
        self._watch = Watch({0: follower.socket}, fail, seconds, lambda: collective.lives()[:1], lambda _: "")

    def started(self) -> None:
        """A step is done: from now on rank 0 may not take long."""
        self._watch.hear()

    def close(self) -> None:
        self._watch.close()
        self.follower.close()
        self.collective.close()
