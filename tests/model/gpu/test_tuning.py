"""The row of the table that holds, and what a row may say."""

from dataclasses import replace

import pytest

from model.gpu.tuning import ELEMENTS, TileSizes, Tuning, TuningRow, table, tuning_for

SIZES = TileSizes(16, 64, 512, 4, 3)


def row(name: int, device: str | None, capability: tuple[int, int], head_dim: int) -> TuningRow:
    """name: its warps, by which it is known again."""
    return TuningRow(device, capability, head_dim, "half", Tuning(replace(SIZES, warps=name), SIZES, SIZES))


ROWS = [
    row(1, None, (0, 0), 256),
    row(2, None, (0, 0), 64),
    row(3, None, (9, 0), 256),
    row(4, "H100", (9, 0), 256),
    row(5, None, (10, 0), 64),
]


@pytest.mark.parametrize(
    ("device", "capability", "head_dim", "expected"),
    [
        ("T4", (7, 5), 64, 2),
        ("T4", (7, 5), 80, 1),
        ("NVIDIA H200", (9, 0), 128, 3),
        ("NVIDIA H200", (9, 0), 48, 2),  # heads of its size come before a newer device's
        ("NVIDIA H100 80GB HBM3", (9, 0), 48, 2),  # and before those of the device itself
        ("NVIDIA H100 80GB HBM3", (9, 0), 128, 4),
        ("B200", (10, 0), 64, 5),
    ],
)
def test_the_row_that_fits_most_closely(device: str, capability: tuple[int, int], head_dim: int, expected: int) -> None:
    assert tuning_for(device, capability, head_dim, "half", ROWS).few.warps == expected


def test_heads_that_no_row_is_for() -> None:
    with pytest.raises(ValueError, match="there are no sizes for half heads of 528 on T4"):
        tuning_for("T4", (7, 5), 528, "half")


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
def test_a_device_that_nobody_knows_has_sizes(elements: str, head_dim: int) -> None:
    made = tuning_for("", (0, 0), head_dim, elements)
    for sizes in (made.few, made.many):
        assert all(sizes.tokens(room) * room == sizes.rows for room in (1, 2, 4, 8, 16))
    assert all(row.elements in ELEMENTS for row in table())


@pytest.mark.parametrize("wrong", [{"rows": 8}, {"chunk": 100}])
def test_sizes_that_kernels_cannot_have_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a tile has 16 rows or more, and a chunk is whole tiles"):
        replace(SIZES, **wrong)
