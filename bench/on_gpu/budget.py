"""Time of a run."""

import time
from collections.abc import Callable


class Budget:
    """Seconds of a run, from now on.

    Work that has begun is not interrupted, so each piece asks `allows` with its expected time first.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end, self.seconds = clock, clock() + seconds, seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def allows(self, seconds: float) -> bool:
        return self.left >= seconds

    def why_not(self, seconds: float) -> str:
        return f"takes about {seconds:.0f} s, {max(self.left, 0.0):.0f} s are left"
