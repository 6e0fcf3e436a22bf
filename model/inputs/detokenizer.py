"""Decodes token ids as they come. Only whole characters are given out.

The window of the last tokens is decoded again with each new one, since a token's text can depend on tokens before it
(byte pieces, spaces); the scheme of text-generation-inference. Text that ends in U+FFFD may be half a character. It is
held until the next token settles it, or until `flush`. So is text whose end the tokenizer may read otherwise.
"""

from collections.abc import Sequence

from model.inputs.tokenizer import Tokenizer

UNSETTLED = "\ufffd"
LONGEST_WINDOW = 256  # tokens; text that is still unsettled then is given out as it is
ANCHOR_SEARCH = 64  # last tokens of the text before, among which one with text of its own is looked for


class Detokenizer:
    """Decodes a sequence's ids one by one.

    Law: the concatenation of all parts and `flush` equals what `decode` of all ids adds to the text before them. The
    exception is output that stays unsettled over LONGEST_WINDOW tokens, whose decoding would cost more with each.

    Args:
        tokenizer: Tokenizer of the model.
        skip_special_tokens: Special tokens have no text.
        before: Tokens whose text the output goes on from, such as a prompt; only the last are read. Some tokenizers
            strip a space at the beginning of a text: behind other text it is no beginning, and the space stays.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._anchor = self._find_anchor(before)  # the last tokens before the window whose text is not empty
        self._window = list(self._anchor)
        self._emitted = len(self._window)  # tokens at the front of the window whose text was given out
        self._emitted_text = self._decode(self._window)
        self._open = False

    def _find_anchor(self, before: Sequence[int]) -> list[int]:
        """Returns the last token that has whole characters whatever comes behind it, in a list; empty without one."""
        for token in before[: -ANCHOR_SEARCH - 1 : -1]:
            text = self._tokenizer.decode([token], True)
            if text.strip() and UNSETTLED not in text and not self._tokenizer.stays_open(token, False, True):
                return [token]
        return []

    def push(self, token: int) -> str:
        """Returns new text that this token completes, maybe none."""
        self._window.append(token)
        self._open = self._tokenizer.stays_open(token, self._open, self._skip)
        text = self._decode(self._window)
        unsettled = self._open or text.endswith(UNSETTLED) or len(text) <= len(self._emitted_text)
        if unsettled and len(self._window) <= LONGEST_WINDOW:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """Returns the text that was held, with U+FFFD for bytes that never became a character."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted_text = self._decode(self._window)
        if self._emitted_text:
            self._anchor = self._window
        else:  # spaces alone, which a tokenizer may strip at the beginning of a text
            self._window = self._anchor + self._window
            self._emitted_text = self._decode(self._window)
        self._emitted = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
