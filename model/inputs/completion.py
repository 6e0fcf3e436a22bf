"""Completions of outputs: texts with which a constraint is complete, and as few tokens of them as are found.

A matcher says which tokens may follow, not which way is short. The search is for bytes, breadth first with a few ways
kept at each length. What closes a value comes first, since that is the short way in JSON, and in most of what models
write. So the completion is a short one, not always the shortest.

Within a text that may have any letters, no mask says which of them end it. A grammar names such ends (`named_end`).
"""

import json
import re
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from model.inputs.matcher import Matcher, Vocabulary

KEPT, TRIED = 4, 5  # ways at each length; bytes that each is continued with
MOST_BYTES, MOST_STEPS = 1024, 400  # of a completion; matchers of a search for each way, of 40 us each
MOST_RUN = 64  # bytes of which each is the only one, that are one step
FEW = 16  # tokens that can follow, where special ones among them are tried
CLOSERS, SPACES = b'}])>"0123456789,:', b" \t\n\r"
"""Bytes that are tried first, and last."""
IN_TEXT = 64  # tokens that can follow; where more can, it is within a text, which a quote closes

END = "end:"
"""Front of the name of a capture that is the end of a text, and no capture."""
MOST_ENDS = 16  # that are looked at
TOKEN_ID = re.compile(r"<\[([0-9]{1,9})\]>")

Way = tuple[Matcher, list[int]]
"""A constraint behind some tokens, and the tokens."""
Ahead = tuple[bool, bytes]
"""Whether an output may end there, and which tokens may follow."""


def named_end(rule: str, text: str) -> str:
    """Returns rules of a grammar, of which the first, empty one has a matcher know the end of a text.

    A capture is all that a matcher says of its grammar.

    Args:
        rule: Name of the rule.
        text: The end, with `<[1234]>` in place of special tokens.
    """
    name = json.dumps(END + text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{rule}[capture={name}]: {rule.upper()}\n{rule.upper()}: //"


class Completions:
    """Finds completions with the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, seconds: float, kept: int = KEPT, tried: int = TRIED) -> None:
        """Makes the finder.

        Args:
            vocabulary: Bytes of the model's tokens.
            seconds: Processor time that a search may take. A mask of a hostile grammar takes 20 ms.
            kept: Ways at each length, in the search for a shorter one.
            tried: Bytes that each is continued with.
        """
        self._vocabulary, self._seconds, self._kept, self._tried = vocabulary, seconds, kept, tried
        self.end = vocabulary.eos_token
        """A token that ends a complete output."""
        self.ends: tuple[int, ...] = tuple(vocabulary.eos_tokens)
        """All such tokens."""
        self._single = single = tokens_of_bytes(vocabulary)
        order = [*CLOSERS, *(byte for byte in range(256) if byte not in CLOSERS + SPACES), *SPACES]
        self._quote = single.get(ord('"'), -1)
        self._spaces = frozenset(single[byte] for byte in SPACES if byte in single)
        self._tokens: NDArray[np.int64] = np.array([single[byte] for byte in order if byte in single], np.int64)
        looked_at = np.zeros(vocabulary.vocab_size, np.bool_)
        looked_at[self._tokens] = True
        looked_at[[token for token in range(vocabulary.vocab_size) if vocabulary.is_special_token(token)]] = True
        self._looked_at = np.packbits(looked_at, bitorder="little")  # tokens of one byte, and special ones

    def text(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of tokens."""
        return self._vocabulary.decode_bytes([*tokens])

    def rest(self, path: Sequence[int], token: int) -> list[int] | None:
        """Returns what is left of a path behind a token that begins its text; None for another token."""
        own, text = self.text([token]), b""
        for count, part in enumerate(path, 1):
            if not own or self._vocabulary.is_special_token(part):
                return None
            text += self.text([part])
            if len(text) >= len(own):
                left = text[len(own) :]
                same = text.startswith(own)
                return [*(self._vocabulary.tokenize_bytes(left) if left else ()), *path[count:]] if same else None
        return None

    def any_byte(self, matcher: Matcher) -> int | None:
        """Returns some token of one byte that can follow; None where none can."""
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        following = self._tokens[mask[self._tokens] > 0]
        return int(following[0]) if len(following) else None

    def find(self, matcher: Matcher, room: int = 0) -> list[int] | None:
        """Returns tokens that complete an output, [] for one that is complete; None where none are found in time.

        Args:
            matcher: The constraint, at the end of the output. It is not changed.
            room: Tokens that it may have. Where the first that is found has more, a shorter one is searched for.
        """
        return self.shortest(matcher, room)[0]

    def shortest(self, matcher: Matcher, room: int = 0) -> tuple[list[int] | None, bool]:
        """Does as `find`. Returns also whether the search for a shorter one came to its end."""
        if matcher.is_stopped():
            return [], True
        end = time.thread_time() + self._seconds
        found = self._walk(matcher, end)
        if (found is not None and len(found) <= room) or time.thread_time() > end:
            return found, False
        other = self._search(matcher, self._kept, self._tried, end)
        paths = [path for path in (found, other) if path is not None]
        return min(paths, key=len, default=None), other is not None

    def _walk(self, matcher: Matcher, end: float) -> list[int] | None:
        """Goes on with the best continuation at each place until a time: a search that keeps one way.

        A search copies its matchers, which would take as long as all else here.
        """
        way, tokens, length = matcher.deep_copy(), list[int](), 0
        for _ in range(MOST_STEPS):
            if way.is_accepting():
                return self._shortened(matcher, tokens)
            following = self._continuations(way, way.compute_bitmask(), 1)
            if time.thread_time() > end or not following or not way.consume_tokens(following[0]):
                return None
            tokens += following[0]
            length += sum(map(self._size, following[0]))
            if length >= MOST_BYTES:
                return None
        return None

    def _search(self, matcher: Matcher, kept: int, tried: int, end: float) -> list[int] | None:
        """Searches until a time, with this many ways at each length, each of which is continued with so many bytes."""
        ways: dict[int, dict[Ahead, Way]] = {0: {self._ahead(matcher): (matcher.deep_copy(), [])}}  # by bytes
        left = MOST_STEPS * kept
        for length in range(MOST_BYTES):
            best = ways.pop(length, {})
            for (accepts, _), (_, tokens) in best.items():
                if accepts:
                    return self._shortened(matcher, tokens)
            for longer, tokens, size in self._longer(best, tried):
                if left < 0 or time.thread_time() > end:
                    return None
                others = ways.setdefault(length + size, {})
                if len(others) < kept:
                    left -= 1
                    others.setdefault(self._ahead(longer), (longer, tokens))
            if not ways:
                return None
        return None

    def _ahead(self, way: Matcher) -> Ahead:
        return way.is_accepting(), way.compute_bitmask()

    def _longer(self, best: dict[Ahead, Way], tried: int) -> Iterator[tuple[Matcher, list[int], int]]:
        """Yields the continuations of ways with their bytes, one at a time, the best of each way first."""
        continued = [self._continuations(way, mask, tried) for (_, mask), (way, _) in best.items()]
        for rank in range(tried):
            for (way, tokens), following in zip(best.values(), continued, strict=True):
                if rank < len(following) and (longer := way.deep_copy()).consume_tokens(following[rank]):
                    yield longer, tokens + following[rank], sum(map(self._size, following[rank]))

    def _size(self, token: int) -> int:
        return 1 if self._vocabulary.is_special_token(token) else max(1, len(self._vocabulary.decode_bytes([token])))

    def _continuations(self, way: Matcher, bits: bytes, tried: int) -> list[list[int]]:
        if run := self._only_way(way, bits):
            return [run]
        if ending := self._ending(way):
            return [ending]
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        single = self._tokens[mask[self._tokens] > 0].tolist()
        if len(single) > 1:  # between tokens of JSON there may be spaces, or none
            single = [token for token in single if token not in self._spaces] or single
        if self._quote in single and len(single) > IN_TEXT:
            single = [self._quote, *single]
        few = np.flatnonzero(mask).tolist() if mask.sum() <= FEW else []
        special = [token for token in few if self._vocabulary.is_special_token(token) and token != self.end]
        return [[token] for token in (*single[: max(1, tried - len(special))], *special)][:tried]

    def _ending(self, way: Matcher) -> list[int]:
        """Returns the tokens of a named end, where the output is complete behind it; [] where it is behind none."""
        for name, _ in way.get_captures()[:MOST_ENDS]:
            path = self._path_of(name.removeprefix(END)) if name.startswith(END) else []
            if path and (behind := way.deep_copy()).try_consume_tokens(path) == len(path) and behind.is_accepting():
                return path
        return []

    def _path_of(self, end: str) -> list[int]:
        """Returns the tokens of a named end; [] where the vocabulary has not all of them, as a client may name any."""
        parts = enumerate(TOKEN_ID.split(end))
        path = [i for n, part in parts for i in ([int(part)] if n % 2 else map(self._byte, part.encode()))]
        return path if all(0 <= token < self._vocabulary.vocab_size for token in path) else []

    def _byte(self, byte: int) -> int:
        return self._single.get(byte, -1)

    def _only_way(self, way: Matcher, bits: bytes) -> list[int]:
        """Returns the bytes that must follow as each is the only one; [] for none. bits: the mask of the first."""
        run, ahead = list[int](), way
        while len(run) < MOST_RUN:
            following = np.frombuffer(bits, np.uint8, len(self._looked_at)) & self._looked_at
            places = np.flatnonzero(following)
            if len(places) != 1 or (last := int(following[places[0]])) & (last - 1) or ahead.is_accepting():
                break
            ahead = ahead if run else way.deep_copy()
            run.append(int(places[0]) * 8 + last.bit_length() - 1)
            if not ahead.consume_token(run[-1]):
                return []
            bits = ahead.compute_bitmask()
        return run

    def _shortened(self, matcher: Matcher, tokens: list[int]) -> list[int]:
        """Returns the same text in fewer tokens, where the model's tokenizer has such."""
        fewer = [token for run in self._runs(tokens) for token in run]
        same = self._vocabulary.decode_bytes(fewer) == self._vocabulary.decode_bytes(tokens)
        if same and len(fewer) < len(tokens) and matcher.validate_tokens(fewer) == len(fewer):
            return fewer
        return tokens

    def _runs(self, tokens: list[int]) -> Iterator[list[int]]:
        """Yields runs of text in the tokenizer's own tokens, and special tokens as they are."""
        run = list[int]()
        for token in [*tokens, -1]:
            if token >= 0 and not self._vocabulary.is_special_token(token):
                run.append(token)
                continue
            if run:
                yield self._vocabulary.tokenize_bytes(self._vocabulary.decode_bytes(run))
                run = []
            if token >= 0:
                yield [token]


def tokens_of_bytes(vocabulary: Vocabulary) -> dict[int, int]:
    """Returns the token of each byte that has one of its own."""
    found = dict[int, int]()
    for byte in range(256):
        tokens = vocabulary.tokenize_bytes(bytes([byte]))
        if len(tokens) == 1 and vocabulary.decode_bytes(tokens) == bytes([byte]):
            found[byte] = tokens[0]
    if len(found) < 256:  # a tokenizer that begins each text with a space, as of SentencePiece, does not say them
        for token in range(vocabulary.vocab_size):
            if not vocabulary.is_special_token(token) and len(text := vocabulary.decode_bytes([token])) == 1:
                found[text[0]] = token  # of several the last one: llguidance allows no other
    return found
