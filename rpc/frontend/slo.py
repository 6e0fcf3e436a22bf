"""Tracks TTFT and ITL against their SLOs; the autoscaler's input."""

from collections.abc import Mapping, Sequence

MEMORY = 0.8  # factor by which earlier observations fade at each read


class SLOTracker:
    """Measures the share of late tokens.

    Args:
        ttft: Seconds that a request's first token may take; None: no objective.
        itl: Seconds that may pass between two tokens of a sequence; None: no objective.
    """

    def __init__(self, ttft: float | None = None, itl: float | None = None) -> None:
        self._ttft, self._itl = ttft, itl
        self._firsts, self._late_firsts = 0.0, 0.0
        self._gaps, self._late_gaps = 0.0, 0.0

    def observe(self, firsts: Sequence[float], gaps: Mapping[float, int]) -> None:
        """Counts tokens by whether they are late.

        Args:
            firsts: Seconds from each request's arrival to its first token.
            gaps: Count of tokens by the seconds since the token before in their sequence.
        """
        if self._ttft is not None and firsts:
            self._firsts += len(firsts)
            self._late_firsts += sum(seconds > self._ttft for seconds in firsts)
        if self._itl is not None:
            for seconds, count in gaps.items():
                self._gaps += count
                self._late_gaps += count * (seconds > self._itl)

    def late(self) -> float:
        """Returns the larger of the two shares of late tokens, 0 to 1, and fades the observations so far."""
        share = max(_share(self._late_firsts, self._firsts), _share(self._late_gaps, self._gaps))
        self._firsts, self._late_firsts = MEMORY * self._firsts, MEMORY * self._late_firsts
        self._gaps, self._late_gaps = MEMORY * self._gaps, MEMORY * self._late_gaps
        return share


def _share(part: float, whole: float) -> float:
    """Returns part / whole, 0 where less than one observation is left."""
    return part / whole if whole >= 1 else 0.0
