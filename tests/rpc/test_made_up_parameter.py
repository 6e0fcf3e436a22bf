"""A new request parameter is one entry of the table, and its fields in the two protos and in `Controls`.

`tests.support.made_up_parameter` adds these four lines, and no other, to the code that it imports.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.controls import Controls, LogitsParams
from scheduler.parameters import PARAMETERS

ROOT = Path(__file__).parents[2]
OUT_OF_RANGE = "must be in [0, 5], 0 is off"
SERVERS_OWN = f"sampling.made_up is 9.0: {OUT_OF_RANGE}"
CLIENTS = f"made_up is 9.0: {OUT_OF_RANGE}"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[float | str]]:
    """Returns for each way in what becomes of 2.5, and of 9, which is out of range."""
    command = [sys.executable, "-m", "tests.support.made_up_parameter"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float | str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("way", "refusal"),
    [
        ("from_python", SERVERS_OWN),
        ("from_message", SERVERS_OWN),
        ("from_client", SERVERS_OWN),
        ("from_completion", CLIENTS),
        ("from_chat", CLIENTS),
        ("from_open_inference", CLIENTS),
        ("from_batch_line", SERVERS_OWN),
        ("from_openai_batch_line", SERVERS_OWN),
        ("from_flags", SERVERS_OWN),
        ("from_terminal", SERVERS_OWN),
        ("to_a_request", SERVERS_OWN),
        ("across_the_link", SERVERS_OWN),
    ],
)
def test_a_made_up_parameter_arrives_or_is_refused_by_name(
    way: str, refusal: str, outcomes: dict[str, list[float | str]]
) -> None:
    assert outcomes[way] == [2.5, refusal]


def test_where_nobody_asks_for_it_it_changes_nothing(outcomes: dict[str, list[float | str]]) -> None:
    assert outcomes["where_nobody_asks"] == [0.0, 0.0]


def test_a_search_refuses_it(outcomes: dict[str, list[float | str]]) -> None:
    assert outcomes["in_a_search"][0] == "sampling.made_up is 2.5: does not go with sampling.beam_search"


def test_the_wrong_class_says_where_it_is(outcomes: dict[str, list[float | str]]) -> None:
    assert outcomes["in_the_wrong_class"][0] == "Stopping() has no made_up: Sampling(made_up=...)"


def test_the_reference_has_it(outcomes: dict[str, list[float | str]]) -> None:
    assert outcomes["on_the_page"] == [0.0, 0.0]


def test_the_dashboard_has_a_form_of_its_own(outcomes: dict[str, list[float | str]]) -> None:
    """It would need the name in `FIELDS` of `rpc/web/prompts.py`, and an input on the page."""
    assert outcomes["from_dashboard"] == ["made_up is not known", "made_up is not known"]


def test_every_control_of_the_table_is_there() -> None:
    known = Controls.__dataclass_fields__.keys() | LogitsParams.__dataclass_fields__.keys()
    assert {entry.control for entry in PARAMETERS if entry.control} <= known
