"""Autoscaling: the number of replicas, from the load of those that run.

Each ratio is one of measured to wanted load: the queue in predicted seconds, pages and rows in use, and answers
later than their SLO. The wanted number of replicas brings the worst ratio back to 1, with at most twice as many as run.
This is the rule of Kubernetes' horizontal autoscaler: desired = ceil(current x measured / target). Replicas are started
once more have been wanted for `up` seconds, the least number wanted in that time. One is ended once fewer would have
done for `down` seconds, which then begin anew. While replicas start, none is started for the load that they will take.
"""

import math
from collections import deque
from dataclasses import dataclass

from scheduler.scaling_settings import ScalingSettings

LATE_SHARE = 0.1  # allowed share of answers later than their SLO


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of all replicas together.

    Attributes:
        now: Seconds on any clock.
        serving: Replicas that take requests.
        starting: Replicas that will soon.
        backlog: Predicted seconds of waiting work, the sum over replicas.
        use: Part of rows or pages in use, whichever is larger, 0 to 1, the mean over replicas.
        late: Share of answers since the last call that were later than their SLO, 0 to 1.
    """

    now: float
    serving: int
    starting: int = 0
    backlog: float = 0.0
    use: float = 0.0
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas that is wanted. why: the reason, for people; "" where it is the current number."""

    replicas: int
    why: str = ""


class Autoscaler:
    """Decides on the number of replicas, called with an `EngineLoad` about once a second."""

    def __init__(self, settings: ScalingSettings, least: int) -> None:
        self._settings, self._least = settings, least
        self._most = max(least, settings.replicas or least)
        self._wants: deque[tuple[float, int]] = deque()
        self._since = -math.inf
        """When a replica was ended last."""

    def decide(self, load: EngineLoad) -> Decision:
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
        """Returns the wanted numbers of the last `seconds`; nothing where observation began later."""
        since = self._wants[-1][0] - seconds
        before = [n for at, n in self._wants if at <= since]
        return [before[-1], *(n for at, n in self._wants if at > since)] if before else []

    def _wanted(self, load: EngineLoad) -> tuple[int, str]:
        """Returns the number of replicas that the load needs, and the reason."""
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
