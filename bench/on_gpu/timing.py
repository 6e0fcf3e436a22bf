"""Times work: on a GPU by its own events, elsewhere by the clock of the host.

A burst of calls stands between two events, behind a delay in which the host launches them. So the time is the device's,
without gaps between launches. Works to compare are interleaved.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench.on_gpu.report import error_text

Work = Callable[[], object]
BURST = 2e-3  # seconds of a burst within MOST_CALLS: the cost of an event is negligible beside it
MOST_CALLS = 64  # of a burst: no more launches than a GPU queues
DELAY = 2e-4  # seconds beyond what the host took to launch a burst


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call: median, least and most of the bursts."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(seconds: list[float]) -> "Timing":
        return Timing(statistics.median(seconds), min(seconds), max(seconds))

    @property
    def spread(self) -> float:
        """Distance of least and most, as a share of the median."""
        return (self.most - self.least) / self.median


class HostTimer:
    """Timer for devices whose calls return after their work."""

    def burst(self, work: Work, calls: int) -> float:
        """Returns the seconds of one call, averaged over a burst."""
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) / calls


class DeviceTimer:
    """Timer for the current CUDA device."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cycles = 1e9  # a second; the first delay is only measured
        for _ in range(3):
            self.cycles = 2e7 / self._between(lambda: torch.cuda._sleep(int(2e7)))

    def burst(self, work: Work, calls: int) -> float:
        """Returns the seconds of one call, averaged over a burst."""
        launching = self._launching(work, calls)
        torch.cuda._sleep(int((1.5 * launching + DELAY) * self.cycles))
        return self._between(lambda: [work() for _ in range(calls)]) / calls

    def _launching(self, work: Work, calls: int) -> float:
        """Returns the seconds that the host takes to launch `calls` calls."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        taken = time.perf_counter() - began
        torch.cuda.synchronize()
        return taken

    def _between(self, work: Work) -> float:
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


Timer = HostTimer | DeviceTimer


def timer_of(device: torch.device) -> Timer:
    return DeviceTimer() if device.type == "cuda" else HostTimer()


def measure(timer: Timer, works: Mapping[str, Work], rounds: int) -> dict[str, Timing | str]:
    """Times works, interleaved. The first calls, which compile and fill caches, do not count.

    Returns:
        Name to timing, or to the error of a work that raises.
    """
    calls: dict[str, int] = {}
    errors: dict[str, Timing | str] = {}
    for name, work in works.items():
        try:
            calls[name] = _calls(timer, work)
        except Exception as error:  # the other works are still measured
            errors[name] = error_text(error)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, count in calls.items():
            taken[name].append(timer.burst(works[name], count))
    return errors | {name: Timing.of(seconds) for name, seconds in taken.items()}


def seconds_of(timer: Timer, work: Work, rounds: int) -> Timing:
    """Times one work alone; its exceptions pass through."""
    calls = _calls(timer, work)
    return Timing.of([timer.burst(work, calls) for _ in range(rounds)])


def _calls(timer: Timer, work: Work) -> int:
    """Warms up, and returns the number of calls for a burst."""
    for _ in range(2):
        work()
    once = timer.burst(work, 1)
    return max(1, min(MOST_CALLS, round(BURST / max(once, 1e-9))))
