"""`quire simulate`, `quire plan` and `quire calibrate`, as they are called."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cache_manager.block_hash import Scope
from rpc.cli.main import app
from rpc.simulation.recorded import Trace
from scheduler.profile import Profile
from scheduler.replaying import Recording
from tests.rpc.test_recordings import run
from tests.scheduler.test_step_time import CPU
from tests.simulation.test_engine import COSTS, made
from tests.simulation.test_recorded import blueprint, served, submits


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "engine.json"
    patient = replace(made(), pages=400)
    path.write_text(json.dumps(Profile("small", "made up", 4096, COSTS, patient).to_json()))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace in Mooncake's format: 40 requests, of which each fourth begins like another."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 600, "output_length": 20, "hash_ids": [n % 4, 100 + n]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "engine.rec"
    path.write_text("".join(served_lines()))
    return path


def served_lines() -> list[str]:
    lines: list[str] = []
    served(submits(30, 8.0, 3), blueprint(), CPU, lines)
    return lines


def test_two_runs_give_one_digest_and_another_seed_another(trace: Path, profile: Path) -> None:
    asked = ("simulate", "--trace", str(trace), "--profile", str(profile), "--replicas", "3", "--router", "random")
    first, second, other = (json.loads(run(*asked, "--seed", seed, "--json").stdout) for seed in ("1", "1", "2"))
    assert first == second
    assert first["digest"] != other["digest"]
    assert first["engine"] == "small"
    assert first["figures"]["requests"] == 40
    assert first["figures"]["failed"] == 0


def test_the_page_needs_no_other_file(trace: Path, profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(
        "simulate",
        "--trace",
        str(trace),
        "--profile",
        str(profile),
        "--slo",
        "ttft=500ms,itl=0.1s",
        "--html",
        str(page),
    )
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    assert "within targets" in text
    assert "<svg" in text
    assert not re.search(r"<script|(?:src|href)=\"(?!#)", text)


def test_tenants_have_figures_in_text_json_and_on_the_page(trace: Path, profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ("simulate", "--trace", str(trace), "--profile", str(profile), "--html", str(page))
    assert json.loads(run(*asked, "--json").stdout)["tenants"] == []
    assert "TTFT by tenant" not in page.read_text()
    first, second = (json.loads(run(*asked, "--tenants", "12", "--json").stdout) for _ in range(2))
    assert first == second
    assert sum(one["requests"] for one in first["tenants"]) == 40
    assert len(first["tenants"]) <= 11
    largest = first["tenants"][0]
    assert largest["tenant"] == "tenant-1"
    assert largest["output tokens"] == 20 * largest["requests"]
    text = page.read_text()
    assert all(f">{word}<" in text for word in ("tenant-1", "tpot p99", "output tokens"))
    assert "<!-- TTFT by tenant -->" in text
    row = next(line for line in run(*asked, "--tenants", "12").stdout.splitlines() if line.startswith("tenant-1 "))
    assert row.split()[1] == str(largest["requests"])
    other = json.loads(run(*asked, "--tenants", "12", "--seed", "1", "--json").stdout)
    assert other["tenants"] != first["tenants"]


def test_a_files_name_is_no_formula(trace: Path, profile: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    named = shutil.copy(trace, tmp_path / rf"a$\frac$.{trace.name}")
    done = run("simulate", "--trace", str(named), "--profile", str(profile), "--html", str(page))
    assert done.exit_code == 0, done.stderr
    assert "<svg" in page.read_text()


def test_tenants_of_a_recording_are_kept(tmp_path: Path) -> None:
    coming = [
        (at, replace(one, request=replace(one.request, scope=Scope(tenant=("default", "Ann", "Bob")[number % 3]))))
        for number, (at, one) in enumerate(submits(30, 8.0, 3))
    ]
    lines: list[str] = []
    served(coming, blueprint(), CPU, lines)
    path = tmp_path / "engine.rec"
    path.write_text("".join(lines))
    found = json.loads(run("simulate", "--trace", str(path), "--json").stdout)["tenants"]
    assert {one["tenant"]: one["requests"] for one in found} == {"default": 10, "tenant-1": 10, "tenant-2": 10}
    done = run("simulate", "--trace", str(path), "--tenants", "3")
    assert done.exit_code == 1
    assert "--tenants does not go with a recording, whose requests have their own" in done.stderr


def test_faults_and_autoscaling_are_simulated(trace: Path, profile: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('[{"at": 1, "kind": "kill", "engine": 0}, {"at": 0, "kind": "slow", "engine": 1, "seconds": 2, '
                      '"factor": 3}]')  # fmt: skip
    asked = ("simulate", "--trace", str(trace), "--profile", str(profile), "--replicas", "2", "--json")
    calm = json.loads(run(*asked).stdout)["figures"]
    found = json.loads(run(*asked, "--faults", str(faults)).stdout)["figures"]
    assert (found["requests"], found["refused"], found["failed"]) == (40, 0, 0)
    assert found["first token, s, p99"] > calm["first token, s, p99"]
    eager = ("--max-replicas", "6", "--start-seconds", "0.5", "--scale-up-delay", "0", "--scale-queue", "0.05")
    grown = json.loads(run(*asked, "--faults", str(faults), *eager).stdout)["figures"]
    assert grown["first token, s, p99"] < found["first token, s, p99"]


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        (0, "stall", "fault 0: kind is 'stall', which only `quire serve --sim-faults` has"),
        (2, "slow", "fault 0: engine is 2, must be in [0, 2), as --replicas is 2"),
    ],
)
def test_faults_that_a_simulation_does_not_have_are_refused(
    trace: Path, profile: Path, tmp_path: Path, engine: int, kind: str, said: str
) -> None:
    faults = tmp_path / "faults.json"
    more = {"seconds": 1, "factor": 2} if kind == "slow" else {"seconds": 1}
    faults.write_text(json.dumps([{"at": 1, "kind": kind, "engine": engine, **more}]))
    asked = ("simulate", "--trace", str(trace), "--profile", str(profile), "--replicas", "2", "--faults", str(faults))
    done = run(*asked)
    assert (done.exit_code, done.stderr) == (1, f"quire: {faults}: {said}\n")
    if kind == "slow":
        assert run(*asked, "--max-replicas", "3").exit_code == 0


def test_a_recording_gives_what_replay_says(recording: Path) -> None:
    asked = ("--pages", "+50%", "--json")
    simulated = json.loads(run("simulate", "--trace", str(recording), *asked).stdout)["figures"]
    replayed = json.loads(run("replay", str(recording), *asked).stdout)["with changes"]
    assert simulated == replayed


def test_a_calibrated_profile_stands_for_the_recorded_engine(recording: Path, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    done = run("calibrate", str(recording), "--output", str(path), "--name", "mine")
    assert done.exit_code == 0, done.stderr
    assert re.fullmatch(r".*mine\.json: Fitted to \d+ recorded steps; half .* within \d+\.\d%\.\n", done.stdout)
    written = Profile.from_json(json.loads(path.read_text()))
    known = Trace.of(Recording.parse(served_lines()))
    assert (written.name, written.costs, written.blueprint) == ("mine", known.costs, known.blueprint)
    found = json.loads(run("simulate", "--trace", str(trace), "--profile", str(path), "--json").stdout)
    assert found["engine"] == "mine"
    assert found["shrink"] == 1.0


def test_a_recording_is_not_served_with_other_pages(recording: Path, tmp_path: Path) -> None:
    """It knows its prompts by the hashes of its own pages."""
    other, path = blueprint(), tmp_path / "other.json"
    other = replace(other, layout=replace(other.layout, page_size=32))
    path.write_text(json.dumps(Profile("other", "made up", 4096, COSTS, other).to_json()))
    done = run("simulate", "--trace", str(recording), "--profile", str(path))
    assert done.exit_code == 1
    assert "other has pages of 32 tokens, and the recording knows its prompts by pages of 16" in done.stderr


def test_a_plan_names_the_fewest_and_shows_changes(trace: Path, profile: Path) -> None:
    asked = ("plan", "--trace", str(trace), "--profile", str(profile), "--slo", "ttft=300ms", "--percentile", "90")
    done = run(*asked, "--most", "6")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(run(*asked, "--most", "6", "--json").stdout)
    assert answer["replicas"] > 1
    assert f"{answer['replicas']} engines serve 90 % of the requests within ttft=300ms" in done.stdout
    assert {one["change"] for one in answer["trials"]} >= {"", "+50% pages", "policy deadline"}
    few = run(*asked, "--most", "1", "--percentile", "100")
    assert few.exit_code == 1
    assert "1 engine does not serve 100 %" in few.stdout
    easy = run("plan", "--trace", str(trace), "--profile", str(profile), "--slo", "ttft=100s")
    assert "1 engine serves 99 % of the requests within ttft=100s" in easy.stdout


def test_changes_of_a_plan_stand_on_one_line_of_80_columns(trace: Path, profile: Path) -> None:
    asked = ["plan", "--trace", str(trace), "--profile", str(profile), "--slo", "ttft=300ms", "--percentile", "90"]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    for change in ("policy fair-deadline", "router least-requests"):
        assert any(change in line for line in lines), done.stdout
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "missing.csv"), "missing.csv"),
        (("--trace", "missing.rec"), "missing.rec"),
        (("--format", "best"), "--format is 'best', must be one of azure, mooncake, recorded"),
        (("--speed", "0"), "--speed is 0.0, must be above 0"),
        (("--profile", "best"), "best is neither a file nor one of the profiles llama-3.1-8b-h100"),
        (("--router", "best"), "--router is 'best', must be one of cost, least-requests, random, round-robin"),
        (("--slo", "ttft=fast"), "--slo is 'ttft=fast', must be ttft=TIME, itl=TIME or both"),
        (("--faults", "missing.json"), "missing.json"),
        (("--start-seconds", "-1"), "--start-seconds is -1.0, must be in [0, 10,000,000] seconds"),
    ],
)
def test_wrong_settings_are_refused(trace: Path, profile: Path, arguments: tuple[str, str], message: str) -> None:
    base = {"--trace": str(trace), "--profile": str(profile)} | dict([arguments])
    done = run("simulate", *(word for pair in base.items() for word in pair))
    assert done.exit_code == 1
    assert done.stderr.startswith("quire: ")
    assert message in done.stderr


def test_lengths_are_shrunk_to_what_the_pages_hold_and_that_is_said(trace: Path, profile: Path) -> None:
    done = run("simulate", "--trace", str(trace), "--profile", str(profile), "--pages", "10")
    assert done.exit_code == 0, done.stderr
    assert "lengths: times 0.2" in done.stderr
