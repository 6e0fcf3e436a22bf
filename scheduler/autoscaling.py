"""How many replicas there should be, from what those that there are have to do.

Each of the goals says how much more than it should a replica has to do: its queue in predicted seconds, its pages and
rows in use, and answers that came later than promised. There should be as many replicas as would bring the worst of
these back to 1 (the rule of Kubernetes' horizontal autoscaler, desired = ceil(current x measured / goal)), at most
twice as many as there are. More are started once this has been so for a while, the least of what was wanted
meanwhile; one is ended when fewer would have done all the time for a longer while, which then begins anew. While
replicas are on their way, no more are started for the load that they are to take.
"""

import math
from collections import deque
from dataclasses import dataclass

from scheduler.settings import ScalingSettings

LATE_SHARE = 0.1  # of answers that may come later than promised


@dataclass(frozen=True, slots=True)
class Load:
    """Of all replicas together, at the time `now` in seconds. serving: that take requests. starting: on their way.
    backlog: predicted seconds of work that waits, the sum over replicas. use: of rows or of pages, whichever is fuller,
    0 to 1, the mean over replicas. late: share of what came since the last look that was later than promised, 0 to 1.
    """

    now: float
    serving: int
    starting: int = 0
    backlog: float = 0.0
    use: float = 0.0
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """replicas: how many there should be. why: for people, "" where it is as many as there are."""

    replicas: int
    why: str = ""


class Autoscaler:
    """least: replicas. Give it a `Load` every second or so."""

    def __init__(self, settings: ScalingSettings, least: int) -> None:
        self._settings, self._least = settings, least
        self._most = max(least, settings.replicas or least)
        self._wants: deque[tuple[float, int]] = deque()
        self._since = -math.inf
        """The last time that one was ended."""

    def decide(self, load: Load) -> Decision:
        there, settings = load.serving + load.starting, self._settings
        wanted, why = self._wanted(load)
        self._wants.append((load.now, wanted))
        while len(self._wants) > 1 and self._wants[1][0] <= load.now - max(settings.up, settings.down):
            self._wants.popleft()
        more = min(self._wanted_for(settings.up), default=there)
        if more > there:
            return Decision(more, why)
        fewer = max(self._wanted_for(settings.down), default=there)
        if fewer < there and load.now - self._since >= settings.down:
            self._since = load.now
            return Decision(there - 1, f"fewer would have done for {settings.down:g} s")
        return Decision(there)

    def _wanted_for(self, seconds: float) -> list[int]:
        """What was wanted in the last so many seconds; nothing where it has not looked for so long."""
        since = self._wants[-1][0] - seconds
        before = [n for at, n in self._wants if at <= since]
        return [before[-1], *(n for at, n in self._wants if at > since)] if before else []

    def _wanted(self, load: Load) -> tuple[int, str]:
        """How many replicas would do, and for what."""
        settings = self._settings
        serving = max(load.serving, 1)
        each = {
            f"{load.backlog / serving:.1f} s of work wait for each": load.backlog / serving / settings.queue,
            f"{load.use:.0%} of pages or rows are in use": load.use / settings.use,
            f"{load.late:.0%} of answers are late": load.late / LATE_SHARE,
        }
        why, pressure = max(each.items(), key=lambda item: item[1])
        wanted = math.ceil(serving * min(pressure, 2.0) - 1e-9)
        return min(max(wanted, self._least), self._most), why
