"""Settings of simulated engines: what comes from the profile, what is refused, and what is not imported."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from model.settings import ModelSettings, SimulationSettings
from rpc.cli.main import app
from rpc.cli.profile_defaults import profile_defaults, with_profile
from rpc.engines.assembly import assemble
from rpc.engines.faulty import FaultyHost
from rpc.engines.simulated import blueprint_of, check_simulated
from rpc.hosts import choose_hosts
from rpc.settings import EngineConfig, EngineSettings, ServerSettings
from scheduler.profile import read_profile
from scheduler.scaling_settings import ScalingSettings
from scheduler.settings import RequestLimits, SchedulerSettings

NAME = "sim:llama-3.1-8b-h100"
PROFILE = read_profile("llama-3.1-8b-h100")
PAGE_BYTES = PROFILE.blueprint.layout.page_bytes


def values_of(*arguments: str) -> dict[str, Any]:
    """Returns the values of `quire serve` with these arguments, after the profile's."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", [*arguments])
    return with_profile(context, context.params)  # type: ignore[arg-type]


def test_the_profile_has_defaults_and_flags_come_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("max-queue = 7\n")
    monkeypatch.setenv("QUIRE_EVICTION_POLICY", "lru")
    given = ("--max-batched-tokens", "512", "--config", str(file))  # 512 is Quire's own default, and still given
    values = values_of("--model", NAME, *given)
    own = {"max_batched_tokens": 512, "max_queue": 7, "eviction_policy": "lru"}
    assert {name: values[name] for name in profile_defaults(PROFILE)} == profile_defaults(PROFILE) | own
    assert values_of(*given)["steps_in_flight"] is None, "the demo model has no profile"


def test_the_pool_is_the_profiles_or_the_settings() -> None:
    def pool(**settings: Any) -> tuple[int, int]:
        config = EngineConfig(ModelSettings(NAME, **settings), SchedulerSettings(8192))
        blueprint = blueprint_of(config, PROFILE)
        return blueprint.pages, blueprint.layout.page_size

    pages = PROFILE.blueprint.pages
    assert pool() == (pages, 16)
    assert pool(page_size=32) == (pages // 2, 32), "the same bytes"
    assert pool(kv_cache_memory=100 * PAGE_BYTES + 1) == (100, 16)
    host = replace(PROFILE, blueprint=replace(PROFILE.blueprint, host_slots=100))
    for page_size, slots in ((16, 100), (32, 50)):
        config = EngineConfig(ModelSettings(NAME, page_size=page_size), SchedulerSettings(8192))
        assert blueprint_of(config, host).host_slots == slots
    with pytest.raises(ValueError, match=f"--kv-cache-memory is 9 bytes: a page of the profile takes {PAGE_BYTES}"):
        pool(kv_cache_memory=9)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(ModelSettings(NAME, quantization="int8")), "--quantization does nothing with --model sim:llama"),
        (EngineConfig(ModelSettings(NAME, tensor_parallel=2)), "--tensor-parallel does nothing"),
        (EngineConfig(ModelSettings(NAME, kv_cache_dtype="fp8")), "--kv-cache-dtype does nothing"),
        (EngineConfig(ModelSettings(NAME, "llama")), "--served-model-name is 'llama', must begin with sim:"),
        (EngineConfig(ModelSettings(NAME), SchedulerSettings(recompute=True)), "--recompute does nothing"),
        (EngineConfig(ModelSettings(NAME), request=RequestLimits(top_logprobs=65)), "--max-top-logprobs needs 65"),
        (EngineConfig(ModelSettings(NAME), request=RequestLimits(beam_width=33)), "--max-beam-width needs 66"),
    ],
)
def test_settings_that_do_nothing_are_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_simulated(config)


def test_a_simulated_engine_may_have_another_name_of_its_kind() -> None:
    check_simulated(EngineConfig(ModelSettings(NAME, "sim:router-test", page_size=32, kv_cache_memory=2**30)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": 0.0}, "--sim-speed is 0.0"),
        ({"speed": float("nan")}, "--sim-speed is nan"),
        ({"output_tokens": 0.5}, "--sim-output-tokens is 0.5, must be 0 or in"),
        ({"output_tokens": float("inf")}, "--sim-output-tokens is inf"),
    ],
)
def test_settings_of_the_simulation_have_bounds(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationSettings(**values)


def test_settings_of_the_simulation_are_for_simulated_engines() -> None:
    for given in (SimulationSettings(speed=2.0), SimulationSettings(faults="faults.json")):
        with pytest.raises(ValueError, match="--sim-output-tokens and --sim-faults are for simulated engines"):
            ServerSettings(simulation=given)


def with_faults(path: Path, **engines: Any) -> ServerSettings:
    """A server whose engine 1 is killed, and slow before that."""
    killed = {"at": 9, "kind": "kill", "engine": 1}
    path.write_text(json.dumps([killed, {"at": 1, "kind": "slow", "engine": 1, "seconds": 2, "factor": 3}]))
    return ServerSettings(
        ModelSettings(NAME), engine=EngineSettings(**engines), simulation=SimulationSettings(faults=str(path))
    )


def test_engines_with_faults_are_processes(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    chosen = choose_hosts(with_faults(path, replicas=3), b"")
    kinds = [[fault.kind for fault in host.left] for host in chosen if isinstance(host, FaultyHost)]
    assert kinds == [[], ["slow", "kill"], []], "each place has its own, in the order of their times"
    path.write_text("[]")
    alone = ServerSettings(ModelSettings(NAME), simulation=SimulationSettings(faults=str(path)))
    assert [type(host) for host in choose_hosts(alone, b"")] == [FaultyHost]


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ({}, r"faults\.json: fault 0: engine is 1, must be in \[0, 1\), as --replicas is 1"),
        ({"replicas": 2, "ray": True}, "--sim-faults is for engines in processes of their own, not for those in a Ray"),
    ],
)
def test_faults_that_cannot_happen_are_refused(tmp_path: Path, engines: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_hosts(with_faults(tmp_path / "faults.json", **engines), b"")


def test_faults_of_an_engine_in_a_thread_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    server = replace(with_faults(path), engine=EngineSettings("thread"))
    path.write_text("[]")
    with pytest.raises(ValueError, match="not for those in a thread"):
        choose_hosts(server, b"")


def test_engines_that_the_autoscaler_may_add_have_faults(tmp_path: Path) -> None:
    server = with_faults(tmp_path / "faults.json")
    assert len(choose_hosts(replace(server, scaling=ScalingSettings(replicas=2)), b"")) == 2


def test_devices_are_not_for_simulated_engines() -> None:
    with pytest.raises(ValueError, match="--devices"):
        choose_hosts(ServerSettings(ModelSettings(NAME), engine=EngineSettings(devices="0")), b"")


def test_python_does_not_load_a_simulated_model() -> None:
    with pytest.raises(ValueError, match=f"--model {NAME} is simulated, and has no weights"):
        assemble(EngineConfig(ModelSettings(NAME)))


def test_no_memory_is_estimated_for_it() -> None:
    done = CliRunner().invoke(app, ["estimate", "--model", NAME])
    assert done.exit_code == 1
    assert f"--model {NAME} is simulated: its profile says" in done.stderr


def test_a_simulated_engine_needs_no_torch() -> None:
    """Neither to run a request, nor for its frontend."""
    program = (
        "import sys, queue, json\n"
        "import numpy as np\n"
        "from rpc.engines.engine_process import make_engine\n"
        "from rpc.frontend.prepare import load_preparer\n"
        "from rpc.settings import EngineConfig\n"
        "from scheduler.controls import Controls\n"
        "from scheduler.events import Submit\n"
        "from scheduler.request import Request\n"
        "config, found = EngineConfig.from_json(sys.argv[1]), queue.Queue()\n"
        "load_preparer(config.model).close()\n"
        "engine = make_engine(config, found.put)\n"
        "engine.start()\n"
        "prompt = np.arange(300, 310, dtype=np.int32)\n"
        "engine.send([Submit(1, Request(prompt, 3, (0,), Controls(0.0, 1.0, 0, 0.0, 0)))])\n"
        "while not found.get(timeout=60).ends:\n"
        "    pass\n"
        "engine.stop()\n"
        "print(json.dumps(sorted({'torch', 'ray', 'triton', 'transformers'} & set(sys.modules))))\n"
    )
    config = EngineConfig(ModelSettings(NAME), SchedulerSettings(8192), simulation=SimulationSettings(speed=1e3))
    done = subprocess.run(
        [sys.executable, "-c", program, config.to_json()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert "SIMULATED: no model answers" in done.stderr


def test_a_profile_of_ones_own_is_served(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(replace(PROFILE, name="mine", context=500).to_json()))
    values = values_of("--model", f"sim:{path}")
    assert values["max_batched_tokens"] == PROFILE.blueprint.settings.max_batched_tokens
