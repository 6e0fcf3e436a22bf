"""`sample(n)` leaves about each n-th case of a test in `make test`, of those that no other mark leaves out. `TEST_PART`
leaves about every third test or case."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.marks import beyond_part, mark_beyond_samples


class Item:
    """Stands for a collected test. indices: of its arguments."""

    def __init__(self, name: str, indices: dict[str, int], *marks: pytest.Mark) -> None:
        self.name, self.nodeid, self.marks = name.rpartition("::")[2], f"test_one.py::{name}", list(marks)
        if indices:
            self.callspec = SimpleNamespace(indices=indices)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def left(items: list[Any]) -> list[str]:
    mark_beyond_samples(items)
    return [item.name for item in items if item.get_closest_marker("slow") is None]


SECOND, SLOW, SAMPLE = pytest.mark.sample(2).mark, pytest.mark.slow.mark, pytest.mark.sample(3).mark


def test_each_second_case_is_left() -> None:
    items = [Item(f"test_a[{i}]", {"one": i, "other": i}, SECOND) for i in range(5)]
    items += [Item(f"test_b[{i}]", {"one": i}) for i in range(2)]
    assert left(items) == ["test_a[0]", "test_a[2]", "test_a[4]", "test_b[0]", "test_b[1]"]


def test_each_value_of_each_parameter_is_left() -> None:
    items = [Item(f"test_a[{i}-{j}]", {"row": i, "column": j}, SECOND) for i in range(3) for j in range(2)]
    assert left(items) == ["test_a[0-0]", "test_a[1-1]", "test_a[2-0]"]


def test_of_cases_that_are_slow_already_none_counts_and_one_is_always_left() -> None:
    items = [Item(f"test_a[{i}]", {"one": i}, SECOND, *[SLOW] * (i % 2 == 0)) for i in range(4)]
    assert left(items) == ["test_a[1]"]


def parts_of(items: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    runs = []
    for part in ("0/3", "1/3", "2/3"):
        monkeypatch.setenv("TEST_PART", part)
        others = beyond_part(items)
        runs.append([item.name for item in items if item not in others])
    monkeypatch.delenv("TEST_PART")
    assert beyond_part(items) == []
    return runs


def test_parts_of_a_run_are_all_of_it_and_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cases that samples leave in nor those that they leave out all come into one part."""
    items = [Item(f"test_a[{i}-{j}]", {"row": i, "column": j}, SAMPLE) for i in range(6) for j in range(6)]
    mark_beyond_samples(items)
    items += [Item(f"test_{name}", {}) for name in "bcdefg"]
    runs = parts_of(items, monkeypatch)
    assert sorted(name for run in runs for name in run) == sorted(item.name for item in items)
    slow = {item.name for item in items if item.get_closest_marker("slow") is not None}
    assert all(7 <= len(slow & {*run}) <= 9 for run in runs)
    assert [len([name for name in run if "[" not in name]) for run in runs] == [2, 2, 2]


def test_each_part_has_all_values_of_two_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(f"test_a[{i}-{j}]", {"row": i, "column": j}) for i in range(5) for j in range(3)]
    for run in parts_of(items, monkeypatch):
        assert {name[7] for name in run} == {*"01234"}
        assert {name[9] for name in run} == {*"012"}


def test_tests_of_one_name_in_two_classes_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(f"Test{letter}::runTest", {}) for letter in "ABC"]
    assert [len(run) for run in parts_of(items, monkeypatch)] == [1, 1, 1]


def test_some_belong_to_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item("test_a", {}, pytest.mark.every_part.mark), Item("test_b", {}), Item("test_c", {})]
    runs = parts_of(items, monkeypatch)
    assert all("test_a" in run for run in runs)
    assert sorted(len(run) for run in runs) == [1, 2, 2]


@pytest.mark.parametrize("part", ["3/3", "1", "a/3", "1/", "-1/3"])
def test_what_is_no_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PART", part)
    with pytest.raises(ValueError, match=r"TEST_PART is .*, must be like 1/3"):
        beyond_part([])
