"""`quire estimate` gives the known sizes of a KV cache of 32,768 tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.settings import ModelSettings
from rpc.cli.estimate import show

LENGTH = 32_768
LARGE = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": LENGTH,
    "torch_dtype": "float16",
}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
WINDOWS = {  # a layer in six sees everything
    "architectures": ["MinistralForCausalLM"],
    "head_dim": 128,
    "sliding_window": 1024,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(32)],
}


def estimated(
    directory: Path, capsys: pytest.CaptureFixture[str], page_size: int, changes: dict[str, Any]
) -> dict[str, Any]:
    """Returns what the command prints with --json."""
    (directory / "config.json").write_text(json.dumps(LARGE | changes))
    show(directory, ModelSettings(page_size=page_size, kv_cache_memory=2**36), LENGTH, as_json=True)
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.mark.parametrize(
    ("changes", "gigabytes"),
    [
        (LLAMA | {"num_key_value_heads": 32}, 17.18),
        (LLAMA | {"num_key_value_heads": 8}, 4.29),
        (WINDOWS | {"num_key_value_heads": 8}, 0.78),
    ],
    ids=["multi-head", "8 KV heads", "8 KV heads, 27 windows of 1,024"],
)
def test_known_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], gigabytes: float
) -> None:
    values = estimated(tmp_path, capsys, 1, changes)
    assert round(values["sequence_bytes"] / 1e9, 2) == gigabytes
    assert values["bytes_a_token"] == 2 * 32 * changes["num_key_value_heads"] * 128 * 2


def test_a_window_takes_a_page_more_than_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins and ends within a page: 65 pages of 16 tokens for 1,024."""
    assert WINDOWS["layer_types"].count("full_attention") == 5
    values = estimated(tmp_path, capsys, 16, WINDOWS | {"num_key_value_heads": 8})
    assert values["sequence_pages"] == 5 * LENGTH // 16 + 27 * (1024 // 16 + 1)
    assert values["sequence_bytes"] == values["sequence_pages"] * 16 * 2 * 8 * 128 * 2
