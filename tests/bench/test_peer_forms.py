"""The peers' bench: checkpoints in other forms are the same model, and count by the bytes of their weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench import shapes
from bench.peers.as_gptq import pack
from bench.peers.forms import MissingForm, checkpoint, held_bytes, stored_bytes
from bench.peers.models import make
from bench.peers.sides import ENGINES, USUAL, Side
from model.gguf.tokenizer import build_tokenizer
from scheduler.settings import SchedulerSettings
from tests.model.weight_formats.packing import Scheme
from tests.support.engines import make_request, make_rig

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LINEARS = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)  # weights in all layers
EMBEDDING = 512 * 64


@pytest.fixture(params=["llama-135m", "qwen3-0.6b"])
def plain(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(shapes.MODELS, "small", shapes.MODELS[request.param] | SIZES)
    return make(tmp_path, "small")


def drawn(place: Path) -> tuple[list[int], object]:
    rig = make_rig(place, 16, 2048, SchedulerSettings(), True, dtype="float32", backend="reference")
    rig.run({0: make_request(rig, list(range(3, 40)), 8)})
    return rig.results[0].tokens, rig.logits_of(0)


def test_a_file_for_llama_cpp_is_the_same_model_to_quire(plain: Path, tmp_path: Path) -> None:
    file = checkpoint(tmp_path, plain, "bf16")
    assert drawn(file) == drawn(plain)
    assert stored_bytes(file) == stored_bytes(plain) == 2 * (LINEARS + EMBEDDING)
    assert build_tokenizer(file).get_vocab_size() == 512


def test_a_form_is_made_once(plain: Path, tmp_path: Path) -> None:
    file = checkpoint(tmp_path, plain, "bf16")
    file.write_bytes(b"as it was")
    assert checkpoint(tmp_path, plain, "bf16").read_bytes() == b"as it was"


def test_without_llama_cpp_its_quantizer_is_missed(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingForm, match=r"small\.q4_0\.gguf cannot be made: .*llama/bin/python"):
        checkpoint(tmp_path, plain, "q4_0")
    assert not list(tmp_path.glob("small.q4_0*"))


def test_gptq_is_packed_as_published() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    scheme = Scheme(32, bits=8, symmetric=True)
    for name, tensor in scheme.pack(scheme.quantize(weight)).items():
        assert torch.equal(pack(weight, 32)[name], tensor), name


def test_a_gptq_checkpoint_is_read_and_counted(plain: Path, tmp_path: Path) -> None:
    place = checkpoint(tmp_path, plain, "gptq8")
    scales = 2 * LINEARS // 64 + LINEARS // 64  # float16, and zero points of a byte
    assert stored_bytes(place) == LINEARS + scales + 2 * EMBEDDING
    assert LINEARS + 2 * EMBEDDING < held_bytes(place, None) < 2 * (LINEARS + EMBEDDING)
    assert set(load_file(place / "model.safetensors")) > {"model.layers.1.mlp.up_proj.g_idx", "model.norm.weight"}


def test_weights_count_as_they_are_packed(plain: Path, tmp_path: Path) -> None:
    counted = {name: ENGINES[name].weights(plain) for name in ("quire", "quire int8", "quire int4", "transformers")}
    assert counted["quire"] == counted["transformers"] == stored_bytes(plain)
    assert counted["quire int4"] < counted["quire int8"] < counted["quire"]
    assert Side("quire_engine", form="bf16").weights(checkpoint(tmp_path, plain, "bf16")) == counted["quire"]


def test_usual_engines_are_engines() -> None:
    assert set(USUAL) < set(ENGINES)
