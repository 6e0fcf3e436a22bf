"""Pages and pictures that are written from code and data are those of today's."""

import csv
import re
from pathlib import Path

import pytest

from bench import charts
from docs.pages_of_code import errors
from docs.pages_of_code.__main__ import PAGES

ROOT = Path(__file__).parents[2]
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
QUANTIZED = ROOT / "bench/results/quantized.csv"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_gives(name: str) -> None:
    page = (ROOT / "docs/reference" / f"{name}.md").read_text(encoding="utf-8")
    assert page == PAGES[name].page(), "run `make reference`"


def test_a_reason_without_a_meaning_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(errors.REASONS, "QUEUE_FULL")
    with pytest.raises(ValueError, match="QUEUE_FULL"):
        errors.page()


def test_a_meaning_without_a_reason_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors.REASONS, "NEVER_GIVEN", ("", ""))
    with pytest.raises(ValueError, match="NEVER_GIVEN"):
        errors.page()


def test_the_chart_shows_the_data() -> None:
    shown = charts.CHART.read_text(encoding="utf-8")
    for workload, rates in charts.rates().items():
        assert len(rates) >= 5, workload
        for engine, rate in rates.items():
            assert f">{engine}<" in shown, "run `make charts`"
            assert f">{rate:,.1f}<" in shown, "run `make charts`"


@pytest.mark.parametrize(("data", "least"), [(charts.DATA, 60), (QUANTIZED, 30)])
def test_the_tables_of_the_benchmarks_have_the_data(data: Path, least: int) -> None:
    cells = re.findall(r"(?<=\| )[^|]+(?= \|)", BENCHMARKS)
    numbers = {float(number.replace(",", "")) for cell in cells for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)}
    with data.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > least
    for row in rows:
        for column in ("value", "percent_of_limit"):
            assert not row[column] or float(row[column]) in numbers, row
