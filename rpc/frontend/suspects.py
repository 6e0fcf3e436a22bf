"""Requests that were there when engines died: which of them has to run alone, to see whether it is what they die of.

A request that was on two engines when they died is under suspicion. It runs with nothing beside it until it has got
further than where the last engine died, and goes on as any other then; the next time that it comes under suspicion, it
runs alone to its end. Only one whose engine dies while it is alone there is given up. What died with it is explained by
that: others are no longer suspected for it.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rpc.frontend.live import Live

Engine = Hashable
"""`Replica.identity`."""

DEATHS = 2
PROBATION = 16  # steps that a suspect goes beyond where the last engine died
TO_THE_END = 2**31 - 1


@dataclass(slots=True, eq=False)
class Record:
    """What is known of a suspect. deaths: engines that died with it. unseen: how many died while it was to be alone
    there, and had not said that it runs. paroled: it has run alone before.
    """

    deaths: set[Engine] = field(default_factory=set)
    unseen: int = 0
    paroled: bool = False


class Suspects:
    """Of one frontend. running: the one that is alone on an engine at this moment."""

    def __init__(self) -> None:
        self._records: dict[Live, Record] = {}
        self._waiting: deque[Live] = deque()
        self._marks: list[int] = []  # tokens of its sequences when it was sent off
        self.running: Live | None = None

    @property
    def waiting(self) -> list[Live]:
        """For their turn."""
        return list(self._waiting)

    @property
    def count(self) -> int:
        """Of those that wait. On any thread."""
        return len(self._waiting)

    def died_with(self, lives: Iterable[Live], engine: Engine) -> list[Live]:
        """This engine died with these on it, none of them alone. Returns those of them that go on as any other; the
        others wait for their turn.
        """
        free = []
        for live in lives:
            record = self._records.setdefault(live, Record())
            record.deaths.add(engine)
            if len(record.deaths) < DEATHS:
                free.append(live)
            else:
                self._waiting.append(live)
        return free

    def next(self) -> tuple[Live, int] | None:
        """Whose turn it is, and how many steps it has to go alone; None while another one's is not over."""
        if self.running is not None or not self._waiting:
            return None
        live = self.running = self._waiting.popleft()
        self._marks = [sequence.token_count for sequence in live.stream.sequences]
        whole = self._records[live].paroled or live.stream.request.beam is not None
        return live, TO_THE_END if whole else PROBATION

    def has_passed(self) -> bool:
        """Whether the one that runs alone has got far enough."""
        live = self.running
        if live is None or self._records[live].paroled or live.stream.request.beam is not None:
            return False
        counts = (sequence.token_count for sequence in live.stream.sequences)
        return any(now - before >= PROBATION for now, before in zip(counts, self._marks, strict=True))

    def postpone(self) -> None:
        """The one that runs alone has to leave its engine; it is the next."""
        if self.running is not None:
            self._waiting.appendleft(self.running)
            self.running = None

    def parole(self) -> None:
        """The one that runs alone need not be alone any more."""
        if self.running is not None:
            self._records[self.running] = Record(paroled=True)
            self.running = None

    def died_alone(self, started: bool) -> list[Live] | None:
        """The engine died while one was alone there. started: it is known to have run. Returns, where that one is
        guilty, those that are no longer suspected; None where it will be tried once more.
        """
        live, self.running = self.running, None
        if live is None:
            return []
        record = self._records[live]
        record.unseen += 1
        if not started and record.unseen < DEATHS:
            self._waiting.appendleft(live)
            return None
        del self._records[live]
        for other in self._records.values():
            other.deaths -= record.deaths
        free = [other for other in self._waiting if len(self._records[other].deaths) < DEATHS]
        self._waiting = deque(other for other in self._waiting if len(self._records[other].deaths) >= DEATHS)
        return free

    def forget(self, live: Live) -> bool:
        """It has ended. Returns whether it was the one that runs alone."""
        if self._records.pop(live, None) is None:
            return False
        if live in self._waiting:
            self._waiting.remove(live)
        was_alone = self.running is live
        if was_alone:
            self.running = None
        return was_alone
