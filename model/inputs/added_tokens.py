"""Reads added tokens, which stand beside a model's pieces, and finds them in texts.

tokenizer_config.json, special_tokens_map.json and added_tokens.json are read as transformers 5 reads them, with one
exception: an id that a file gives to a token is its id. transformers counts on from the end of the vocabulary instead.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from model.errors import CheckpointError, shown
from model.fields import Fields, read_json

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LARGEST_ID = 2**22  # largest id of a token; no vocabulary has more
FIRST_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("extra_special_tokens", "additional_special_tokens")


def read_tokenizer_config(directory: Path) -> Fields:
    """Reads tokenizer_config.json; empty fields where no file exists.

    special_tokens_map.json is merged in where the config does not list the added tokens itself.

    Raises:
        CheckpointError: A file cannot be read.
    """
    path, names = directory / CONFIG, directory / NAMES
    values = read_json(path) if path.exists() else {}
    if "added_tokens_decoder" not in values and names.exists():
        values = values | read_json(names)
    return Fields(path, values)


def read_added_tokens(
    config: Fields, pieces: int, own: dict[int, AddedToken], find: Callable[[str], int | None]
) -> dict[int, AddedToken]:
    """Reads the added tokens by id. All that have a role (as the beginning) are special.

    Args:
        config: Fields of `read_tokenizer_config`.
        pieces: The number of the model's pieces.
        own: Pieces of the model that are added tokens.
        find: Returns the id of a piece, None for an unknown one.

    Raises:
        CheckpointError: A file is malformed, or an id contradicts tokenizer.model.
    """
    special = {token.content: token for token in _special(config)}
    tokens = dict(own)
    for i, token in sorted(_listed(config).items()):
        piece = find(token.content)
        if piece not in (None, i):
            raise CheckpointError(
                f"{config.path.parent}: the added token {shown(token.content)} has id {i} there, but id {piece} in "
                "tokenizer.model. Do the files belong together?"
            )
        token.special |= token.content in special or (i in own and own[i].special)
        tokens[i] = token
    known = {token.content for token in tokens.values()}
    for text, token in special.items():
        if text not in known:
            piece = find(text)
            tokens[max(pieces - 1, *tokens) + 1 if piece is None else piece] = token
    return tokens


def _listed(config: Fields) -> dict[int, AddedToken]:
    """Reads the added tokens that a file gives an id."""
    if "added_tokens_decoder" in config:
        section = config.section("added_tokens_decoder")
        if not all(key.isdecimal() and len(key) <= len(str(LARGEST_ID)) for key in section.values):
            raise CheckpointError(f"{config.path}: 'added_tokens_decoder' must have ids as keys, below {LARGEST_ID}")
        return {int(key): _token(value, section.path, special=False) for key, value in section.values.items()}
    path = config.path.parent / ADDED
    values = read_json(path) if path.exists() else {}
    for text, i in values.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < LARGEST_ID:
            raise CheckpointError(f"{path}: {shown(text)} is {shown(i)}, must be an id below {LARGEST_ID}")
    return {i: _token(text, path, special=False) for text, i in values.items()}


def _special(config: Fields) -> Iterator[AddedToken]:
    """Yields tokens with a role of their own, then tokens that are only called special."""
    values = config.values
    others = [name for name in values if name.endswith("_token") and name not in FIRST_NAMES]
    for name in (*FIRST_NAMES, *others):
        if isinstance(values.get(name), str | dict) and values[name]:
            yield _token(values[name], config.path, special=True)
    more: Any = next((values[key] for key in EXTRA if values.get(key)), [])
    for value in more.values() if isinstance(more, dict) else more:
        yield _token(value, config.path, special=True)


def _token(value: Any, path: Path, special: bool) -> AddedToken:
    flags = value if isinstance(value, dict) else {"content": value}
    if not isinstance(flags.get("content"), str) or not flags["content"]:
        raise CheckpointError(f"{path}: {shown(value)} is no token: must be text, or an object with its 'content'")
    special = special or flags.get("special") is True
    return AddedToken(
        flags["content"],
        single_word=flags.get("single_word") is True,
        lstrip=flags.get("lstrip") is True,
        rstrip=flags.get("rstrip") is True,
        normalized=flags.get("normalized", not special) is True,
        special=special,
    )


class Cutter:
    """Cuts texts at added tokens, by the rules of the `tokenizers` library.

    These are: the longest token first, spaces that a token strips, tokens that must be whole words. The library does
    the cutting. Its model here takes each stretch between added tokens for one unknown word.
    """

    BETWEEN = 0

    def __init__(self, tokens: dict[int, AddedToken]) -> None:
        self._library = Tokenizer(models.WordLevel({"": self.BETWEEN}, unk_token=""))
        self._library.add_tokens(list(tokens.values()))
        self._ids = {self._library.token_to_id(token.content): i for i, token in tokens.items()}

    def cut(self, text: str) -> Iterator[str | int]:
        """Yields stretches of text, none of them empty, and the ids of the tokens between them."""
        # The batch call releases the interpreter lock.
        found = self._library.encode_batch([text], add_special_tokens=False)[0]
        ids: Sequence[int] = found.ids
        for i, (start, end) in zip(ids, found.offsets, strict=True):
            yield text[start:end] if i == self.BETWEEN else self._ids[i]
