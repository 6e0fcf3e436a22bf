"""The model's tokenizer: text to ids and back, through the `tokenizers` library, or through `sentencepiece` where the
model has no tokenizer.json.
"""

from pathlib import Path

from tokenizers import Tokenizer as Library

from model.errors import CheckpointError


class Tokenizer:
    """tokenizer.json of a model directory. Safe to use from several threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._bytes = _byte_ids(library)
        self._special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}

    @staticmethod
    def load(directory: Path) -> "Tokenizer":
        """tokenizer.json if there is one, else tokenizer.model. Raises CheckpointError where neither can be read."""
        path = directory / "tokenizer.json"
        if not path.exists():
            if not (directory / "tokenizer.model").exists():
                raise CheckpointError(f"{path} is missing, and so is tokenizer.model: a model is served with its own")
            from model.inputs.sentence_pieces import SentencePieceTokenizer  # of no use to most models

            return SentencePieceTokenizer.load(directory)
        try:
            return Tokenizer(Library.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def stays_open(self, token: int, was_open: bool, skip_special_tokens: bool) -> bool:
        """Whether text that ends with this token can read otherwise once another follows: tokenizers that fall back to
        bytes take neighbouring ones together, and if they are no UTF-8, none of them is a character any more.

        was_open: whether that was so before it.
        """
        return token in self._bytes or (was_open and skip_special_tokens and token in self._special)

    def text_of(self, token: int) -> str | None:
        """The token that has this id, None where none has."""
        text: str | None = self._library.id_to_token(token)
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the interpreter lock all the while (8 s for 4 MB), the batch call lets it go.
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Bytes that form no character become U+FFFD; ids that the tokenizer does not know are left out."""
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_all(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The same for many ids: other threads run meanwhile."""
        # 131,072 ids held the interpreter lock for 41 ms in `decode`, this for 1.4 ms.
        text: str = self._library.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text


def _byte_ids(library: Library) -> frozenset[int]:
    """Ids that stand for one byte each, of a tokenizer that falls back to bytes (as SentencePiece's do)."""
    if library.decoder is None or b'"ByteFallback"' not in library.decoder.__getstate__():
        return frozenset()
    ids = (library.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)
