"""Text that prompts are cut from: Shakespeare's plays, as token ids if the protocol takes ids, else as words."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rpc.paths import demo_directory

PROBE_WORDS = 300
OPENING = 3  # units at the front of a cut, each from a place of its own


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text in units that prompts are made of.

    Attributes:
        units: Token ids or words.
        tokens_a_unit: 1 for ids; for words an average, so that lengths of prompts are approximate.
    """

    units: Sequence[int] | Sequence[str]
    tokens_a_unit: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether prompts have exactly the requested number of tokens."""
        return not isinstance(self.units[0], str)

    def prompt(self, parts: Sequence[tuple[int, int]]) -> list[int] | str:
        """Returns a prompt of several cuts.

        Args:
            parts: Start of each cut, any number, and its length in tokens. A cut has at least one unit; none is made
                for 0 tokens. The text wraps around.
        """
        found = [self._cut(start, max(1, round(tokens / self.tokens_a_unit))) for start, tokens in parts if tokens]
        if self.exact:
            return [int(unit) for part in found for unit in part]
        return " ".join(str(unit) for part in found for unit in part)

    def _cut(self, start: int, count: int) -> Sequence[int | str]:
        """Returns one cut.

        A long load has more requests than the text has places. If cuts were contiguous, some would begin alike, and a
        prefix cache would serve them. So `start` gives a place for each unit of the opening, then one for the rest.
        """
        cut: list[int | str] = []
        for _ in range(min(OPENING, count)):
            start, place = divmod(start, len(self.units))
            cut.append(self.units[place])
        start %= len(self.units)
        cut += self.units[start : start + count - len(cut)]
        while len(cut) < count:
            cut += self.units[: count - len(cut)]
        return cut


def plays() -> str:
    """Returns 1.1 MB of text that ships with Quire."""
    return (demo_directory().parent / "tinyshakespeare.txt").read_text(encoding="utf-8")


async def corpus_of_words(text: str, count: Callable[[str], Awaitable[int]]) -> Corpus:
    """Returns a corpus of words, with the average of their tokens.

    Args:
        text: The text.
        count: Asks the server for the number of a text's tokens; it is called once. If it returns 0, the server does
            not count tokens, and a word counts as 4/3 of a token.
    """
    words = text.split()
    probe = words[:PROBE_WORDS]
    tokens = await count(" ".join(probe))
    return Corpus(words, tokens / len(probe) if tokens else 4 / 3)
