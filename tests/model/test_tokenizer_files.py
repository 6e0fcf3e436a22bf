"""tokenizer.json: it is read, or refused with its path."""

from pathlib import Path

import pytest

from model.errors import CheckpointError
from model.inputs.tokenizer_files import load_tokenizer
from tests.support.checkpoints import byte_tokenizer


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_broken_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the cat sat, né? 🐈", add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the cat sat, né? 🐈"
    assert tokenizer.decode([0, ids[0]], True) == tokenizer.decode([ids[0]], True)
    assert tokenizer.decode([0], False) == "<|end|>"
    assert tokenizer.decode([10**6], False) == ""
