"""`sample(n)` leaves each n-th case of a test in `make test`, of those that no other mark leaves out."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import mark_beyond_samples


class Item:
    """What is asked of a collected test."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.name, self.path, self.marks = name, Path("test_one.py"), list(marks)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def test_each_second_of_those_that_are_not_slow_is_left() -> None:
    second, slow = pytest.mark.sample(2).mark, pytest.mark.slow.mark
    items: list[Any] = [Item(f"test_a[{i}]", second, *[slow] * (i % 2)) for i in range(8)]
    items += [Item(f"test_b[{i}]") for i in range(3)]
    mark_beyond_samples(items)
    left = [item.name for item in items if item.get_closest_marker("slow") is None]
    assert left == ["test_a[0]", "test_a[4]", "test_b[0]", "test_b[1]", "test_b[2]"]
