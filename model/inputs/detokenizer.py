"""Token ids to text as they come: whole characters only, and the parts together are the text of the whole.

The window of the last tokens is decoded again with each new one, since what a token reads as can depend on those before
it (byte pieces, spaces); the scheme of text-generation-inference. Text that ends in U+FFFD may be half a character and
is held until the next token settles it, or until `flush`; so is text whose end the tokenizer may read otherwise.
"""

from model.inputs.tokenizer import Tokenizer

UNSETTLED = "\ufffd"
LONGEST_WINDOW = 256  # tokens; text that is still unsettled then is given out as it is


class Detokenizer:
    """Law: the concatenation of all parts and `flush` equals `decode` of all ids.

    (But for output that stays unsettled over LONGEST_WINDOW tokens, whose decoding would cost more with each.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._told = 0  # tokens at the front of the window whose text was given out
        self._told_text = ""
        self._anchor: list[int] = []  # tokens told before, that read as something
        self._open = False

    def push(self, token: int) -> str:
        """New text that this token completes, maybe none."""
        self._window.append(token)
        self._open = self._tokenizer.stays_open(token, self._open, self._skip)
        text = self._decode(self._window)
        unsettled = self._open or text.endswith(UNSETTLED) or len(text) <= len(self._told_text)
        if unsettled and len(self._window) <= LONGEST_WINDOW:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held, with U+FFFD for bytes that never became a character."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        new = text[len(self._told_text) :]
        self._window = self._window[self._told :]
        self._told_text = self._decode(self._window)
        if self._told_text:
            self._anchor = self._window
        else:  # spaces alone, which a tokenizer may leave out where a text begins
            self._window = self._anchor + self._window
            self._told_text = self._decode(self._window)
        self._told = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
