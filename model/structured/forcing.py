"""Forced tokens: where a constraint leaves one text to go on with, the model's tokenizer says in which tokens.

A mask of such a place has one token, that with which the tokenizer begins the rest of the forced text. Else the model
might spell a name of a schema in letters, and no token but the last one were the only one. What is forced depends on
the constraint's state alone, so that it is the same whether a token is drawn or put in without a draw.

The end of a forced text is left to the model where a token goes on behind it, since the tokenizer might use that one.

Source: compressed finite state machines (SGLang: Zheng et al., NeurIPS 2024); forced tokens of llguidance, whose own
would follow a text without an end within one mask.
"""

import time

import numpy as np
from numpy.typing import NDArray

from model.inputs.completion import tokens_of_bytes
from model.inputs.matcher import Matcher, Vocabulary

LETTERS = b"ab"  # where both can follow no token is forced
AHEAD = 32  # bytes of forced text that are looked at for one token

Bits = NDArray[np.int32]
"""A mask, [ceil(vocabulary / 32)]: a bit a token."""


class Forcing:
    """Finds forced tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.words = (vocabulary.vocab_size + 31) // 32
        """Words of 32 bits in a mask."""
        self._byte = {token: bytes([byte]) for byte, token in tokens_of_bytes(vocabulary).items()}
        of_byte = {text: token for token, text in self._byte.items()}
        letters = [of_byte[bytes([letter])] for letter in LETTERS if bytes([letter]) in of_byte]
        self._letters = letters if len(letters) == len(LETTERS) else []
        ids = range(vocabulary.vocab_size)
        special = np.array([vocabulary.is_special_token(token) for token in ids], np.bool_)
        looked_at = special.copy()
        looked_at[list(self._byte)] = True
        bits = self._bits(looked_at)
        self._places = np.flatnonzero(bits)
        self._looked_at = bits[self._places]
        texts = [b"" if special[token] else vocabulary.decode_bytes([token]) for token in ids]
        # Any token that can follow is special, or begins with a byte that can.
        self._complete = {text[:1] for text in texts} <= {b"", *self._byte.values()}
        sizes = np.array([len(text) for text in texts])
        self._longer = [self._bits(sizes > size) for size in range(AHEAD + 1)]

    def _bits(self, tokens: NDArray[np.bool_]) -> Bits:
        padded = np.zeros(32 * self.words, np.bool_)
        padded[: len(tokens)] = tokens
        return np.packbits(padded, bitorder="little").view(np.int32)

    def mask(self, matcher: Matcher) -> Bits:
        """Computes which tokens may follow."""
        bits = np.empty(self.words, np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def is_free(self, matcher: Matcher) -> bool:
        """Returns whether no token is forced, as far as two letters tell: a thousandth of the work of a slow mask."""
        return bool(self._letters) and all(matcher.validate_tokens([letter]) == 1 for letter in self._letters)

    def tokens(self, matcher: Matcher, bits: Bits, most: int, until: float) -> list[int]:
        """Finds the tokens that must follow.

        Args:
            matcher: The constraint's state. It is not changed.
            bits: Its mask.
            most: Tokens that are looked for, at least 1.
            until: Processor time of this thread at which it must be done.

        Returns:
            Up to `most` tokens, each the only one behind those before it; fewer where that is not known of more.

        Raises:
            TimeoutError: Not even the first one was found by then.
        """
        only = self._only(bits)
        if only < 0 or not self._complete:
            return []
        if only not in self._byte:
            return [only]
        text, found, begin = _ForcedText(self, matcher, bits, until), list[int](), 0
        while len(found) < most:
            try:
                rest = text.reach(begin, begin + AHEAD)
            except TimeoutError:
                if found:
                    break
                raise
            if not rest:
                break
            token, here = self._first_of(rest), text.masks[begin]
            own = self._text_of(token) if token >= 0 else b""
            if not own or not self._has(here, token) or (here & self._longer[len(rest)]).any():
                break
            found.append(token)
            begin += len(own)
        return found

    def _first_of(self, text: bytes) -> int:
        """Returns the first token of a text; -1 where the tokenizer makes none, or sees another beginning in it.

        As those of SentencePiece may, which put a space before a text, or make no token of one at its end.
        """
        token = next(iter(self._vocabulary.tokenize_bytes(text)), -1)
        return token if token >= 0 and text.startswith(self._text_of(token)) else -1

    def _text_of(self, token: int) -> bytes:
        return self._vocabulary.decode_bytes([token])

    def _has(self, bits: Bits, token: int) -> bool:
        return bool(bits[token >> 5] >> (token & 31) & 1)

    def alone(self, token: int) -> Bits:
        """Returns the mask of one token."""
        bits = np.zeros(self.words, np.int32)
        bits[token >> 5] = np.uint32(1 << (token & 31)).view(np.int32)
        return bits

    def byte_of(self, bits: Bits) -> tuple[int, bytes]:
        """Returns the only token that can follow of those of one byte, and the byte; b"" where there is none."""
        only = self._only(bits)
        return only, self._byte.get(only, b"")

    def _only(self, bits: Bits) -> int:
        """Returns the one token of one byte, or special token, that can follow; -1 where there is none, or another."""
        seen = bits[self._places] & self._looked_at
        (where,) = seen.nonzero()
        if len(where) != 1:
            return -1
        word = int(seen[where[0]]) & 0xFFFFFFFF
        return -1 if word & (word - 1) else int(self._places[where[0]]) * 32 + word.bit_length() - 1


class _ForcedText:
    """The bytes that must follow, as far as they were looked for, and the mask in front of each and of what follows."""

    def __init__(self, forcing: Forcing, matcher: Matcher, bits: Bits, until: float) -> None:
        self._forcing, self._at, self._until = forcing, matcher.deep_copy(), until
        self._text, self.masks = bytearray(), [bits]

    def reach(self, begin: int, end: int) -> bytes:
        """Returns the text from `begin` to `end`, or to where more than one byte can follow."""
        while len(self._text) < end:
            token, byte = self._forcing.byte_of(self.masks[-1])
            if not byte or not self._at.consume_token(token):
                break
            if time.thread_time() > self._until:
                raise TimeoutError
            self._text += byte
            self.masks.append(self._forcing.mask(self._at))
        return bytes(self._text[begin:end])
