"""What work costs, as measured: steps by their tokens, and pages that are swapped to the host and back."""

MEMORY = 0.98  # weight of a step against the one after it: about 50 steps count
FEWEST_PAGES = 16  # swapped before their time is believed


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
        """(a, b), neither below 0; zeros before the first step."""
        if not self._weight:
            return 0.0, 0.0
        n, t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - n * n
        covariance = self._nt / self._weight - n * t
        b = min(max(covariance / variance, 0.0), t / n) if variance > 1e-6 * n * n else 0.0
        return max(t - b * n, 0.0), b

    def expected(self, tokens: int) -> float | None:
        """Seconds of a step of so many tokens; None before the first step. One that is larger than any before takes no
        longer than in proportion to the largest.
        """
        if not self._weight:
            return None
        a, b = self.fit()
        scaled = self._largest_seconds * tokens / max(1, self._largest) if tokens > self._largest else 0.0
        return max(a + b * tokens, scaled)


class SwapCost:
    """The mean time that a page takes from the pool to the host or back."""

    def __init__(self) -> None:
        self._pages = self._seconds = 0.0

    def observe(self, pages: int, seconds: float) -> None:
        self._pages = MEMORY * self._pages + pages
        self._seconds = MEMORY * self._seconds + seconds

    @property
    def page_seconds(self) -> float | None:
        """None until enough pages were swapped."""
        return self._seconds / self._pages if self._pages >= FEWEST_PAGES else None
