"""Tokens of a GGUF file with a role: those that end a text. Imports no torch."""

from enum import IntEnum

from model.errors import CheckpointError
from model.gguf.metadata import Metadata

PREFIX = "tokenizer.ggml."
TOKENS, TYPES = f"{PREFIX}tokens", f"{PREFIX}token_type"

ENDS = ("eos", "eot", "eom")
MESSAGE_END, HARMONY = "<|end|>", frozenset({"<|return|>", "<|call|>"})
END_TEXTS = HARMONY | {
    "<|eot_id|>", "<|im_end|>", MESSAGE_END, "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "[EOT]", "[EOS]", "[e~[", "<turn|>",
}  # fmt: skip
"""Control tokens that end a turn, whatever the metadata says: llama.cpp ends a text at them too."""


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def role(metadata: Metadata, name: str, tokens: int) -> int | None:
    """Returns the id of a token with a role, as bos; None where there is none. Raises CheckpointError."""
    key = f"{PREFIX}{name}_token_id"
    if key not in metadata.fields:
        return None
    value = metadata.fields.values[key]
    if value == 2**32 - 1:  # how some files write that there is none
        return None
    value = metadata.fields.get(key, int)
    if not 0 <= value < tokens:
        raise metadata.fields.refuse(key, f"must be the id of one of {tokens} tokens")
    return value


def read_types(metadata: Metadata, tokens: int) -> list[int]:
    """Returns the type of each token. Raises CheckpointError."""
    if TYPES not in metadata:
        return [TokenType.NORMAL] * tokens
    types = metadata.integers(TYPES)
    if len(types) != tokens:
        raise CheckpointError(f"{metadata.path}: {TYPES!r} has {len(types)} elements for {tokens} tokens")
    return types


def end_tokens(metadata: Metadata, vocabulary: int) -> list[int]:
    """Returns the ids that end a text. Raises CheckpointError."""
    found = {i for name in ENDS if (i := role(metadata, name, vocabulary)) is not None}
    if TOKENS in metadata and TYPES in metadata:
        texts = metadata.texts(TOKENS)
        types = read_types(metadata, len(texts))
        controls = (i for i, kind in enumerate(types) if kind == TokenType.CONTROL and i < vocabulary)
        ends = {texts[i]: i for i in controls if texts[i] in END_TEXTS}
        found |= set(ends.values())
        if ends.keys() >= HARMONY:  # gpt-oss: a turn has several messages
            found.discard(ends.get(MESSAGE_END, -1))
    return sorted(found)
