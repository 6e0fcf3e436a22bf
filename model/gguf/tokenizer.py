"""The tokenizer of a GGUF file, built from its metadata for the `tokenizers` library. Imports no torch."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from model.errors import CheckpointError, shown
from model.gguf.cutting import read_cutting
from model.gguf.metadata import Metadata
from model.gguf.reader import GGUFFile
from model.gguf.tokens import PREFIX, TOKENS, TokenType, read_types, role

KIND, MERGES, SCORES = f"{PREFIX}model", f"{PREFIX}merges", f"{PREFIX}scores"
SPACE = "\u2581"  # a space in pieces of SentencePiece
LONGEST_PIECE = 256  # characters; each way to cut one in two is looked at


def build_tokenizer(path: Path) -> Tokenizer:
    """Builds the tokenizer of a file.

    Raises:
        CheckpointError: The file is damaged, or its tokenizer is not served.
    """
    metadata = GGUFFile(path).metadata
    kind = metadata.fields.get(KIND, str)
    if kind not in BUILDERS:
        raise metadata.fields.refuse(KIND, f"which is not served; served are: {', '.join(BUILDERS)}")
    texts = metadata.texts(TOKENS)
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        twice = next(text for i, text in enumerate(texts) if ids[text] != i)
        raise CheckpointError(f"{path}: {TOKENS!r} has the token {shown(twice)} twice")
    try:
        return BUILDERS[kind](metadata, texts, ids)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception, as for a merge of unknown tokens
        raise CheckpointError(f"{path}: the tokenizer of its metadata cannot be built: {error}") from None


def special_tokens(path: Path) -> dict[str, str]:
    """Returns the texts of tokens with a role, by their names in chat templates. Raises CheckpointError."""
    metadata = GGUFFile(path).metadata
    texts = metadata.texts(TOKENS)
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    ids = {short: role(metadata, name, len(texts)) for name, short in roles.items()}
    return {f"{short}_token": texts[i] for short, i in ids.items() if i is not None}


def _byte_level(metadata: Metadata, texts: list[str], ids: dict[str, int]) -> Tokenizer:
    """Builds byte-level BPE (Radford et al., 2019)."""
    cutting = read_cutting(metadata.fields)
    merges = [tuple(merge.split(" ")) for merge in metadata.texts(MERGES)]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise CheckpointError(f"{metadata.path}: {MERGES!r} has {shown(' '.join(wrong[0]))}, must be pairs of tokens")
    library = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cutting.whole))  # type: ignore[arg-type]
    if (normalizer := cutting.normalizer()) is not None:
        library.normalizer = normalizer  # type: ignore[assignment]
    library.pre_tokenizer = cutting.pre_tokenizer()  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _finished(library, metadata, texts, cutting.begins)


def _sentence_pieces(metadata: Metadata, texts: list[str], ids: dict[str, int]) -> Tokenizer:
    """Builds BPE of SentencePiece (Kudo and Richardson, 2018), whose merges follow from the scores of the pieces."""
    scores, unknown = metadata.floats(SCORES), role(metadata, "unknown", len(texts))
    if len(scores) != len(texts):
        raise CheckpointError(f"{metadata.path}: {SCORES!r} has {len(scores)} elements for {len(texts)} tokens")
    if longest := [text for text in texts if len(text) > LONGEST_PIECE]:
        raise CheckpointError(
            f"{metadata.path}: {TOKENS!r} has {shown(longest[0])}, may have {LONGEST_PIECE} characters"
        )
    unknown_text = None if unknown is None else texts[unknown]
    library = Tokenizer(
        models.BPE(vocab=ids, merges=_merges(ids, scores), unk_token=unknown_text, fuse_unk=True, byte_fallback=True)
    )
    prefixed = metadata.fields.flag(f"{PREFIX}add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if prefixed else []
    library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])  # type: ignore[assignment]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    library.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finished(library, metadata, texts, begins=True)


def _gemma4(metadata: Metadata, texts: list[str], ids: dict[str, int]) -> Tokenizer:
    """Builds Gemma 4's BPE over characters, whose merges are in the file. A text is not cut before it."""
    merges = []
    for merge in metadata.texts(MERGES):
        place = merge.find(" ", 1)  # the first token may begin with the space between them
        if place < 0:
            raise CheckpointError(f"{metadata.path}: {MERGES!r} has {shown(merge)}, must be pairs of tokens")
        merges.append((merge[:place], merge[place + 1 :]))
    unknown = role(metadata, "unknown", len(texts))
    library = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Replace(" ", SPACE)  # type: ignore[assignment]
    library.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _finished(library, metadata, texts, begins=True)


def _merges(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that make a piece, the piece with the highest score first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, i in ids.items():
        for end in range(1, len(text)):
            left, right = text[:end], text[end:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], (left, right)))
    found.sort()
    return [pair for *_, pair in found]


def _finished(library: Tokenizer, metadata: Metadata, texts: list[str], begins: bool) -> Tokenizer:
    """Adds what surrounds a text, and tokens that no text is cut inside."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    apart = (*special, TokenType.USER_DEFINED)
    kinds = zip(texts, read_types(metadata, len(texts)), strict=True)
    added = [AddedToken(text, special=kind in special, normalized=False) for text, kind in kinds if kind in apart]
    library.add_tokens(added)
    around = []
    for name, given in (("bos", begins), ("eos", False)):
        i = role(metadata, name, len(texts))
        asked = metadata.fields.flag(f"{PREFIX}add_{name}_token", given)
        around.append([] if i is None or not asked else [(texts[i], i)])
    before, after = around
    if before or after:
        single = [*(f"{text}:0" for text, _ in before), "$A:0", *(f"{text}:0" for text, _ in after)]
        library.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=single, special_tokens=[*before, *after]
        )
    return library


BUILDERS: dict[str, Callable[[Metadata, list[str], dict[str, int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "gemma4": _gemma4,
    "llama": _sentence_pieces,
}
"""By 'tokenizer.ggml.model'."""
