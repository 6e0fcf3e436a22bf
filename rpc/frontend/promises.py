"""Whether answers come when they should: what there are more engines for."""

from collections.abc import Mapping, Sequence

MEMORY = 0.8  # weight of what came before the last look


class Promises:
    """ttft: seconds to a request's first token, itl: between two tokens of a sequence. None: nothing is promised."""

    def __init__(self, ttft: float | None = None, itl: float | None = None) -> None:
        self._ttft, self._itl = ttft, itl
        self._firsts, self._late_firsts = 0.0, 0.0
        self._gaps, self._late_gaps = 0.0, 0.0

    def observe(self, firsts: Sequence[float], gaps: Mapping[float, int]) -> None:
        """As `Metrics.tokens`."""
        if self._ttft is not None and firsts:
            self._firsts += len(firsts)
            self._late_firsts += sum(seconds > self._ttft for seconds in firsts)
        if self._itl is not None:
            for seconds, count in gaps.items():
                self._gaps += count
                self._late_gaps += count * (seconds > self._itl)

    def late(self) -> float:
        """The larger share, 0 to 1, of what came lately and was late; what came before the last look fades."""
        share = max(_share(self._late_firsts, self._firsts), _share(self._late_gaps, self._gaps))
        self._firsts, self._late_firsts = MEMORY * self._firsts, MEMORY * self._late_firsts
        self._gaps, self._late_gaps = MEMORY * self._gaps, MEMORY * self._late_gaps
        return share


def _share(part: float, whole: float) -> float:
    """Of less than one answer nothing is said."""
    return part / whole if whole >= 1 else 0.0
