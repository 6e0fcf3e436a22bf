"""Poison-request quarantine: finds the request that engines die of, with no more engines than needed.

A request that was on two engines when they died is a suspect. Suspects run one after the other, each isolated: its
engine runs no other request. A suspect that passes the point where the last engine died is paroled, and goes on as any
other. If it becomes a suspect again, it runs isolated to its end.

A request is given up only if its engine dies while it runs isolated there. That request then explains the deaths of
engines that it was on, and other requests are no longer suspected for those.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rpc.frontend.live import Live

Engine = Hashable
"""`Replica.identity`."""

DEATHS = 2  # engines that died with a request, to make it a suspect
PROBATION = 16  # steps that a suspect goes beyond where the last engine died
TO_THE_END = 2**31 - 1  # steps


@dataclass(slots=True, eq=False)
class QuarantineRecord:
    """Evidence against a request.

    Attributes:
        deaths: Engines that died with it beside other requests.
        unseen: Engines that died while it was to run isolated there.
        paroled: It has run isolated before, and its engine lived.
    """

    deaths: set[Engine] = field(default_factory=set)
    unseen: int = 0
    paroled: bool = False


class PoisonQuarantine:
    """The quarantine of one frontend.

    Invariant: at most one request runs isolated at a time, so that a death has one explanation.

    Attributes:
        running: Request that runs isolated at the moment.
    """

    def __init__(self) -> None:
        self._records: dict[Live, QuarantineRecord] = {}
        self._waiting: deque[Live] = deque()
        self._start_counts: list[int] = []  # tokens of each sequence of `running` when it was submitted
        self.running: Live | None = None

    @property
    def waiting(self) -> list[Live]:
        """Suspects that wait for their isolated run, the next one first."""
        return list(self._waiting)

    @property
    def count(self) -> int:
        """Count of suspects that wait. Read on any thread."""
        return len(self._waiting)

    @property
    def implicated(self) -> list[Live]:
        """Live requests with which an engine has died, one or more."""
        return list(self._records)

    def died_with(self, lives: Iterable[Live], engine: Engine) -> list[Live]:
        """Notes that an engine died on which no request was isolated.

        Args:
            lives: Requests that were on it.
            engine: Identity of the engine.

        Returns:
            Those of the requests that may go on as any other. The rest wait for their isolated run.
        """
        free = []
        for live in lives:
            record = self._records.setdefault(live, QuarantineRecord())
            record.deaths.add(engine)
            if len(record.deaths) < DEATHS:
                free.append(live)
            else:
                self._waiting.append(live)
        return free

    def next(self) -> tuple[Live, int] | None:
        """Starts the next isolated run.

        Returns:
            The suspect and the count of steps that it runs isolated. None while another one runs, or none waits.
        """
        if self.running is not None or not self._waiting:
            return None
        live = self.running = self._waiting.popleft()
        self._start_counts = [sequence.token_count for sequence in live.stream.sequences]
        # A beam search emits nothing before its end, so how far it has got cannot be seen.
        to_the_end = self._records[live].paroled or live.stream.request.beam is not None
        return live, TO_THE_END if to_the_end else PROBATION

    def has_passed(self) -> bool:
        """Whether the isolated request has passed its probation."""
        live = self.running
        if live is None or self._records[live].paroled or live.stream.request.beam is not None:
            return False
        counts = (sequence.token_count for sequence in live.stream.sequences)
        return any(now - before >= PROBATION for now, before in zip(counts, self._start_counts, strict=True))

    def postpone(self) -> None:
        """Ends the isolated run without a result, as the request has to leave its engine; it is the next to run."""
        if self.running is not None:
            self._waiting.appendleft(self.running)
            self.running = None

    def parole(self) -> None:
        """Ends the isolated run; the request goes on as any other."""
        if self.running is not None:
            self._records[self.running] = QuarantineRecord(paroled=True)
            self.running = None

    def died_isolated(self, started: bool) -> list[Live] | None:
        """Notes that the engine of the isolated request died.

        A request that is not known to have run gets one more try: the engine may have died before it took it.

        Args:
            started: The request is known to have run there.

        Returns:
            Requests that are no longer suspects, since the isolated one is guilty. None if it is tried once more.
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
        """Forgets a request that has ended, and returns whether it was the isolated one."""
        if self._records.pop(live, None) is None:
            return False
        if live in self._waiting:
            self._waiting.remove(live)
        was_isolated = self.running is live
        if was_isolated:
            self.running = None
        return was_isolated
