"""Lines of a batch job that failed."""

from dataclasses import dataclass, field

SHOWN = 5  # ids in a message
LONGEST = 60  # characters of an id in a message


@dataclass(slots=True)
class Failures:
    """Lines that have an error in place of a result.

    Attributes:
        count: Number of these lines.
        first: Index and id of the first ones in the file, at most `SHOWN`.
    """

    count: int = 0
    first: list[tuple[int, object]] = field(default_factory=list)

    def add(self, index: int, line_id: object) -> None:
        self.count += 1
        self.first = sorted([*self.first, (index, line_id)], key=lambda line: line[0])[:SHOWN]

    def __str__(self) -> str:
        """Returns the ids of the first lines, and the number of the others."""
        ids = ", ".join(_shown(line_id) for _, line_id in self.first)
        others = self.count - len(self.first)
        return f"{ids} and {others} more" if others else ids


def _shown(line_id: object) -> str:
    text = repr(line_id)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
