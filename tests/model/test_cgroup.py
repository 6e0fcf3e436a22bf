"""What a container may take, as the kernel's files say it."""

from pathlib import Path

import pytest

from model.cgroup import memory_left, memory_limit, processors

GIB = 2**30


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (root / name.replace("_", ".", 1)).write_text(text + "\n")
    return root


def test_without_a_cgroup_there_is_no_limit(tmp_path: Path) -> None:
    assert (memory_limit(tmp_path), memory_left(tmp_path), processors(tmp_path)) == (None, None, None)
    files(tmp_path, memory_max="max", memory_current=str(GIB), cpu_max="max 100000")
    assert (memory_limit(tmp_path), memory_left(tmp_path), processors(tmp_path)) == (None, None, None)


def test_pages_of_files_are_free(tmp_path: Path) -> None:
    """A checkpoint of 15 GiB was read in a container of 32."""
    files(tmp_path, memory_max=str(32 * GIB), memory_current=str(31 * GIB))
    assert memory_left(tmp_path) == GIB
    stat = f"anon {16 * GIB}\nfile {15 * GIB}\nshmem {GIB}\ninactive_file {10 * GIB}\nactive_file {4 * GIB}"
    files(tmp_path, memory_stat=stat)
    assert memory_left(tmp_path) == 15 * GIB
    assert memory_limit(tmp_path) == 32 * GIB


@pytest.mark.parametrize(
    ("text", "count"), [("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("", None), ("x", None)]
)
def test_a_quota_is_worth_whole_processors(text: str, count: int | None, tmp_path: Path) -> None:
    assert processors(files(tmp_path, cpu_max=text)) == count
