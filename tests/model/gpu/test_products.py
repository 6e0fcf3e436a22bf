"""The products that the back end makes while a model is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.architectures.registry import load_model
from model.config import read_config
from model.decoder import Decoder
from model.gguf_weights import open_checkpoint
from model.gpu import group_linear
from model.gpu.backend import TritonBackend
from model.gpu.group_linear import MOST_ROWS, GroupProduct
from model.layers import Linear
from model.weight_formats.scratch import Scratch
from model.weights import Checkpoint
from tests.model.gguf.writer import convert
from tests.support.checkpoints import write_llama

CPU = torch.device("cpu")


def loaded(directory: Path, quantization: str | None, scratch: Scratch | None = None) -> Decoder:
    dtype = torch.float16
    maker = TritonBackend("float16", "float16", CPU, scratch or Scratch(dtype, CPU)).maker
    return load_model(read_config(directory), Checkpoint(directory), dtype, CPU, quantization, maker)


@pytest.mark.parametrize(
    ("quantization", "inner", "head"),
    [(None, Linear, Linear), ("int8", GroupProduct, GroupProduct), ("int4", GroupProduct, GroupProduct)],
)
def test_quantized_weights_have_a_kernel_and_plain_ones_have_torch(
    quantization: str | None, inner: type, head: type, tmp_path: Path
) -> None:
    decoder: Any = loaded(write_llama(tmp_path), quantization)
    for layer in decoder.layers:
        parts = layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down
        assert {type(part) for part in parts} == {inner}
    assert type(decoder.head) is head


def test_a_tied_output_layer_is_the_embedding_itself(tmp_path: Path) -> None:
    """No copy of it is made for a back end that leaves plain weights to torch."""
    decoder: Any = loaded(write_llama(tmp_path, tie_word_embeddings=True), None)
    x = torch.ones(1, decoder.embedding.tokens.width, dtype=torch.float16)
    assert decoder.head(x).any()
    decoder.embedding.tokens.weight.zero_()
    assert not decoder.head(x).any()


class Filled:
    """In the place of a kernel: fills what it would write to with zeros."""

    def __getitem__(self, _: object) -> Any:
        return lambda out, *_, **__: out.zero_()


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_products_of_a_model_share_the_room_of_a_block(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_linear, "unpack_groups", Filled())
    scratch = Scratch(torch.float16, CPU)
    decoder: Any = loaded(write_llama(tmp_path), quantization, scratch)
    room, hidden = scratch.shaped(torch.Size([1])), decoder.embedding.tokens.width
    for layer in decoder.layers:
        for product, inputs in ((layer.attention.qkv, hidden), (layer.mlp.gate_up, hidden)):
            room.fill_(torch.nan)
            product(torch.zeros(MOST_ROWS + 1, inputs, dtype=torch.float16))
            assert not room.isnan().any(), "its weights were unpacked elsewhere"


def test_parts_in_several_types_are_left_to_torch(tmp_path: Path) -> None:
    """Values in another type than queries and keys, and plain keys, as GGUF files may have them."""
    source, path = write_llama(tmp_path / "source"), tmp_path / "model.gguf"
    kinds = {"attn_v": Kind.Q8_0, "blk.0.attn_k": Kind.F16, "ffn": Kind.Q4_1}
    convert(source, path, lambda name: next((kind for part, kind in kinds.items() if part in name), Kind.Q4_0))
    dtype, maker = torch.float16, TritonBackend("float16", "float16", CPU, Scratch(torch.float16, CPU)).maker
    config = read_config(path)
    decoder: Any = load_model(config, open_checkpoint(path, config), dtype, CPU, None, maker)
    for layer in decoder.layers:
        assert not isinstance(layer.attention.qkv, GroupProduct)
        assert isinstance(layer.mlp.gate_up, GroupProduct)
