"""Traces of real services are read as they are, and what is none is refused with its line."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.loadgen.traces import KNOWN, OURS, Arrival, read_trace, scaled, shrink_of


def test_traces_that_come_with_quire() -> None:
    azure, mooncake = read_trace("azure-conv"), read_trace("mooncake")
    assert (len(azure), len(mooncake)) == (200, 1000)
    assert azure[0] == Arrival(0.0, 374, 44)
    assert azure[-1].at == pytest.approx(61.263537)
    assert mooncake[0] == Arrival(0.0, 6758, 500, tuple(range(14)))
    assert all(-(-a.prompt // 512) == len(a.blocks) for a in mooncake)
    for trace in (azure, mooncake):
        assert [a.at for a in trace] == sorted(a.at for a in trace)
    readme = (OURS / "README.md").read_text()
    assert all(path.name in readme for path in KNOWN.values())
    assert "CC-BY 4.0" in readme
    assert "Splitwise" in readme


def test_rows_are_counted_and_cut() -> None:
    path = KNOWN["azure-conv"]
    assert len(read_trace(path)) == len(path.read_text().splitlines()) - 1
    assert read_trace(path, 7) == read_trace(path)[:7]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
OBJECT = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


def test_users_files_may_be_out_of_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD + "2024-05-10 00:00:02+00:00,9,0\n" + "2024-05-10 00:00:00.5+00:00,8,3\n")
    assert read_trace(tmp_path / "a.csv") == [Arrival(0.0, 8, 3), Arrival(1.5, 9, 0)]
    (tmp_path / "b.jsonl").write_text(OBJECT + '\n{"timestamp": 500, "input_length": 3, "output_length": 1}\n')
    assert read_trace(tmp_path / "b.jsonl") == [Arrival(0.0, 3, 1), Arrival(1.0, 600, 5, (1, 2))]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIME,ContextTokens\n", "line 1: must have the columns"),
        ("a.csv", HEAD + ROW + "yesterday,3,4\n", "line 3:"),
        ("a.csv", HEAD + ROW + ROW + "2023-11-16 18:15:46,3\n", "line 4:"),
        ("a.csv", HEAD + "2023-11-16 18:15:46,-3,4\n", "line 2:"),
        ("a.csv", HEAD, "has no request"),
        ("a.jsonl", OBJECT + "[1]\n", "line 2:"),
        ("a.jsonl", OBJECT + "\n" + OBJECT.replace("600", "6.5"), "line 3:"),
        ("a.jsonl", OBJECT.replace("[1, 2]", '["x"]'), "line 1:"),
        ("a.jsonl", OBJECT.replace("1500", "NaN"), "line 1:"),
        ("a.jsonl", OBJECT.replace("1500", "true"), "line 1:"),
        ("a.txt", "", "must be one of azure-conv, mooncake, or a file"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_trace(tmp_path / name)


LENGTHS = st.builds(Arrival, st.floats(0, 100), st.integers(0, 5000), st.integers(0, 2000))


@given(st.lists(LENGTHS, min_size=1), st.integers(16, 8192) | st.none(), st.floats(0.1, 10))
def test_scaled_requests_fit_and_keep_their_proportions(
    arrivals: list[Arrival], context: int | None, speed: float
) -> None:
    shrunk, factor = scaled(arrivals, context, speed), shrink_of(arrivals, context)
    for before, after in zip(arrivals, shrunk, strict=True):
        assert after.prompt >= 1
        assert after.output >= 1
        assert context is None or after.prompt + after.output <= max(context, 2)
        assert after.at == before.at / speed
        assert abs(after.prompt - before.prompt * factor) <= 1
        assert abs(after.output - before.output * factor) <= 1
    if context is None or max(a.prompt + a.output for a in arrivals) < context:
        assert [(max(1, a.prompt), max(1, a.output)) for a in arrivals] == [(a.prompt, a.output) for a in shrunk]
