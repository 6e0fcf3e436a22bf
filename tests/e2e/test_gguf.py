"""A GGUF file in all ways in: `quire serve` and `generate`, `quire estimate`, `LLM`."""

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue
from quire import LLM, Sampling, Stopping
from typer.testing import CliRunner

from model.config import read_config
from model.errors import CheckpointError
from model.identity import checkpoint_identity
from model.verify import MANIFEST
from rpc.cli.main import app
from rpc.paths import inputs_digest, model_directory, model_name
from tests.e2e.test_cli import quire
from tests.model.gguf.kinds import all_in
from tests.model.gguf.writer import Conversion, convert
from tests.model.test_weights import load_it
from tests.support.checkpoints import write_llama
from tests.support.server import running_server

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
EIGHT = Stopping(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file in Q4_0, and the plain checkpoint that it stands for."""
    root = tmp_path_factory.mktemp("gguf")
    source, path = write_llama(root / "source"), root / "small.gguf"
    return path, convert(source, path, all_in(Kind.Q4_0), more=lambda writer: writer.add_chat_template(TEMPLATE))


def test_the_library_takes_a_file(files: tuple[Path, Path]) -> None:
    said = []
    for location in files:
        with LLM(str(location), dtype="float32", backend="reference", kv_cache_memory=2**24) as llm:
            (completion,) = llm.generate("the cat", Sampling(temperature=0), EIGHT)
            said.append(completion.token_ids)
    assert said[0] == said[1]


def test_a_server_takes_a_file(files: tuple[Path, Path]) -> None:
    path, _ = files
    with running_server("--model", str(path), "--kv-cache-memory", "16MiB") as server:
        assert server.model == "small"
        arguments = ("--server", server.address, "--max-tokens", "8", "--temperature", "0", "--quiet")
        plain, chat = quire("generate", "user: hi\n", *arguments), quire("generate", "hi", "--chat", *arguments)
        assert (plain.returncode, chat.returncode) == (0, 0)
        assert plain.stdout == chat.stdout


def test_the_estimate_takes_a_file(files: tuple[Path, Path]) -> None:
    path, _ = files
    done = CliRunner().invoke(app, ["estimate", "--model", str(path), "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["model"], said["architecture"], said["quantization"]) == ("small", "LlamaForCausalLM", "gguf")


def test_paths_of_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = files
    assert model_directory(str(path)) == path
    assert model_name(str(path), path) == "small"
    assert model_name("a/b-00001-of-00003.gguf", path) == "b"
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert model_directory(str(link)) == link
    with pytest.raises(
        CheckpointError, match=r"config.json is missing: --model .*link.gguf serves that file without one"
    ):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"--model .*none.gguf: no such file"):
        model_directory(str(tmp_path / "none.gguf"))


def test_a_file_is_the_model_that_its_metadata_and_weights_make(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, plain = files
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    assert checkpoint_identity(copy) == checkpoint_identity(path)
    assert inputs_digest(copy) == inputs_digest(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert checkpoint_identity(copy) != checkpoint_identity(path)
    assert inputs_digest(copy) == inputs_digest(path)

    def other(writer: GGUFWriter) -> None:
        writer.kv_data[0]["llama.rope.freq_base"] = GGUFValue(5e5, GGUFValueType.FLOAT32)

    Conversion(plain, all_in(Kind.Q4_0)).write(copy, other)
    assert checkpoint_identity(copy) != checkpoint_identity(path)
    assert inputs_digest(copy) != inputs_digest(path)


def test_sums_and_values_are_verified(tmp_path: Path) -> None:
    import hashlib

    source, path = write_llama(tmp_path / "source"), tmp_path / "model.gguf"
    made = Conversion(source, all_in(Kind.Q8_0))
    made.write(path)
    (tmp_path / MANIFEST).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  model.gguf\n")
    load_it(path, verify_weights=True)
    made.stored["blk.1.ffn_up.weight"][0][3, :2] = [0, 0x7C]  # the scale of a block: infinite
    made.write(path)
    with pytest.raises(CheckpointError, match="is not what it was when SHA256SUMS was made"):
        load_it(path, verify_weights=True)
    (tmp_path / MANIFEST).unlink()
    message = (
        r"model.layers.1.mlp.up_proj.weight \(blk.1.ffn_up.weight\) in .*model.gguf has 32 of 6144 values that are"
    )
    with pytest.raises(CheckpointError, match=message):
        load_it(path, verify_weights=True)
