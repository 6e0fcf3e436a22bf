"""Reading a model's configuration from the metadata of a GGUF file; metadata that is refused by its key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter, TokenType
from gguf.gguf_writer import GGUFValue

from model.config import ModelConfig, read_config
from model.errors import CheckpointError
from model.rope import read_rope
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.gguf.kinds import all_in
from tests.model.gguf.writer import Conversion

TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("config"))


@pytest.fixture
def read(shelf: Shelf, tmp_path: Path) -> Callable[..., ModelConfig]:
    """Reads the config of a case's file, with other values under some keys."""

    def reading(case: str, **values: Any) -> ModelConfig:
        made = Conversion(shelf.checkpoint(BY_NAME[case]), all_in(Kind.F32))

        def more(writer: GGUFWriter) -> None:
            for key, value in values.items():
                kind = TYPES.get(type(value), GGUFValueType.ARRAY)
                writer.kv_data[0][key.replace("__", ".")] = GGUFValue(value, kind)

        made.write(tmp_path / "model.gguf", more)
        return read_config(tmp_path / "model.gguf")

    return reading


def test_a_window_of_zero_is_none(read: Callable[..., ModelConfig]) -> None:
    assert read("phi3").windows == (21, 21, 21)
    assert read("phi3", phi3__attention__sliding_window=0).windows == (None, None, None)


def test_every_token_that_ends_a_turn_ends_a_text(read: Callable[..., ModelConfig]) -> None:
    kinds = [TokenType.CONTROL] * 4 + [TokenType.NORMAL]
    tokens = ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "<|end|>"]
    config = read(
        "llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__eos_token_id=1,
        tokenizer__ggml__eot_token_id=3,
    )
    assert config.eos_token_ids == (1, 2, 3)
    assert read("qwen2", tokenizer__ggml__eos_token_id=2**32 - 1).eos_token_ids == (0,)  # <|end|>


def test_the_end_of_a_message_of_gpt_oss_ends_no_text(read: Callable[..., ModelConfig]) -> None:
    tokens = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    config = read(
        "gpt-oss",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[TokenType.CONTROL] * 5,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=1,
    )
    assert config.eos_token_ids == (2, 3, 4)


def test_counts_of_each_layer_are_one_where_they_agree(read: Callable[..., ModelConfig]) -> None:
    assert read("llama", llama__attention__head_count_kv=[2, 2, 2]).kv_heads == 2
    with pytest.raises(CheckpointError, match=r"'llama.attention.head_count_kv' differs between layers"):
        read("llama", llama__attention__head_count_kv=[2, 4, 2])


def test_a_factor_of_attention_is_beside_yarns_own(read: Callable[..., ModelConfig]) -> None:
    config, twice = read("llama-yarn"), read("llama-yarn", llama__rope__scaling__attn_factor=2.0)
    assert read_rope(twice.fields, twice.head_dim)[1] == pytest.approx(2 * read_rope(config.fields, config.head_dim)[1])


def test_contexts_of_millions_of_tokens_are_cut(read: Callable[..., ModelConfig]) -> None:
    """As Llama 4 Scout's: nobody can lower it in a file."""
    assert read("llama4", llama4__context_length=10 * 2**20).context == 2**20


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("olmo2", "olmo2.attention.sliding_window", 4096, "is 4096, which is not supported for olmo2"),
        ("llama", "llama.logit_scale", 8.0, "is 8.0, which is not supported for llama"),
        (
            "llama",
            "llama.rope.scaling.type",
            "dynamic",
            "is 'dynamic', which is not supported; supported: none, linear",
        ),
        ("minimax-m2", "minimax-m2.expert_gating_func", 1, "is 1, must be 2, which is sigmoid"),
        ("glm4-moe", "glm4moe.nextn_predict_layers", 4, "is 4, must be from 0 to 3"),
        ("qwen3.5", "qwen35.attention.recurrent_layers", [1, 1, 0, 1], "must be an array of truth values"),
        ("qwen3.5", "qwen35.attention.recurrent_layers", [True, False], "has 2 values for 4 layers"),
        ("lfm2", "lfm2.attention.head_count_kv", [0, 2, 2], "must have 4 numbers of at least 0"),
        ("gpt-oss", "gpt-oss.attention.sliding_window_pattern", [True, False], "must be an array of integers"),
        ("llama", "llama.attention.value_length", 24, "differs from 'attention.key_length'"),
        ("llama", "llama.block_count", 2.0, "is 2.0, must be of type int"),
        ("bloom", "bloom.attention.head_count_kv", 1, "is 1, must be that of the heads, 4"),
        ("bloom", "bloom.feed_forward_length", 7, "is 7, must be 4 times the embedding's"),
        ("bloom", "bloom.attention.head_count", 5, "is 5, does not divide 64"),
        ("mpt", "mpt.feed_forward_length", 257, "is 257, must be a multiple of 64"),
        ("mpt", "mpt.attention.clamp_kqv", 1.0, "is 1.0, which is not supported for mpt"),
        ("mpt", "mpt.attention.max_alibi_bias", 0.0, "is 0.0, must be a number above 0"),
        ("llama4", "llama4.attention.sliding_window", 0, "is 0, a Llama 4 without chunks is not served"),
        ("llama4", "llama4.attention.sliding_window_pattern", 2, "is 2, must be 4"),
        ("llama4", "llama4.rope.freq_base_swa", 10.0, "is 10.0, must be that of all layers, 500000.0"),
        ("llama4", "llama4.rope.dimension_count", 8, "is 8, must be that of a head, 16"),
        ("llama", "llama.context_length", 0, "is 0, must be at least 1"),
        ("llama", "llama.rope.freq_base", -1.0, "is -1.0, must be a number above 0"),
        ("llama", "tokenizer.ggml.eos_token_id", 320, "is 320, must be the id of one of 320 tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(
    case: str, key: str, value: Any, message: str, read: Callable[..., ModelConfig]
) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        read(case, **{key.replace(".", "__"): value})
    assert f"'{key}'" in str(raised.value)
