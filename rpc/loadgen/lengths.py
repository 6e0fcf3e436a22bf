"""Lengths of requests in tokens: one number, or a range with equal chances."""

import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, flag: str) -> "Lengths":
        """Parses "128" or "64-256". Raises ValueError, which names `flag`."""
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise ValueError(f"{flag} {text!r} must be a number of at least 1, or a range such as 64-256")
        return Lengths(least, most)

    def draw(self, source: np.random.Generator) -> int:
        return int(source.integers(self.least, self.most, endpoint=True))
