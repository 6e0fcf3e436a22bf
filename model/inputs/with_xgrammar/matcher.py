"""XGrammar's matcher in the form of `model.inputs.matcher.Matcher`.

XGrammar (Dong et al., 2024) computes which tokens may follow most states of a grammar when it compiles it, for the
whole vocabulary. So its masks are quick, and its grammars take long to compile.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import xgrammar
from numpy.typing import NDArray

from model.inputs.matcher import Vocabulary

REFUSED = "Refused"  # reasons why nothing may follow
COMPLETE = "Complete"
NOT_STOPPED = "NotStopped"


class XGrammarMatcher:
    """A constraint behind the tokens of an output. Its mask is computed once for each state."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, ends: NDArray[np.int32], read: NDArray[np.int32]) -> None:
        """Wraps a matcher of the library.

        Args:
            matcher: The matcher.
            ends: [ceil(vocabulary / 32)]. Mask of the end tokens.
            read: [ceil(vocabulary / 32)]. Mask of these and of all tokens with a text.
        """
        self._matcher, self._ends, self._read = matcher, ends, read
        self._bits: NDArray[np.int32] | None = None  # mask of this state, where it was asked for
        self._error = ""

    def deep_copy(self) -> Self:
        """Returns a matcher in the same state, which changes by itself."""
        copied = type(self)(self._matcher.fork(), self._ends, self._read)
        copied._bits, copied._error = self._bits, self._error  # masks are not changed, so two states may share one
        return copied

    def consume_token(self, token: int) -> bool:
        """Takes a token. Returns whether it may follow; where it may not, the matcher fails for good."""
        if not self._take(token):
            self._error = self._error or f"token {token} may not follow"
            self._bits = None
            return False
        return True

    def _take(self, token: int) -> bool:
        # The library writes a warning for each token that comes behind the end, or that it has no text of.
        if self._error or not 0 <= token < 32 * len(self._ends) or not _has(self._read, token):
            return False
        if self._matcher.is_terminated():
            return _has(self._ends, token)
        if not self._matcher.accept_token(token):
            return False
        self._bits = None
        return True

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Takes tokens, as `consume_token` does."""
        return all(map(self.consume_token, tokens))

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """Takes tokens up to the first that may not follow. Returns the number of those taken."""
        return next((i for i, token in enumerate(tokens) if not self._take(token)), len(tokens))

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """Returns the number that `try_consume_tokens` would take. Changes nothing."""
        return self.deep_copy().try_consume_tokens(tokens)

    def compute_bitmask(self) -> bytes:
        """Returns which tokens may follow: a bit a token."""
        return self._mask().tobytes()

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        """Writes that mask to an address, `size` bytes of it."""
        ctypes.memmove(address, self._mask().ctypes.data, min(size, self._ends.nbytes))

    def _mask(self) -> NDArray[np.int32]:
        if self._bits is None:
            self._bits = self._computed()
        return self._bits

    def _computed(self) -> NDArray[np.int32]:
        if self._error:
            return np.zeros_like(self._ends)
        if self._matcher.is_terminated():
            return self._ends
        bits = np.zeros((1, len(self._ends)), np.int32)
        self._matcher.fill_next_token_bitmask(bits)
        return bits[0] & self._read  # the library allows ids behind the vocabulary's end

    def is_accepting(self) -> bool:
        """Returns whether the output is complete, so that it may end here."""
        return not self._error and (self._matcher.is_terminated() or self._matcher.is_completed())

    def is_stopped(self) -> bool:
        """Returns whether nothing but an end token may follow, or the matcher has failed."""
        if self._error:
            return True
        return self.is_accepting() and not (self._mask() & ~self._ends).any()

    def is_error(self) -> bool:
        """Returns whether the matcher has failed. One that lets nothing follow has."""
        return bool(self._error) or not self._mask().any()

    def get_error(self) -> str:
        """Returns why it has failed; "" where it has not."""
        return self._error or ("nothing may follow" if self.is_error() else "")

    def stop_reason(self) -> str:
        """Returns why nothing may follow, in a word."""
        if self.is_error():
            return REFUSED
        return COMPLETE if self.is_stopped() else NOT_STOPPED

    def get_captures(self) -> list[tuple[str, bytes]]:
        """Returns no named parts: these grammars name none."""
        return []


def _has(bits: NDArray[np.int32], token: int) -> bool:
    return bool(bits[token >> 5] >> (token & 31) & 1)


def _bits(tokens: Iterable[int], count: int) -> NDArray[np.int32]:
    """Returns the mask of some tokens. count: of the vocabulary."""
    bits = np.zeros(32 * ((count + 31) // 32), np.bool_)
    bits[[*tokens]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class XGrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Reads the vocabulary, whose special tokens have no text, so that no grammar allows them."""
        count, ends = vocabulary.vocab_size, [*vocabulary.eos_tokens]
        texts = [b"" if vocabulary.is_special_token(i) else vocabulary.decode_bytes([i]) for i in range(count)]
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=count, stop_token_ids=ends)
        # One thread, as steps of the engine have the others; what is compiled is cached above.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._ends = _bits(ends, count)
        self._read = _bits([*ends, *(i for i, text in enumerate(texts) if text)], count)

    def matcher(self, grammar: str) -> XGrammarMatcher:
        """Compiles a grammar. Returns a matcher at the start of an output.

        Args:
            grammar: Rules in XGrammar's form of EBNF, from `root`.

        Raises:
            RuntimeError: The library does not read it.
        """
        compiled = self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._ends, self._read)
