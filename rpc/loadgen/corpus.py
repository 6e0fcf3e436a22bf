"""Text that prompts are cut from: Shakespeare's plays, as token ids where the protocol takes ids, else as words."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rpc.paths import demo_directory

PROBE_WORDS = 300
OPENING = 3  # units at the front of a cut, each from a place of its own


@dataclass(frozen=True, slots=True)
class Corpus:
    """units: token ids or words. tokens_a_unit: 1 of ids; of words an average: prompts are about as long as asked."""

    units: Sequence[int] | Sequence[str]
    tokens_a_unit: float = 1.0

    @property
    def exact(self) -> bool:
        """Prompts have as many tokens as they should."""
        return not isinstance(self.units[0], str)

    def prompt(self, parts: Sequence[tuple[int, int]]) -> list[int] | str:
        """parts: where each begins, any number, and its tokens, at least one unit. The text goes round."""
        found = [self._cut(start, max(1, round(tokens / self.tokens_a_unit))) for start, tokens in parts if tokens]
        if self.exact:
            return [int(unit) for part in found for unit in part]
        return " ".join(str(unit) for part in found for unit in part)

    def _cut(self, start: int, count: int) -> Sequence[int | str]:
        """A long load has more requests than the text has places: were cuts one piece of it, some would begin alike and
        a prefix cache answer for them. So the start says where each unit of the opening is, and then the rest.
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
    """1.1 MB of text that comes with Quire."""
    return (demo_directory().parent / "tinyshakespeare.txt").read_text(encoding="utf-8")


async def corpus_of_words(text: str, count: Callable[[str], Awaitable[int]]) -> Corpus:
    """count: of a text's tokens, by the server, which is asked once for what a word is on average; 0: it does not say,
    and a word is four thirds of a token.
    """
    words = text.split()
    probe = words[:PROBE_WORDS]
    tokens = await count(" ".join(probe))
    return Corpus(words, tokens / len(probe) if tokens else 4 / 3)
