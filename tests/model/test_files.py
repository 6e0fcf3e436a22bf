"""Files of a model directory: pipes, devices, directories and files without an end are named, not read."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from model import files
from model.errors import CheckpointError
from model.fields import read_json
from model.files import MOST_BYTES, MOST_OTHERS, read_file
from model.identity import checkpoint_identity
from model.inputs.added_tokens import read_tokenizer_config
from model.inputs.chat import find_chat_template
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.vision.processor import read_processor
from model.verify import verify_files
from model.weights import Checkpoint, weight_files
from rpc.paths import inputs_digest

READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda directory: read_json(directory / "config.json"),
    "generation_config.json": lambda directory: read_json(directory / "generation_config.json"),
    "tokenizer.json": load_tokenizer,
    "tokenizer.model": load_tokenizer,
    "tokenizer_config.json": read_tokenizer_config,
    "special_tokens_map.json": read_tokenizer_config,
    "chat_template.jinja": find_chat_template,
    "preprocessor_config.json": read_processor,
    "processor_config.json": read_processor,
    "model.safetensors.index.json": weight_files,
    "SHA256SUMS": lambda directory: verify_files(directory, []),
}
"""By name: what reads this file of a directory that has no other."""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    """Has no blocks: reading it to its end would take its size in memory all the same."""
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("spoil", [pipe, device, Path.mkdir])
@pytest.mark.parametrize("name", [*READERS, "model.safetensors"])
def test_what_is_no_regular_file_is_named(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is no regular file"):
        READERS.get(name, Checkpoint)(tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_what_is_too_large_is_named_with_its_bound(tmp_path: Path, name: str) -> None:
    too_large(tmp_path / name)
    most = MOST_BYTES.get(name, MOST_OTHERS)
    with pytest.raises(CheckpointError, match=rf"{name} has more than {most} bytes"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "beside.safetensors"])
def test_identity_reads_regular_files_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is no regular file"):
        checkpoint_identity(tmp_path)


@pytest.mark.parametrize("name", ["added_tokens.json", "vocab.json", "chat_template.jinja"])
def test_digest_of_inputs_reads_regular_files_alone(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is no regular file"):
        inputs_digest(tmp_path)


def test_sums_of_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  pipe\n")
    with pytest.raises(CheckpointError, match="pipe is no regular file"):
        verify_files(tmp_path, [])


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """The cache of the Hugging Face hub consists of them."""
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_file(tmp_path / "config.json") == b"{}"


def test_a_file_may_have_just_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(files.MOST_BYTES, "some", 10)
    (tmp_path / "some").write_bytes(b"x" * 10)
    assert read_file(tmp_path / "some") == b"x" * 10
    (tmp_path / "some").write_bytes(b"x" * 11)
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        read_file(tmp_path / "some")


def test_files_without_an_end_that_say_they_are_empty(tmp_path: Path) -> None:
    """Some of /proc are regular, have size 0 and more bytes than that."""
    (tmp_path / "config.json").symlink_to("/proc/self/status")
    assert read_file(tmp_path / "config.json").startswith(b"Name:")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """Memory of a process is a regular file whose first page is not there."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read"):
        READERS.get(name, Checkpoint)(tmp_path)


def test_name_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800", "x" * 5000):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="which is no file") as caught:
            weight_files(tmp_path)
        assert len(str(caught.value)) < 1000


def test_index_of_too_many_files(tmp_path: Path) -> None:
    names = {str(i): f"{i}.safetensors" for i in range(1001)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="1001 files, may name 1000"):
        weight_files(tmp_path)


def test_header_of_weights_has_a_bound(tmp_path: Path) -> None:
    """Its tensors are counted once it is parsed, which takes many times its size."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**24 + 1) + b"{}")
        file.truncate(2**25)
    with pytest.raises(CheckpointError, match="a header of 16777217 bytes, may have 16777216"):
        Checkpoint(tmp_path)
