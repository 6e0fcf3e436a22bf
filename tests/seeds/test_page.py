"""docs/explanation/seeds.md: every row is there, and every test and file that it names."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "seeds.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
NAME = re.compile(r"`((?:tests|bench|docs|model|scheduler|cache_manager|rpc)/[^`\s:]+)(?:::([^`]*))?`")
STATES = ("shown", "partly", "open")


@cache
def functions(path: Path) -> set[str]:
    """Returns what pytest would collect of a file of tests without classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def names(text: str) -> list[tuple[str, str]]:
    """File and test, or file and "", of everything that is named."""
    return NAME.findall(text)


def missing(text: str) -> list[str]:
    """Returns the files and tests that the text names and that do not exist."""
    lacking = []
    for file, test in names(text):
        path = ROOT / file
        known = path.is_file() and (not test or (test.startswith("test_") and test in functions(path)))
        if not known:
            lacking.append(f"{file}::{test}" if test else file)
    return lacking


def test_every_row_is_there_once_and_in_order() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 45))
    assert {len(row) for row in ROWS} == {6}
    assert all(row[1] and row[2] and row[3] and row[4] for row in ROWS)


def test_every_test_and_file_it_names_exists() -> None:
    assert missing(PAGE) == []
    assert PAGE.count("::") == sum(test != "" for _, test in names(PAGE)), "a name that was not looked for"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_state_of_a_row_is_what_it_says(row: list[str]) -> None:
    *_, shown_by, state = row
    assert state in STATES
    assert ("open" in re.findall(r"\w+", shown_by)) == (state != "shown")
    assert shown_by.startswith("open:") == (state == "open")
    assert state == "open" or names(shown_by)


def test_count_at_the_end_is_right() -> None:
    found = Counter(row[-1] for row in ROWS)
    last = PAGE.rstrip().splitlines()[-1]
    assert last == f"Of 44 rows {found['shown']} are shown, {found['partly']} partly, {found['open']} are open."


@pytest.mark.parametrize(
    "name",
    [
        "tests/seeds/test_nothing.py",
        "tests/seeds/test_nothing.py::test_nothing",
        "tests/seeds/test_page.py::test_nothing",
        "tests/seeds/test_page.py::missing",
        "bench/nothing.py",
    ],
)
def test_what_is_not_there_is_noticed(name: str) -> None:
    assert missing(f"as `{name}` shows") == [name]
