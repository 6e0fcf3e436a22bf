"""The benchmark of the whole server compares the same work."""

import asyncio
import re

import pytest

from bench.whole_server import compare, engine_alone
from rpc.paths import demo_directory


@pytest.mark.slow
def test_a_round_is_the_same_number_of_tokens_with_and_without_a_server(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(compare(demo_directory(), 3, 16, 2, 1))
    told = capfd.readouterr().out
    figures = re.search(r"alone ([\d,]+) tokens/s, served ([\d,]+); a round took ([\d.]+) times as long", told)
    assert figures is not None, told
    assert all(float(figure.replace(",", "")) > 0 for figure in figures.groups())


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(RuntimeError, match="did not start"), engine_alone(demo_directory() / "nothing"):
        pass
