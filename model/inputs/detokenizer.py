"""Decodes token ids as they come. Only whole characters are given out.

The window of the last tokens is decoded again with each new one, since a token's text can depend on tokens before it
(byte pieces, spaces); the scheme of text-generation-inference. Text that ends in U+FFFD may be half a character. It is
held until the next token settles it, or until `flush`. So is text whose end the tokenizer may read otherwise.
"""

from model.inputs.tokenizer import Tokenizer

UNSETTLED = "\ufffd"
LONGEST_WINDOW = 256  # tokens; text that is still unsettled then is given out as it is


class Detokenizer:
    """Decodes a sequence's ids one by one.

    Law: the concatenation of all parts and `flush` equals `decode` of all ids, or `decode_behind`. The exception is
    output that stays unsettled over LONGEST_WINDOW tokens, whose decoding would cost more with each.

    Args:
        tokenizer: Tokenizer of the model.
        skip_special_tokens: Special tokens have no text.
        behind: The output follows other text, so that a space at its beginning is its own.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, behind: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._anchor = tokenizer.anchor if behind else []  # the last tokens before the window whose text is not empty
        self._window = list(self._anchor)
        self._emitted = len(self._window)  # tokens at the front of the window whose text was given out
        self._emitted_text = self._decode(self._window)
        self._open = False

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
