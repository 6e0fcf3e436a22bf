"""The time of a simulated device, which computes one step after the other."""

import threading
import time
from collections.abc import Callable, Sequence

from model.simulated.faults import Fault, StepFaults


class Timeline:
    """When steps end. A step begins where it is launched, or where the step before it ends.

    Times are planned, not measured: a wait that takes too long makes no later step end later, while there is one in
    flight.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, faults: Sequence[Fault] = ()) -> None:
        """Makes a timeline whose device is free.

        Args:
            clock: Seconds.
            faults: Of the device's steps, at seconds from now on.
        """
        self._clock, self._start, self._faults = clock, clock(), StepFaults(faults)
        self._free = 0.0  # when the step that was launched last ends
        self._interrupted = threading.Event()

    def launch(self, seconds: float) -> float:
        """Adds a step that takes this long without faults. Returns when it ends."""
        now = self._clock()
        self._free = max(now, self._free) + self._faults.lengthened(seconds, now - self._start)
        return self._free

    def wait(self, end: float) -> None:
        """Waits until then, or until `interrupt`."""
        left = end - self._clock()
        if left > 0:
            self._interrupted.wait(min(left, threading.TIMEOUT_MAX))  # faults multiply

    def interrupt(self) -> None:
        """Ends all waits, from now on. From any thread."""
        self._interrupted.set()
