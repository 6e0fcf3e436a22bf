"""Directories of tests that move TMPDIR."""

import pytest

from tests.support.processes import temporary_directory


def test_tmp_path_is_outside_of_a_moved_tmpdir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else the moved directory is never empty, when this is the first test that asks for a `tmp_path`."""
    with temporary_directory() as place:
        assert place not in tmp_path_factory.mktemp("first").parents
