"""Tokenizers of tokenizer.json: text to ids and back, through the `tokenizers` library."""

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import PreTokenizedString
from tokenizers import Tokenizer as Library

from model.errors import CheckpointError, named
from model.files import read_file
from model.inputs.added_tokens import LARGEST_ID

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenizerFailed(Exception):
    """The model's tokenizer fails on a text or on ids. Says why.

    Attributes:
        panicked: Whether the library's own code panicked, where it should have reported an error.
    """

    def __init__(self, message: str, panicked: bool) -> None:
        super().__init__(message)
        self.panicked = panicked


def failure_of(error: BaseException, action: str) -> BaseException:
    """Returns TokenizerFailed for an error of the library, and any other error itself.

    The library raises bare Exception. A panic of its Rust code raises PanicException, which is no Exception: it would
    pass every handler of a server and end the thread.
    """
    panicked = type(error).__name__ == "PanicException"
    if panicked or isinstance(error, Exception):
        return TokenizerFailed(f"the model's tokenizer cannot {action}: {named(str(error))}", panicked)
    return error


class Tokenizer:
    """Tokenizer of a model directory's tokenizer.json. Safe to use from several threads.

    The file is a program: `model.inputs.trial` tries it before a server uses it.
    """

    def __init__(self, library: Library) -> None:
        """Wraps a tokenizer of the library, and takes its padding and truncation away: both are for training."""
        library.no_padding()
        library.no_truncation()
        self._library = library
        self._bytes = _byte_ids(library)
        self._special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}

    @staticmethod
    def of_file(path: Path) -> "Tokenizer":
        """Reads a tokenizer.json.

        Raises:
            CheckpointError: The file cannot be read.
        """
        content = read_file(path)
        try:
            return Tokenizer(Library.from_buffer(content))
        except BaseException as error:
            failure = failure_of(error, "be read")
            if isinstance(failure, TokenizerFailed):
                failure = CheckpointError(f"{path} cannot be read: {error}")
            raise failure from None

    def vocabulary(self, width: int, ends: Sequence[int]) -> "LLTokenizer":
        """Returns the bytes of all tokens as llguidance reads them, whose errors pass.

        Args:
            width: Width of the logits. A tokenizer may have more tokens or fewer.
            ends: Tokens that end a text.

        Raises:
            CheckpointError: A token's id is too large.
        """
        from llguidance import LLTokenizer  # a frontend's tokenizer needs it not

        most = max(width, *(i + 1 for i in self._library.get_vocab().values()))
        if most > LARGEST_ID:
            raise CheckpointError(f"a token has id {most - 1}, must be below {LARGEST_ID}")
        return LLTokenizer(self._library.to_str(), n_vocab=most, eos_token=list(ends))

    @property
    def marker_texts(self) -> dict[int, str]:
        """Texts by id of the tokens that a grammar has to name, as their letters do not match them.

        llguidance takes added tokens of the form <...> for special ones too, such as Qwen's <tool_call>.
        """
        added = self._library.get_added_tokens_decoder().items()
        return {
            i: token.content
            for i, token in added
            if token.content and (token.special or (token.content[0] == "<" and token.content[-1] == ">"))
        }

    def expressions(self) -> set[str]:
        """Returns all patterns of the tokenizer: regular expressions, and texts that it replaces."""
        library = self._library
        parts = (part for part in (library.normalizer, library.pre_tokenizer, library.decoder) if part is not None)
        found = (_values(json.loads(part.__getstate__()), ("Regex", "String")) for part in parts)
        return {text for texts in found for text in texts}

    def longest_replacement(self) -> int:
        """Returns the most bytes that replace one character in the normalizer's map, as SentencePiece compiles it."""
        if (normalizer := self._library.normalizer) is None:
            return 0
        maps = _values(json.loads(normalizer.__getstate__()), ("precompiled_charsmap",))
        return max((_longest_text(b64decode(text)) for text in maps), default=0)

    def split(self, text: str) -> int:
        """Normalizes and cuts a text, the work that comes before the model.

        Returns:
            Characters of the normalized text.

        Raises:
            TokenizerFailed: See `encode`.
        """
        try:
            normalizer, cutter = self._library.normalizer, self._library.pre_tokenizer
            text = text if normalizer is None else normalizer.normalize_str(text)
            if cutter is not None:
                cutter.pre_tokenize(PreTokenizedString(text))
        except BaseException as error:
            raise failure_of(error, "cut this text") from None
        return len(text)

    def longest_text(self) -> int:
        """Returns the characters of the longest token."""
        return max(map(len, self._library.get_vocab()), default=0)

    def stays_open(self, token: int, was_open: bool, skip_special_tokens: bool) -> bool:
        """Returns whether text that ends with this token may read otherwise once another follows.

        Tokenizers that fall back to bytes take neighbouring bytes together. If these are no UTF-8, none of them is a
        character any more.

        Args:
            token: The last token.
            was_open: Whether the text before it was open.
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        return token in self._bytes or (was_open and skip_special_tokens and token in self._special)

    def text_of(self, token: int) -> str | None:
        """Returns the token of this id, None for an unknown id."""
        if not 0 <= token < 2**32:  # the library takes 32-bit ids alone
            return None
        text: str | None = self._library.id_to_token(token)
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes a text.

        Raises:
            TokenizerFailed: The library fails, as for an unknown character without an unknown token.
        """
        try:
            # `encode` holds the interpreter lock throughout (8 s for 4 MB), the batch call releases it.
            ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise failure_of(error, "encode this text") from None
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes ids. Bytes that form no character become U+FFFD; unknown ids are left out.

        Raises:
            TokenizerFailed: The library fails.
        """
        try:
            text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise failure_of(error, "decode these ids") from None
        return text

    @cached_property
    def anchor(self) -> list[int]:
        """Ids of a text behind which others are decoded as parts of one text; empty where the tokenizer has none."""
        try:
            ids = self.encode("a", add_special_tokens=False)[-1:]
            whole = self.decode(ids, True).strip() and not self.stays_open(ids[-1], False, True)
        except TokenizerFailed:
            return []
        return ids if whole else []

    def decode_behind(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes ids as `decode` does, but as a text that follows other text.

        Some tokenizers strip a space at the beginning of a text, which there is none.
        """
        before = self.decode(self.anchor, skip_special_tokens)
        return self.decode(self.anchor + ids, skip_special_tokens)[len(before) :]

    def decode_all(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes many ids as `decode` does; other threads run meanwhile."""
        try:
            # For 131,072 ids `decode` held the interpreter lock for 41 ms, the batch call for 1.4 ms.
            text: str = self._library.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as error:
            raise failure_of(error, "decode these ids") from None
        return text


def _longest_text(compiled: bytes) -> int:
    """Returns the bytes of the longest text in a compiled map of characters.

    The map is the size of a trie, the trie, then texts that each end with a 0.
    """
    texts = compiled[4 + int.from_bytes(compiled[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _values(part: Any, keys: Sequence[str]) -> Iterator[str]:
    """Yields the texts under these keys in a part of a tokenizer.json, and in its inner parts."""
    if isinstance(part, dict):
        yield from (part[key] for key in keys if isinstance(part.get(key), str))
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _values(inner, keys)


def _byte_ids(library: Library) -> frozenset[int]:
    """Returns the ids that stand for one byte each, in a tokenizer that falls back to bytes (as SentencePiece's do)."""
    if library.decoder is None or b'"ByteFallback"' not in library.decoder.__getstate__():
        return frozenset()
    ids = (library.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
