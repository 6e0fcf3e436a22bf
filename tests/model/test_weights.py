"""A checkpoint is loaded strictly: whatever is wrong is one CheckpointError that names file and tensor."""

import gc
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.errors import CheckpointError
from model.loading import LoadedModel, load
from model.settings import ModelSettings
from model.weights import FLOAT8_BLOCK, Checkpoint
from scheduler.settings import RequestLimits
from tests.support.checkpoints import write_llama
from tests.support.engines import make_request, make_rig

DOWN = "model.layers.1.mlp.down_proj.weight"


def load_it(directory: Path, **settings: object) -> LoadedModel:
    values = {"device": "cpu", "kv_cache_memory": 2**20} | settings
    return load(directory, ModelSettings(str(directory), **values), 4, 512, RequestLimits())  # type: ignore[arg-type]


def tokens_of(directory: Path) -> list[int]:
    """Returns the tokens that a model goes on with, greedily."""
    rig = make_rig(directory)
    return rig.run({0: make_request(rig, range(1, 9), 4)})[0].tokens


def refusal(directory: Path) -> str:
    """The message with which the directory is refused."""
    with pytest.raises(CheckpointError) as caught:
        load_it(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def single(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(tiny, tmp_path / "single")


@pytest.fixture(scope="session")
def sharded_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("sharded"), shards=True)


@pytest.fixture
def sharded(sharded_original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded_original, tmp_path / "sharded")


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> Path:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    return path


def test_a_good_checkpoint_loads(single: Path, sharded: Path) -> None:
    for directory in (single, sharded):
        loaded = load_it(directory)
        assert (loaded.config.layers, loaded.dtype, loaded.limits.vocabulary) == (3, "float32", 320)


@pytest.mark.parametrize(
    "name",
    [
        DOWN,
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.2.self_attn.k_proj.weight",
    ],
)
def test_missing_tensor(single: Path, name: str) -> None:
    edit(single, lambda tensors: tensors.pop(name))
    message = refusal(single)
    assert name in message
    assert str(single) in message


def test_missing_bias(single: Path) -> None:
    """config.json asks for biases that the weights do not have."""
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(single)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.bias",
        "extra",
        "vision.model.layers.0.self_attn.rotary_emb.inv_freq",  # only the whole name of a buffer is let pass
        "model.layers.0.self_attn.rotary_emb.inv_freq.scale",
    ],
)
def test_unexpected_tensor(single: Path, name: str) -> None:
    edit(single, lambda tensors: tensors.update({name: torch.zeros(64)}))
    message = refusal(single)
    assert name in message
    assert "model.safetensors" in message


def test_several_unexpected_tensors_are_counted(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(4)}))
    assert re.search(r"extra\.0 in model\.safetensors and 3 more", refusal(single))


def test_buffers_of_old_checkpoints_are_let_pass(single: Path) -> None:
    plain = tokens_of(single)
    edit(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert tokens_of(single) == plain, "what is let pass is not used"


def test_head_of_a_tied_model_is_let_pass_and_not_used(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, tie_word_embeddings=True)
    plain = tokens_of(directory)
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert tokens_of(directory) == plain


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (DOWN, (96, 64)),  # transposed
        ("model.embed_tokens.weight", (319, 64)),
        ("model.norm.weight", (1, 64)),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64)),
    ],
)
def test_wrong_shape(single: Path, name: str, shape: tuple[int, ...]) -> None:
    right = list(load_file(single / "model.safetensors")[name].shape)
    edit(single, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    message = refusal(single)
    for part in (name, "model.safetensors", str(list(shape)), str(right)):
        assert part in message


def test_weights_that_are_integers(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({DOWN: torch.zeros(64, 96, dtype=torch.int8)}))
    message = refusal(single)
    assert DOWN in message
    assert "int8" in message


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_file(single: Path, keep: float) -> None:
    path = single / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    message = refusal(single)
    assert str(path) in message
    assert "cut off" in message


def test_garbage_in_place_of_weights(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(b"\xff" * 1000)
    assert str(path) in refusal(single)


def test_git_lfs_pointer_in_place_of_weights(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 308184\n")
    message = refusal(single)
    assert str(path) in message
    assert "git lfs pull" in message


def test_git_lfs_pointer_in_place_of_a_shard(sharded: Path) -> None:
    path = sorted(sharded.glob("model-*.safetensors"))[1]
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 308184\n")
    message = refusal(sharded)
    assert str(path) in message
    assert "git lfs pull" in message


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.unlink()
    message = refusal(sharded)
    assert shard.name in message
    assert "model.safetensors.index.json" in message


def test_shard_without_a_tensor_of_the_index(sharded: Path) -> None:
    edit_index(sharded, lambda names: names.pop(DOWN))
    load_it(sharded)  # what stands in the files counts, not what the index says of them
    (shard,) = {path for path in sharded.glob("model-*.safetensors") if DOWN in load_file(path)}
    tensors = load_file(shard)
    del tensors[DOWN]
    save_file(tensors, shard, {"format": "pt"})
    assert DOWN in refusal(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second, {"format": "pt"})
    message = refusal(sharded)
    for part in (name, first.name, second.name):
        assert part in message


@pytest.mark.parametrize("outside", ["../stolen.safetensors", "/stolen", "sub/stolen.safetensors", "sub/../../stolen"])
def test_index_naming_a_file_outside_of_the_directory(sharded: Path, tiny: Path, outside: str) -> None:
    (sharded / "sub").mkdir()
    name = str(sharded.parent / "stolen.safetensors") if outside == "/stolen" else outside
    shutil.copy(tiny / "model.safetensors", sharded / name)
    index = edit_index(sharded, lambda names: names.update({DOWN: name}))
    message = refusal(sharded)
    assert str(index) in message
    assert Path(name).name in message


@pytest.mark.parametrize("name", ["..", ".", "", "sub"])
def test_index_naming_a_directory(sharded: Path, name: str) -> None:
    (sharded / "sub").mkdir()
    edit_index(sharded, lambda names: names.update({DOWN: name}))
    assert "model.safetensors.index.json" in refusal(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"])
def test_broken_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert "model.safetensors.index.json" in refusal(sharded)


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_named_and_never_opened(single: Path, name: str) -> None:
    (single / "model.safetensors").unlink()
    mark = single / "exploded"
    (single / name).write_bytes(pickle.dumps(Bomb(mark)))
    message = refusal(single)
    assert name in message
    assert "only safetensors" in message
    assert not mark.exists()


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    message = refusal(single)
    assert str(single) in message
    assert "model.safetensors" in message


def test_pickle_in_place_of_safetensors(single: Path) -> None:
    mark = single / "exploded"
    (single / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    assert "model.safetensors" in refusal(single)
    assert not mark.exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_converted(single: Path, dtype: torch.dtype) -> None:
    edit(single, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    taken = Checkpoint(single).take(DOWN, (64, 96), torch.float32)
    assert torch.equal(taken, load_file(single / "model.safetensors")[DOWN].float())


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"device": "gpu"}, "--device"),
        ({"kv_cache_memory": 2**60}, "--kv-cache-memory"),
        ({"kv_cache_memory": 100}, "--kv-cache-memory"),
    ],
)
def test_settings_that_cannot_be_met(single: Path, settings: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        load_it(single, **settings)


def manifest(directory: Path) -> None:
    """As `sha256sum *.json *.safetensors > SHA256SUMS` writes it."""
    files = sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (directory / "SHA256SUMS").write_text("".join(lines))


def verification(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_it(directory, verify_weights=True)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_what_is_as_it_was_is_loaded(kind: str, request: pytest.FixtureRequest) -> None:
    """A file that differs from its line raises CheckpointError, as the tests below show."""
    directory = request.getfixturevalue(kind)
    manifest(directory)
    load_it(directory, verify_weights=True)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_bit_that_flipped_is_found(single: Path, name: str) -> None:
    manifest(single)
    content = bytearray((single / name).read_bytes())
    content[-9] ^= 1
    (single / name).write_bytes(content)
    if name == "model.safetensors":
        load_it(single)  # without the flag it is not seen
    message = verification(single)
    assert name in message
    assert "is not what it was" in message


def test_a_file_that_the_manifest_names_is_gone(single: Path) -> None:
    manifest(single)
    (single / "generation_config.json").unlink()
    assert "generation_config.json, which SHA256SUMS names, cannot be read" in verification(single)


def test_a_manifest_that_leaves_the_weights_out(single: Path) -> None:
    manifest(single)
    path = single / "SHA256SUMS"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "safetensors" not in line))
    assert "has no sum of model.safetensors" in verification(single)


@pytest.mark.parametrize("line", ["", "hello", "00  model.safetensors", "0" * 64 + "  ../model.safetensors"])
def test_a_manifest_that_is_none(single: Path, line: str) -> None:
    manifest(single)
    with (single / "SHA256SUMS").open("a") as file:
        file.write(line + "\n")
    assert "is no SHA-256 sum of a file in this directory" in verification(single)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(single: Path, value: float) -> None:
    edit(single, lambda tensors: tensors[DOWN].view(-1)[:3].fill_(value))
    message = verification(single)
    assert DOWN in message
    assert "has 3 of 6144 values" in message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_values_of_8_bits_that_are_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch has no isfinite for e4m3 and e8m0: their only values that are not finite are not numbers."""
    numbers = torch.ones(FLOAT8_BLOCK + 5).to(dtype)
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint(tmp_path, finite=True).take("a", numbers.shape, None).float(), numbers.float())
    numbers[-2:] = float("nan")
    save_file({"a": numbers}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"a in .* has 2 of {FLOAT8_BLOCK + 5} values that are infinite or not"):
        Checkpoint(tmp_path, finite=True).take("a", numbers.shape, None)


def test_one_number_is_saved_with_or_without_a_dimension(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(0.5), "b": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.take("a", (1,), None).tolist() == checkpoint.take("b", (1,), None).tolist() == [0.5]
    with pytest.raises(CheckpointError, match=r"a in model.safetensors has shape \[\], config.json needs \[1, 1\]"):
        checkpoint.take("a", (1, 1), None)


def test_without_a_manifest_values_alone_are_checked(single: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_it(single, verify_weights=True)
    assert "has no SHA256SUMS" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_file_stays_mapped(single: Path, dtype: str, quantization: str | None) -> None:
    """Else the weights would be counted twice, and a file that is replaced would change a running model."""
    loaded = load_it(single, dtype=dtype, quantization=quantization)
    gc.collect()
    assert str(single) not in Path("/proc/self/maps").read_text()
    assert loaded.pages


def test_the_bar_is_told_of_every_byte(single: Path) -> None:
    told: list[int] = []
    checkpoint = Checkpoint(single, progress=told.append)
    for name, tensor in load_file(single / "model.safetensors").items():
        checkpoint.take(name, tuple(tensor.shape), tensor.dtype)
    header = 8 + int.from_bytes((single / "model.safetensors").read_bytes()[:8], "little")
    assert sum(told) + header == (single / "model.safetensors").stat().st_size
