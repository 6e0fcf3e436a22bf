"""Measured costs: of steps by their tokens, of swapped pages, and of pages copied from another engine."""

MEMORY = 0.98  # weight of a step against the one after it: about 50 steps count
FEWEST_PAGES = 16  # swapped before their mean time is used
FEWEST_COPIED = 4  # pages: fewer are not worth asking another engine for
ASSUMED_RATE, ASSUMED_BYTES = 200e6, 2**20  # prior: bytes a second between engines, with the weight of these bytes
COPY_MEMORY = 0.8  # weight of a copy against the one after it
COPY_START = 0.005  # seconds until the first byte comes


class StepCost:
    """Fits seconds = a + b x tokens to the steps that ran."""

    def __init__(self) -> None:
        self._largest, self._largest_seconds = 0, 0.0
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= self._largest:
            self._largest, self._largest_seconds = tokens, seconds
        self._weight = MEMORY * self._weight + 1
        self._n = MEMORY * self._n + tokens
        self._t = MEMORY * self._t + seconds
        self._nn = MEMORY * self._nn + tokens * tokens
        self._nt = MEMORY * self._nt + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """Returns (a, b), neither below 0; zeros before the first step."""
        if not self._weight:
            return 0.0, 0.0
        n, t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - n * n
        covariance = self._nt / self._weight - n * t
        b = min(max(covariance / variance, 0.0), t / n) if variance > 1e-6 * n * n else 0.0
        return max(t - b * n, 0.0), b

    @property
    def mean(self) -> float:
        """Mean seconds of the recent steps; 0 before the first one."""
        return self._t / self._weight if self._weight else 0.0

    def expected(self, tokens: int) -> float | None:
        """Predicts the seconds of a step; None before the first step.

        A step larger than any before is taken to cost at least its part of the largest.
        """
        if not self._weight:
            return None
        a, b = self.fit()
        scaled = self._largest_seconds * tokens / max(1, self._largest) if tokens > self._largest else 0.0
        return max(a + b * tokens, scaled)


class CopyCost:
    """Cost of copying pages from another engine: a start, then bytes at the recent mean rate."""

    def __init__(self) -> None:
        self._bytes, self._seconds = float(ASSUMED_BYTES), ASSUMED_BYTES / ASSUMED_RATE

    def observe(self, size: int, seconds: float) -> None:
        """Learns from `size` bytes that came in `seconds`."""
        self._bytes = COPY_MEMORY * self._bytes + size
        self._seconds = COPY_MEMORY * self._seconds + seconds

    def expected(self, size: int) -> float:
        """Predicts the seconds for `size` bytes."""
        return COPY_START + size * self._seconds / max(1.0, self._bytes)


def copying_pays(pages: int, copying: float, computing: float | None) -> bool:
    """Whether pages are better copied than computed. A few are not worth asking for.

    Args:
        pages: Number of pages.
        copying: Seconds to copy them.
        computing: Seconds to compute them; None for an engine that has run no step yet.
    """
    return pages >= FEWEST_COPIED and (computing is None or copying < computing)


class SwapCost:
    """Mean time of a page from the pool to the host or back."""

    def __init__(self) -> None:
        self._pages = self._seconds = 0.0

    def observe(self, pages: int, seconds: float) -> None:
        self._pages = MEMORY * self._pages + pages
        self._seconds = MEMORY * self._seconds + seconds

    @property
    def page_seconds(self) -> float | None:
        """Seconds a page; None until enough pages were swapped."""
        return self._seconds / self._pages if self._pages >= FEWEST_PAGES else None
