"""Tokenizers of models that have a SentencePiece tokenizer.model and no tokenizer.json.

The sentencepiece library itself encodes and decodes (Kudo and Richardson, 2018). It is the program that the model was
trained with, whatever its normalizer, algorithm and treatment of unknown characters. Added tokens, beginning and end of
a text are put around it as transformers 5 does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from model.errors import CheckpointError
from model.fields import Fields
from model.files import read_file
from model.inputs.added_tokens import Cutter, read_added_tokens, read_tokenizer_config
from model.inputs.tokenizer import Tokenizer, failure_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

FILE = "tokenizer.model"
SPACE = "\u2581"  # a space in pieces
CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of transformers that keep the model's ids. Others shift them (XLM-RoBERTa) or add to a text (T5)."""


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.model. Safe to use from several threads."""

    def __init__(
        self,
        start: SentencePieceProcessor,
        later: SentencePieceProcessor,
        tokens: dict[int, AddedToken],
        before: list[int],
        after: list[int],
    ) -> None:
        """Makes a tokenizer.

        Args:
            start: Encodes the beginning of a text.
            later: Encodes text after an added token. Only `start` may put a space before it.
            tokens: Added tokens by id.
            before: Ids before a text, where special tokens are asked for.
            after: Ids after a text, likewise.
        """
        self._start, self._later = start, later
        self._cutter = Cutter(tokens)
        self._before, self._after = before, after
        self._pieces: int = start.get_piece_size()
        self._bytes = frozenset()  # no byte stays open: each that is part of no character is a U+FFFD of its own
        self._special = {i for i, token in tokens.items() if token.special}
        self._added = {i: token.content for i, token in tokens.items()}
        self._own_text = {
            i: token.content.replace(SPACE, " ")
            for i, token in tokens.items()
            if token.special or i >= self._pieces or start.id_to_piece(i) != token.content
        }
        self._anchor = [start.unk_id()]
        self._anchor_text = start.decode_ids(self._anchor)

    @staticmethod
    def load(directory: Path) -> "SentencePieceTokenizer":
        """Reads the tokenizer of a directory.

        Raises:
            CheckpointError: A file cannot be read, or asks for something that is not supported.
        """
        path, config = directory / FILE, read_tokenizer_config(directory)
        name = config.get("tokenizer_class", str, CLASSES[0])
        if name.removesuffix("Fast") not in CLASSES:
            raise config.refuse("tokenizer_class", f"which is not supported without tokenizer.json (beside {FILE})")
        data = read_file(path)
        try:
            if "add_prefix_space" in config:
                data += _prefix(config.flag("add_prefix_space"))
            start = _processor(data)
            later = start if config.flag("legacy") else _processor(data + _prefix(False))
            own = _own_tokens(start)
        except (RuntimeError, UnicodeDecodeError) as error:  # RuntimeError is the library's
            raise CheckpointError(f"{path} cannot be read as a SentencePiece model: {error}") from None
        tokens = read_added_tokens(config, start.get_piece_size(), own, lambda text: _find(start, text))
        ids = {token.content: i for i, token in tokens.items()}
        before = _around(config, "bos_token", start.bos_id(), ids)
        return SentencePieceTokenizer(start, later, tokens, before, _around(config, "eos_token", start.eos_id(), ids))

    def text_of(self, token: int) -> str | None:
        if token in self._added:
            return self._added[token]
        return str(self._start.id_to_piece(token)) if 0 <= token < self._pieces else None

    def vocabulary(self, width: int, ends: Sequence[int]) -> "LLTokenizer":
        from llguidance import LLTokenizer

        return LLTokenizer(_Bytes(self, width, ends), eos_token=list(ends))  # type: ignore[arg-type] # duck-typed

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes that a token adds to a text."""
        if token in self._added:
            return self._own_text.get(token, self._added[token].replace(SPACE, " ")).encode()
        piece: str = self._start.id_to_piece(token)
        return bytes([int(piece[3:5], 16)]) if self._start.is_byte(token) else piece.replace(SPACE, " ").encode()

    @property
    def size(self) -> int:
        """The number of token ids."""
        return max(self._pieces, *(i + 1 for i in self._added))

    @property
    def special(self) -> frozenset[int]:
        """Special tokens, and ids that no token has."""
        unused = (i for i in range(self._pieces) if self._start.is_unused(i))
        gaps = (i for i in range(self._pieces, self.size) if i not in self._added)
        return frozenset((*self._special, *unused, *gaps))

    @property
    def marker_texts(self) -> dict[int, str]:
        return {i: text for i in self.special if (text := self.text_of(i))}  # `_Bytes` says which tokens are special

    def expressions(self) -> set[str]:
        return set()

    def longest_replacement(self) -> int:
        return 0  # the library does not say

    def split(self, text: str) -> int:
        return len(text)  # the library does that and what follows in one

    def longest_text(self) -> int:
        pieces: list[str] = self._start.id_to_piece(list(range(self._pieces)))
        return max(map(len, [*pieces, *self._added.values()]))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library releases the interpreter lock: 1.1 MB took 356 ms, another thread waited for at most 10 of them.
        ids: list[int] = []
        try:
            for n, part in enumerate(self._cutter.cut(text)):
                if isinstance(part, int):
                    ids.append(part)
                else:
                    ids += (self._later if n else self._start).encode_as_ids(part)
        except BaseException as error:
            raise failure_of(error, "encode this text") from None
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text, run = "", []
        first = True
        for i in ids:
            own = self._own_text.get(i)
            if own is None:
                if 0 <= i < self._pieces:
                    run.append(i)
            elif not (skip_special_tokens and i in self._special):
                text += self._run(run, first) + own
                run, first = [], False
        return text + self._run(run, first)

    def decode_all(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.decode(ids, skip_special_tokens)

    def _run(self, ids: list[int], first: bool) -> str:
        """Decodes a run of pieces.

        The library strips spaces at the beginning of what it decodes, which is right at the beginning of a text only.
        So a later run is decoded behind an anchor, whose text is cut off again.
        """
        if first or not ids:
            text: str = self._start.decode_ids(ids)
            return text
        text = self._start.decode_ids(self._anchor + ids)
        return text[len(self._anchor_text) :]


LINE = "\n"  # begins a text whose tokens are to be those of one within another


class _Bytes:
    """The tokens of a tokenizer in the form that `LLTokenizer` takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: SentencePieceTokenizer, width: int, ends: Sequence[int]) -> None:
        # An end token ends the output wherever it is drawn, so it is no text either.
        special = tokenizer.special.union(ends, range(tokenizer.size, width))
        self._tokenizer, self.eos_token_id, self.special_token_ids = tokenizer, ends[0], sorted(special)
        self.tokens = [
            f"<special {i}>".encode() if i in special else tokenizer.bytes_of(i)
            for i in range(max(width, tokenizer.size))
        ]

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows other text: without the space that may begin a text of its own."""
        ids = self._tokenizer.encode(LINE + text, add_special_tokens=False)
        for count in range(1, len(ids) + 1):
            if b"".join(self.tokens[i] for i in ids[:count]).endswith(LINE.encode()):
                rest = ids[count:]
                return rest if b"".join(self.tokens[i] for i in rest) == text.encode() else []
        return []


def _processor(data: bytes) -> SentencePieceProcessor:
    """Loads a model.

    Raises:
        RuntimeError: The bytes are no model.
        UnicodeDecodeError: A piece or its text is no UTF-8.
    """
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(data)
    processor.id_to_piece(list(range(processor.get_piece_size())))
    processor.decode_ids([processor.unk_id()])
    return processor


def _prefix(add: bool) -> bytes:
    """Returns bytes that set, appended to a model, whether a text gets a space in front.

    protobuf merges messages that follow one another. ModelProto.normalizer_spec is field 3, its add_dummy_prefix is
    field 3.
    """
    return b"\x1a\x02\x18\x01" if add else b"\x1a\x02\x18\x00"


def _own_tokens(processor: SentencePieceProcessor) -> dict[int, AddedToken]:
    """Returns pieces that no text has unless it names them: the unknown piece and control pieces."""
    ids = range(processor.get_piece_size())
    apart = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    return {i: AddedToken(processor.id_to_piece(i), special=True, normalized=False) for i in apart}


def _find(processor: SentencePieceProcessor, text: str) -> int | None:
    i = processor.piece_to_id(text)
    return i if processor.id_to_piece(i) == text else None


def _around(config: Fields, name: str, own: int, ids: dict[str, int]) -> list[int]:
    """Returns the ids at one end of a text, at most one.

    Args:
        config: The tokenizer's config.
        name: Name of the token, as bos_token.
        own: Id that the model gives it, -1 for none.
        ids: Ids of added tokens by text.
    """
    if not config.flag(f"add_{name}"):
        return []
    value = config.values.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if name in config.values:
        return [ids[text]] if isinstance(text, str) and text in ids else []
    return [own] if own >= 0 else []
