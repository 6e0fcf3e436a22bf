"""What structured output asks of a library of grammars: the state of an output, and the bytes of the model's tokens.

`llguidance.LLMatcher` and `llguidance.LLTokenizer` are such as they are. `model.inputs.with_xgrammar.matcher` has the
matcher of XGrammar. Masks, forced tokens and completions are made of these methods alone, so they work with both.
"""

from collections.abc import Sequence
from typing import Protocol, Self


class Matcher(Protocol):
    """A constraint behind the tokens of an output."""

    def deep_copy(self) -> Self:
        """Returns a matcher in the same state, which changes by itself."""
        ...

    def consume_token(self, token: int) -> bool:
        """Takes a token. Returns whether it may follow; where it may not, the matcher fails for good."""
        ...

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Takes tokens, as `consume_token` does."""
        ...

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Takes tokens up to the first that may not follow. Returns the number of those taken."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """Returns the number that `try_consume_tokens` would take. Changes nothing."""
        ...

    def compute_bitmask(self) -> bytes:
        """Returns which tokens may follow: a bit a token, the first token in the lowest bit of the first byte."""
        ...

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        """Writes that mask.

        Args:
            address: Address of words of 32 bits, which must outlive the call.
            size: Bytes there: 4 for each 32 tokens of the vocabulary or a part of them.
        """
        ...

    def is_accepting(self) -> bool:
        """Returns whether the output is complete, so that it may end here."""
        ...

    def is_stopped(self) -> bool:
        """Returns whether nothing but an end token may follow, or the matcher has failed."""
        ...

    def is_error(self) -> bool:
        """Returns whether the matcher has failed."""
        ...

    def get_error(self) -> str:
        """Returns why it has failed; "" where it has not."""
        ...

    def stop_reason(self) -> str:
        """Returns why nothing may follow, in a word."""
        ...

    def get_captures(self) -> list[tuple[str, bytes]]:
        """Returns the named parts of the output so far, each with its name. A grammar without names has none."""
        ...


class Vocabulary(Protocol):
    """The bytes of a model's tokens."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        ...

    @property
    def eos_token(self) -> int:
        """A token that ends an output."""
        ...

    @property
    def eos_tokens(self) -> Sequence[int]:
        """All such tokens."""
        ...

    def is_special_token(self, token: int) -> bool:
        """Returns whether no text is the token: its letters do not match it."""
        ...

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Returns the bytes of tokens."""
        ...

    def tokenize_bytes(self, text: bytes) -> list[int]:
        """Returns the tokens in which the model's tokenizer writes a text."""
        ...
