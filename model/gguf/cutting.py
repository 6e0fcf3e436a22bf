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
QWEN35 = (
    rf"(?i:{SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
SEED = rf"(?i:{SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LATER = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{LATER}"
GPT4O = rf"{BEFORE}{UPPER}*{LOWER}+(?i:{SUFFIXES})?|{BEFORE}{UPPER}+{LOWER}*(?i:{SUFFIXES})?|\p{{N}}{{1,3}}|{LATER}"
KIMI_UPPER, KIMI_LOWER = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = (
    rf"\p{{Han}}+|{BEFORE}{KIMI_UPPER}*{KIMI_LOWER}+(?i:{SUFFIXES})?|{BEFORE}{KIMI_UPPER}+{KIMI_LOWER}*(?i:{SUFFIXES})?"
    rf"|\p{{N}}{{1,3}}|{REST}"
)
"""That of Kimi K2's own tokenizer; llama.cpp's does not cut before capitals."""


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


LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, as DeepSeek-V2's tokenizer lists them."""
_DEEPSEEK_2 = Cutting(
    (
        r"[\r\n]",
        rf"\s?[{LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    )
)
_DEEPSEEK_3 = Cutting(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
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
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "dbrx": Cutting((LLAMA3,)),
    "smaug-bpe": Cutting((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "kormo": _QWEN2,
    "qwen35": Cutting((QWEN35,), nfc=True),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_2,
    "deepseek-v3": _DEEPSEEK_3,
    "hunyuan-dense": _DEEPSEEK_3,
    "exaone4": _LIKE_GPT2,
    "chatglm-bpe": Cutting((LLAMA3,)),
    "glm4": Cutting((LLAMA3,), whole=True),
    "stablelm2": Cutting((QWEN2,)),
    "seed-coder": Cutting((SEED,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "falcon": Cutting((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "tekken": Cutting((TEKKEN,), whole=True, begins=True),
    "gpt-4o": Cutting((GPT4O,)),
    "llama4": Cutting((GPT4O,)),
    "bloom": Cutting((BLOOM,)),
    "kimi-k2": Cutting((KIMI,), whole=True),
    "minimax-m2": Cutting((GPT4O,)),
}


def read_cutting(fields: Fields) -> Cutting:
    """Returns how the metadata of a file says to cut. Raises CheckpointError."""
    name = fields.get(KEY, str, "default")
    if name not in CUTTINGS:
        near = ", ".join(get_close_matches(name[:MOST_SHOWN], CUTTINGS, cutoff=0.0))
        raise fields.refuse(KEY, f"which is not served; the nearest that are: {near}")
    return CUTTINGS[name]
