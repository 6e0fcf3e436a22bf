"""Damaged GGUF files are served or refused with a message that names file and field: no hang, no traceback."""

import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from model.config import read_config
from model.errors import CheckpointError
from model.gguf.cursor import MOST_HEADER
from model.gguf.reader import GGUFFile
from model.gguf.split import open_model
from tests.model.families.cases import BY_NAME
from tests.model.families.conftest import Shelf
from tests.model.gguf.kinds import all_in
from tests.model.gguf.writer import Conversion, convert
from tests.model.test_hostile_checkpoints import check
from tests.model.test_weights import load_it
from tests.support.checkpoints import write_llama

MODULE = "tests.model.gguf.hostile"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_mutated_files_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path / "m", 0, 30, MODULE)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_more_mutated_files_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path / "m", 1000, 400, MODULE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("hostile") / "source", num_hidden_layers=2)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("hostile-families"))


@pytest.fixture
def sound(source: Path, tmp_path: Path) -> Path:
    convert(source, tmp_path / "model.gguf", all_in(Kind.Q8_0))
    return tmp_path / "model.gguf"


def test_tables_are_those_of_the_gguf_package(sound: Path) -> None:
    ours, theirs = GGUFFile(sound), GGUFReader(sound)
    assert {one.name: (one.shape, one.start, one.nbytes) for one in ours.tensors.values()} == {
        one.name: (tuple(map(int, reversed(one.shape))), one.data_offset, one.n_bytes) for one in theirs.tensors
    }
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    arrays = {name for name, value in fields.items() if isinstance(value, list)}
    assert ours.metadata.fields.values == {name: value for name, value in fields.items() if name not in arrays}
    assert ours.metadata.texts("tokenizer.ggml.tokens") == fields["tokenizer.ggml.tokens"]
    assert ours.metadata.integers("tokenizer.ggml.token_type") == fields["tokenizer.ggml.token_type"]
    for one in theirs.tensors:
        assert (ours.tensors[one.name].bytes().reshape(-1) == one.data.reshape(-1).view("uint8")).all()


def put(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def behind(name: bytes, ahead: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: put(data.index(name) + len(name) + ahead, form, value)(data)


Q = b"blk.0.attn_q.weight"  # two dimensions: sizes at 4 and 12, type at 20, offset at 24
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot be mapped"),
    "no magic": (lambda data: b"GGML" + data[4:], r"begins with b'GGML', not with b'GGUF': it is no GGUF file"),
    "version 1": (put(4, "<I", 1), "is GGUF version 1, served are 2 and 3"),
    "version 4": (put(4, "<I", 4), "is GGUF version 4, served are 2 and 3"),
    "big-endian": (put(4, ">I", 3), "is a big-endian GGUF file"),
    "tensors": (put(8, "<Q", 2**40), "the number of tensors is 1099511627776, may be at most 100000"),
    "keys": (put(16, "<Q", 2**63), "the number of metadata values is 9223372036854775808, may be at most 65536"),
    "cut in the header": (lambda data: data[:300], r"ends at byte 300, inside .*: was the download cut off"),
    "cut in the data": (lambda data: data[:-40], r"tensor .* ends at byte \d+, the file at \d+: was the download cut"),
    "long key": (put(24, "<Q", 2**50), "the length of key 0 of the metadata is 1125899906842624, may be at most 65535"),
    "kind of value": (behind(b"llama.block_count", 0, "<I", 13), "'llama.block_count' has the value type 13"),
    "text": (behind(b"general.architecture", 4, "<Q", 2**62), "the length of 'general.architecture' is 4611"),
    "elements": (behind(b"ggml.tokens", 8, "<Q", 2**60), "the number of elements of 'tokenizer.ggml.tokens' is 1152"),
    "element": (behind(b"ggml.tokens", 16, "<Q", 2**40), "element 1 of 'tokenizer.ggml.tokens'"),
    "nested": (behind(b"ggml.tokens", 4, "<I", 9), "'tokenizer.ggml.tokens' are arrays, which is not supported"),
    "dimensions": (behind(Q, 0, "<I", 5), "the number of dimensions of tensor blk.0.attn_q.weight is 5, may be at mo"),
    "shape": (behind(Q, 12, "<Q", 2**60), r"tensor blk.0.attn_q.weight has the shape \[64, 1152921504606846976\]"),
    "no elements": (behind(Q, 12, "<Q", 0), r"tensor blk.0.attn_q.weight has the shape \[64, 0\]"),
    "blocks": (behind(Q, 4, "<Q", 40), "tensor blk.0.attn_q.weight has rows of 40 elements, Q8_0 stores blocks of 32"),
    "other type": (behind(Q, 20, "<I", 16), r"blk.0.attn_q.weight is of type IQ2_XXS, which is not served; served a"),
    "unknown type": (behind(Q, 20, "<I", 99), "blk.0.attn_q.weight is of type number 99, which is not served"),
    "alignment": (behind(Q, 24, "<Q", 31), "blk.0.attn_q.weight is at 31, must be at a multiple of 32"),
    "overlap": (behind(Q, 24, "<Q", 0), r"begins at byte \d+, inside .*, which ends at \d+"),
    "outside": (behind(Q, 24, "<Q", 2**40), r"tensor blk.0.attn_q.weight ends at byte 1099"),
    "twice": (lambda data: data.replace(b"blk.0.attn_q.w", b"blk.0.attn_k.w"), "tensor blk.0.attn_k.weight stands tw"),
    "no UTF-8": (lambda data: data.replace(b"general.arch", b"general.\xff\xffch"), "is no text in UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, sound: Path) -> None:
    change, message = DAMAGES[damage]
    sound.write_bytes(change(sound.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_config(sound)
    assert str(sound) in str(raised.value)


def test_a_header_has_a_bound(sound: Path) -> None:
    """The file says that it has more; nothing is read behind the bound."""
    data = behind(b"general.architecture", 4, "<Q", MOST_HEADER)(sound.read_bytes())
    sound.write_bytes(data)
    os.truncate(sound, 2 * MOST_HEADER)
    with pytest.raises(CheckpointError, match=f"'general.architecture' lies beyond the first {MOST_HEADER} bytes"):
        read_config(sound)


@pytest.mark.parametrize("name", ["model.gguf", "link.gguf"])
def test_what_is_no_regular_file_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        read_config(tmp_path / name)


def test_other_architectures_are_refused_with_the_nearest(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    value = gguf.gguf_writer.GGUFValue("qwen2vl", gguf.GGUFValueType.STRING)
    made = Conversion(source, all_in(Kind.F32))
    made.write(path, lambda writer: writer.kv_data[0].update({"general.architecture": value}))
    with pytest.raises(CheckpointError, match=r"'qwen2vl', which is not served; the nearest that are: qwen2, qwen3"):
        read_config(path)


def test_tensors_that_the_model_has_not_or_lacks_are_named(source: Path, tmp_path: Path) -> None:
    made, path = Conversion(source, all_in(Kind.F32)), tmp_path / "model.gguf"
    made.stored["blk.0.attn_sinks.weight"] = made.stored["blk.0.attn_norm.weight"]
    made.write(path)
    with pytest.raises(
        CheckpointError, match=r"blk.0.attn_sinks.weight in model.gguf is not part of the model that its"
    ):
        load_it(path)
    del made.stored["blk.0.attn_sinks.weight"], made.stored["blk.1.ffn_up.weight"]
    made.write(path)
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight is missing from .*model.gguf"):
        load_it(path)


@pytest.mark.parametrize(
    ("name", "like"),
    [("ffn_gate_up_exps.weight", "ffn_gate_exps.weight"), ("ffn_gate.0.weight", "ffn_gate_inp.weight")],
)
def test_two_tensors_that_are_one_on_the_hub_are_refused(name: str, like: str, shelf: Shelf, tmp_path: Path) -> None:
    made, path = Conversion(shelf.checkpoint(BY_NAME["qwen3-moe"]), all_in(Kind.F32)), tmp_path / "model.gguf"
    made.stored[f"blk.0.{name}"] = made.stored[f"blk.0.{like}"]
    made.write(path)
    with pytest.raises(CheckpointError, match=rf"blk.0.ffn_gate_exps.weight and blk.0.{name} are both model.layers.0"):
        read_config(path)


@pytest.mark.parametrize("rows", [1, 33, None])
def test_gates_and_ups_without_two_halves_are_named(rows: int | None, shelf: Shelf, tmp_path: Path) -> None:
    made, path = Conversion(shelf.checkpoint(BY_NAME["qwen3-moe"]), all_in(Kind.F32)), tmp_path / "model.gguf"
    gates, _ = made.stored.pop("blk.0.ffn_gate_exps.weight")
    del made.stored["blk.0.ffn_up_exps.weight"]
    made.stored["blk.0.ffn_gate_up_exps.weight"] = gates[:, 0] if rows is None else gates[:, :rows], Kind.F32
    made.write(path)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj|ffn_gate_up_exps"):
        load_it(path)


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    Conversion(source, all_in(Kind.F32)).write(tmp_path / "model.gguf", parts=9)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_parts_that_do_not_belong_together_are_refused(parts: list[Path]) -> None:
    first, second, *_ = parts
    assert len(open_model(first).files) == len(parts) == 3
    with pytest.raises(CheckpointError, match=r"is part 2 of 3: give the first, model-00001-of-00003.gguf"):
        open_model(second)
    second.rename(first.with_name("away"))
    with pytest.raises(CheckpointError, match=re.escape(f"{second} is missing")):
        open_model(first)
    second.symlink_to(first.name)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: 'split.no' is 0, must be 1 in this file"):
        open_model(first)
    whole = first.with_name("model.gguf")
    first.rename(whole)
    with pytest.raises(CheckpointError, match=r"model.gguf: 'split.count' is 3, but its name says 1"):
        open_model(whole)


def test_parts_of_another_model_are_refused(parts: list[Path], source: Path, tmp_path: Path) -> None:
    """The same number of parts, and one tensor less."""
    made = Conversion(source, all_in(Kind.F32))
    made.stored.pop("output.weight")
    (tmp_path / "other").mkdir()
    made.write(tmp_path / "other" / "model.gguf", parts=9)
    parts[-1].write_bytes(sorted((tmp_path / "other").glob("*.gguf"))[-1].read_bytes())
    with pytest.raises(CheckpointError, match=r"stands in .* and again in|'split.tensors.count' is"):
        open_model(parts[0])
