"""What Gemma 4's GGUF files have of their own: layers that differ, and a tokenizer over characters with merges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from hypothesis import given
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cache_manager.layout import KVShape
from model.config import ModelConfig, read_config
from model.errors import CheckpointError
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.gguf.kinds import all_in
from tests.model.gguf.test_config import read, shelf  # noqa: F401 - fixtures
from tests.model.gguf.test_tokenizer import HARD, lines, many, texts, write
from tests.model.gguf.writer import Conversion

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]


def hub_tokenizer() -> Tokenizer:
    """BPE over characters as Gemma's tokenizer.json has it, with merges that cross lines and words."""
    made = Tokenizer(models.BPE(unk_token=SPECIAL[3], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", SPACE)
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    made.train_from_iterator([*lines(), *(f"{one}\n\n{one}" for one in lines()[:40])], trainer)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single=["<bos>", "$A"], special_tokens=[("<bos>", 2)])
    made.add_tokens([AddedToken("<|channel>", special=False, normalized=False)])
    return made


def write_tokenizer(path: Path, made: Tokenizer) -> Path:
    """As convert_hf_to_gguf.py writes it."""
    said, vocabulary = json.loads(made.to_str()), made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = dict.fromkeys(SPECIAL, TokenType.CONTROL) | dict.fromkeys(BYTES, TokenType.BYTE)
    kinds |= {"<unk>": TokenType.UNKNOWN, "<|channel>": TokenType.USER_DEFINED}

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in said["model"]["merges"]])
        writer.add_bos_token_id(vocabulary["<bos>"])
        writer.add_eos_token_id(vocabulary["<eos>"])
        writer.add_unk_token_id(vocabulary["<unk>"])
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    return write(path, fill)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    made = hub_tokenizer()
    # The trained bytes are tokens of the vocabulary alone, so that a text that spells one is cut as any other.
    said = json.loads(made.to_str())
    said["added_tokens"] = [one for one in said["added_tokens"] if one["content"] not in BYTES]
    made = Tokenizer.from_str(json.dumps(said))
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("gemma4") / "model.gguf", made)), made


def check(pair: tuple[Any, Tokenizer], text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, False) == ids
    assert ours.encode(text, True) == theirs.encode(text).ids == [2, *ids]
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", [*HARD, "a\n\nb\n c", "<turn|>a<|channel>b", "<0x41>", SPACE])
def test_ids_are_those_of_the_hub(pair: tuple[Any, Tokenizer], text: str) -> None:
    check(pair, text)


@many
@given(text=texts)
def test_ids_of_any_text(pair: tuple[Any, Tokenizer], text: str) -> None:
    check(pair, text)


def test_the_trial_passes_it(tmp_path: Path) -> None:
    try_tokenizer(write_tokenizer(tmp_path / "model.gguf", hub_tokenizer()))


def test_a_merge_of_one_token_is_refused(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([TokenType.NORMAL] * 2)
        writer.add_token_merges(["ab"])

    with pytest.raises(CheckpointError, match=r"'tokenizer.ggml.merges' has 'ab', must be pairs of tokens"):
        load_tokenizer(write(tmp_path / "model.gguf", fill))


def test_layers_differ_as_their_windows_do(shelf: Shelf, tmp_path: Path) -> None:  # noqa: F811
    for name in ("gemma4", "gemma4-moe"):
        directory = shelf.checkpoint(BY_NAME[name])
        Conversion(directory, all_in(Kind.F32)).write(tmp_path / f"{name}.gguf")
        ours, theirs = read_config(tmp_path / f"{name}.gguf"), read_config(directory)
        assert ours.layer_shapes == theirs.layer_shapes
        assert (ours.windows, ours.kv_layers) == (theirs.windows, theirs.kv_layers)
    assert ours.layer_shapes[:2] == (KVShape(2, 16, 16), KVShape(1, 32, 32))


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("gemma4", "attention.sliding_window_pattern", [True, False], "has 2 values for 6 layers"),
        ("gemma4", "attention.head_count_kv", [2, 2], "must have 6 numbers of at least 1"),
        ("gemma4-moe", "attention.head_count_kv", [2, 3, 2, 3], "4 attention heads cannot share 3"),
        ("gemma4", "feed_forward_length", [96, 96, 96, 96, 96, 192], "must be twice as wide in the last 3 layers"),
        ("gemma4", "rope.dimension_count", 8, "must be that of a head, 32"),
        ("gemma4", "rope.dimension_count_swa", 8, "must be that of a head, 16"),
        ("gemma4", "rope.scaling.factor", 2.0, "which is not supported for gemma4"),
        ("gemma4", "attention.shared_kv_layers", 6, "must be from 0 to 5"),
    ],
)
def test_what_is_not_served_is_refused(
    case: str, key: str, value: Any, message: str, read: Callable[..., ModelConfig]  # noqa: F811
) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        read(case, **{f"gemma4__{key}".replace(".", "__"): value})
