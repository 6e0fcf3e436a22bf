"""Token ids to text as they come: whole characters only, and the parts together are the text of the whole.

The window of the last tokens is decoded again with each new one, since what a token reads as can depend on those before
it (byte pieces, spaces); the scheme of text-generation-inference. Text that ends in U+FFFD may be half a character and
is held until the next token settles it, or until `flush`.
"""

from model.inputs.tokenizer import Tokenizer

UNSETTLED = "\ufffd"


class Detokenizer:
    """Law, for byte-level tokenizers: the concatenation of all parts and `flush` equals `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._told = 0  # tokens at the front of the window whose text was given out

    def push(self, token: int) -> str:
        """New text that this token completes, maybe none."""
        self._window.append(token)
        before, after = self._texts()
        if after.endswith(UNSETTLED) or len(after) <= len(before):
            return ""
        self._window, self._told = self._window[self._told :], len(self._window) - self._told
        return after[len(before) :]

    def flush(self) -> str:
        """What was held, with U+FFFD for bytes that never became a character."""
        before, after = self._texts()
        self._told = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._window[: self._told], self._skip), decode(self._window, self._skip)
