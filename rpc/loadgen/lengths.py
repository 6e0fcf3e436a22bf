"""How many tokens a request has: always as many, or of a range with equal chances."""

import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from least to most, both among them."""

    least: int
    most: int

    @staticmethod
    def of(text: str, flag: str) -> "Lengths":
        """ "128" or "64-256". flag: that had it, for the ValueError."""
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise ValueError(f"{flag} {text!r} must be a number from 1 on, or a range as 64-256")
        return Lengths(least, most)

    def draw(self, source: np.random.Generator) -> int:
        return int(source.integers(self.least, self.most, endpoint=True))
