"""The tokenizer that `LLM.get_tokenizer` returns."""

from collections.abc import Sequence

from model.inputs.tokenizer import Tokenizer


class TextTokenizer:
    """Text to token ids and back, with the defaults of transformers. Remains usable after the `LLM` is closed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        With special tokens they are those of the prompt that `LLM.generate` makes of the text.
        """
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids. Bytes that form no character become U+FFFD."""
        return self._tokenizer.decode_all([int(token) for token in token_ids], skip_special_tokens)
