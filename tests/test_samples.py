"""`sample(n)` leaves about each n-th case of a test in `make test`, of those that no other mark leaves out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.marks import MANY, beyond_part, mark_beyond_samples


class Item:
    """Stands for a collected test. indices: of its arguments."""

    def __init__(self, name: str, indices: dict[str, int], *marks: pytest.Mark) -> None:
        self.name, self.path, self.marks = name, Path("test_one.py"), list(marks)
        self.callspec = SimpleNamespace(indices=indices)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def left(items: list[Any]) -> list[str]:
    mark_beyond_samples(items)
    return [item.name for item in items if item.get_closest_marker("slow") is None]


SECOND, SLOW = pytest.mark.sample(2).mark, pytest.mark.slow.mark


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


def test_parts_of_a_run_are_all_of_it_and_share_no_case_of_a_test_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Item(f"test_a[{i}-{j}]", {"row": i, "column": j}) for i in range(MANY) for j in range(2)]
    few = [Item(f"test_b[{i}]", {"one": i}) for i in range(MANY - 1)]
    runs = []
    for part in ("0/3", "1/3", "2/3"):
        monkeypatch.setenv("TEST_PART", part)
        others = beyond_part([*many, *few])  # type: ignore[list-item]
        runs.append([item.name for item in [*many, *few] if item not in others])
    names = [item.name for item in few]
    assert all(run[-len(names) :] == names for run in runs)
    assert sorted(name for run in runs for name in run if name not in names) == sorted(item.name for item in many)
    monkeypatch.delenv("TEST_PART")
    assert beyond_part(many) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["3/3", "1", "a/3", "1/", "-1/3"])
def test_what_is_no_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PART", part)
    with pytest.raises(ValueError, match=r"TEST_PART is .*, must be like 1/3"):
        beyond_part([])
