"""The model's tokenizer as a script uses it."""

from collections.abc import Sequence

from model.inputs.tokenizer import Tokenizer


class TextTokenizer:
    """Text to token ids and back, with the defaults of transformers. Remains usable after the `LLM` is closed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids that `LLM.generate` makes of a text; without special tokens those of a text in the middle."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text. Bytes that form no character become U+FFFD."""
        return self._tokenizer.decode_all([int(token) for token in token_ids], skip_special_tokens)
