"""Reads an output prefix: the output of a sequence that its client has already."""

from collections.abc import Callable

from rpc.frontend.completeness import Answer, Completeness, Question
from rpc.frontend.output import SequenceOutput


class FoundStops:
    """Keeps where stop strings are found in a constrained output prefix, and answers no each time.

    The texts before them are all beginnings of one text, so their lengths say which they are.

    Attributes:
        lengths: Lengths of the texts before stop strings.
        longest: The longest question.
    """

    def __init__(self) -> None:
        self.lengths = set[int]()
        self.longest: Question | None = None

    def add(self, question: Question) -> bool:
        """Adds a question, and answers no."""
        self.lengths.add(len(question.text))
        if self.longest is None or len(question.text) > len(self.longest.text):
            self.longest = question
        return False


def read_known(
    make: Callable[[Answer | None], SequenceOutput], completeness: Completeness | None, has_stops: bool
) -> SequenceOutput:
    """Makes the output of a sequence behind its output prefix.

    A prefix may have a stop string at each of its tokens. So it is read twice where it has some: first as if none ended
    the output, then all of them are asked about together, then with the answers. The process that checks constraints
    thus reads the text once, and not once for each stop string.

    Args:
        make: Makes the output. Gets what answers the questions of the prefix.
        completeness: What is asked about the output; None without a constraint.
        has_stops: The request has an output prefix and stop strings.

    Raises:
        RequestFailed: The questions cannot be answered.
    """
    if completeness is None or not has_stops:
        return make(None)
    found = FoundStops()
    made = make(found.add)
    if found.longest is None:
        return made
    asked, lengths = found.longest, sorted(found.lengths)
    complete = frozenset(completeness.complete_ends(asked.constraint, asked.text, lengths))
    return make(lambda question: len(question.text) in complete) if complete else made
