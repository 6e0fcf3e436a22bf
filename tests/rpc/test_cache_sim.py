"""`quire cache-sim` prints what the classes that serve would have hit."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cache_manager.policies import POLICIES
from cache_manager.simulation import simulate
from rpc.cli.main import app

TRACE = Path(__file__).parents[2] / "rpc" / "loadgen" / "traces" / "mooncake_conversation_1000.jsonl"


def run(trace: Path, *flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cache-sim", "--trace", str(trace), *flags])
    return result.exit_code, result.output


def least_recently_used(requests: list[list[int]], capacity: int) -> int:
    """Hits, stated plainly: after a request its blocks are the most recent, its first block most of all."""
    order: list[int] = []  # most recent first
    hits = 0
    for ids in requests:
        for block in ids:
            if block not in order:
                break
            hits += 1
        order = (ids + [block for block in order if block not in set(ids)])[:capacity]
    return hits


def test_json_has_the_hit_rate_of_the_policy() -> None:
    requests = [json.loads(line)["hash_ids"] for line in TRACE.read_text().splitlines()]
    for policy, flags in (("reuse", []), ("lru", ["--policy", "lru"])):
        code, output = run(TRACE, "--capacity", "500", "--json", *flags)
        values = json.loads(output)
        savings = simulate(requests, 500, POLICIES[policy])
        assert code == 0
        assert values["hit_rate"] == savings.hits / sum(map(len, requests))
        assert (values["policy"], values["capacity"], values["requests"]) == (policy, 500, 1000)
        assert values["evicted_blocks"] == savings.evicted > 0


def test_least_recently_used_is_what_the_words_say() -> None:
    requests = [json.loads(line)["hash_ids"] for line in TRACE.read_text().splitlines()][:300]
    for capacity in (100, 400, 2000):
        assert simulate(requests, capacity, POLICIES["lru"]).hits == least_recently_used(requests, capacity)


def test_text_names_what_was_measured() -> None:
    code, output = run(TRACE, "--capacity", "500")
    assert code == 0
    assert "policy reuse" in output
    assert "500 blocks of cache" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1: must be an object"),
        ('{"hash_ids": [1]}\nnot json\n', "line 2: must be an object"),
        ('{"hash_ids": 7}\n', "must be a list of whole numbers"),
        ('{"hash_ids": [1, "a"]}\n', "must be a list of whole numbers"),
        ("[" * 100_000, "line 1: must be an object"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t").write_text(content)
    code, output = run(tmp_path / "t", "--capacity", "10")
    assert code == 1
    assert message in " ".join(output.split())


def test_an_empty_trace_and_a_tiny_cache_are_no_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert json.loads(run(tmp_path / "empty", "--capacity", "1", "--json")[1])["hit_rate"] == 0.0
    (tmp_path / "same").write_text('{"hash_ids": [5, 6, 7]}\n' * 4)
    assert json.loads(run(tmp_path / "same", "--capacity", "1", "--json")[1])["hit_blocks"] == 3


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    code, output = run(TRACE, "--capacity", "10", "--policy", "belady")
    assert code == 2
    assert "reuse, lru" in output
