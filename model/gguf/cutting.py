"""Ways to cut texts before byte-level BPE, by the names that GGUF files have for them. Imports no torch.

Names and expressions are those of llama.cpp's src/llama-vocab.cpp; a normalization to NFC is that of the tokenizer on
the hub that a file of this name is made from.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from model.errors import MOST_SHOWN
from model.fields import Fields

KEY = "tokenizer.ggml.pre"

SUFFIXES = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"(?i:{SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"(?i:{SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LATER = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{LATER}"
GPT4O = rf"{BEFORE}{UPPER}*{LOWER}+(?i:{SUFFIXES})?|{BEFORE}{UPPER}+{LOWER}*(?i:{SUFFIXES})?|\p{{N}}{{1,3}}|{LATER}"


@dataclass(frozen=True, slots=True)
class Cutting:
    """A way to cut texts.

    Attributes:
        patterns: Expressions, each applied to the pieces that those before it leave. A match is a piece, and so is the
            text between two matches.
        nfc: Whether texts are normalized to NFC first.
        whole: Whether a piece that is a token is that token, whatever the merges say.
        begins: Whether a text gets the token of its beginning where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    begins: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LIKE_GPT2 = Cutting((GPT2,))
_DEEPSEEK_CODER = Cutting(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
)
_DIGITS = Cutting((r"\p{N}", GPT2))
_LLAMA3 = Cutting((LLAMA3,), whole=True, begins=True)
_QWEN2 = Cutting((QWEN2,), nfc=True)
CUTTINGS = {
    "default": Cutting((PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _LIKE_GPT2,
    "phi-2": _LIKE_GPT2,
    "mpt": _LIKE_GPT2,
    "olmo": _LIKE_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "dbrx": Cutting((LLAMA3,)),
    "smaug-bpe": Cutting((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "kormo": _QWEN2,
    "deepseek-coder": _DEEPSEEK_CODER,
    "stablelm2": Cutting((QWEN2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "falcon": Cutting((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "tekken": Cutting((TEKKEN,), whole=True, begins=True),
    "gpt-4o": Cutting((GPT4O,)),
}


def read_cutting(fields: Fields) -> Cutting:
    """Returns how the metadata of a file says to cut. Raises CheckpointError."""
    name = fields.get(KEY, str, "default")
    if name not in CUTTINGS:
        near = ", ".join(get_close_matches(name[:MOST_SHOWN], CUTTINGS, cutoff=0.0))
        raise fields.refuse(KEY, f"which is not served; the nearest that are: {near}")
    return CUTTINGS[name]
