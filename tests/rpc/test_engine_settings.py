"""An engine's settings survive the way to its process, and name the place where it runs."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.settings import POLICIES, CacheSettings
from model.settings import BACKENDS, DEVICES, DTYPES, KV_DTYPES, QUANTIZATIONS, ModelSettings
from rpc import hosts
from rpc.cli.options import flag_of
from rpc.cluster.host import RayHost
from rpc.engines.launchers import MODULE, Forker, Spawner
from rpc.engines.process import ProcessHost
from rpc.engines.thread import ThreadHost
from rpc.observe.settings import FORMATS
from rpc.settings import EngineConfig, EngineSettings, ServerSettings
from scheduler.settings import (
    MOST_DRAFTS,
    MOST_SEQUENCES,
    SCHEDULING_POLICIES,
    QueueLimits,
    RequestLimits,
    ScalingSettings,
    SchedulerSettings,
)
from tests.support.examples import examples

COUNT = st.integers(1, 2**62)
POSITIVE = st.floats(min_value=0.0, exclude_min=True, allow_infinity=True, allow_nan=False)
SEQUENCES = st.integers(1, MOST_SEQUENCES)
VALUES: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    ModelSettings: {
        "model": st.text(),
        "served_model_name": st.none() | st.text(),
        "dtype": st.sampled_from(DTYPES),
        "device": st.sampled_from(DEVICES),
        "page_size": COUNT,
        "kv_cache_memory": st.none() | COUNT,
        "gpu_memory_utilization": st.floats(0.01, 1.0),
        "host_cache_memory": st.none() | COUNT,
        "image_cache_memory": COUNT,
        "poison_freed_pages": st.booleans(),
        "verify_weights": st.booleans(),
        "kv_cache_dtype": st.sampled_from(KV_DTYPES),
        "quantization": st.none() | st.sampled_from(QUANTIZATIONS),
        "backend": st.sampled_from(BACKENDS),
        "kernel_cache": st.none() | st.text(),
        "logits_processors": st.none() | st.text(),
        "tensor_parallel": st.integers(1, 64),
        "tensor_parallel_timeout": st.floats(0.001, 1e6),
    },
    SchedulerSettings: {
        "max_batched_tokens": st.integers(MOST_SEQUENCES, 2**62),
        "max_sequences": SEQUENCES,
        "prefill_chunk": st.none() | COUNT,
        "steps_in_flight": st.integers(1, 2),
        "policy": st.sampled_from(SCHEDULING_POLICIES),
        "draft_tokens": st.integers(0, MOST_DRAFTS),
        "recompute": st.booleans(),
    },
    QueueLimits: {
        "requests": COUNT,
        "pools_of_tokens": POSITIVE,
        "wait": POSITIVE,
        "tenant_share": st.floats(0, 1, exclude_min=True),
    },
    RequestLimits: {
        "least_priority": st.integers(-100, 0),
        "stop_strings": st.integers(0, 2**62),
        "stop_string_bytes": st.integers(0, 2**62),
        "stop_token_ids": st.integers(0, 2**62),
        "logit_biases": st.integers(0, 2**62),
        "bad_words": st.integers(0, 2**62),
        "bad_word_tokens": st.integers(0, 2**62),
        "logits_processors_args_bytes": st.integers(0, 2**62),
        "structured_output_bytes": st.integers(0, 2**62),
        "top_logprobs": st.integers(0, 2**62),
        "sequence_count": COUNT,
        "beam_width": COUNT,
        "batch_requests": COUNT,
        "request_id_bytes": st.integers(32, 2**62),
    },
    CacheSettings: {
        "prefix_cache": st.booleans(),
        "eviction": st.sampled_from(POLICIES),
        "secret_file": st.none() | st.text(),
    },
}
HINTS = get_type_hints(EngineConfig)
VALUES[EngineConfig] = {
    **{name: st.builds(kind, **VALUES[kind]) for name, kind in HINTS.items() if kind in VALUES},
    "threads": st.none() | COUNT,
    "secret": st.binary().map(bytes.hex),
    "publishes_kv_events": st.booleans(),
    "engines_here": COUNT,
    "shows_metrics": st.booleans(),
    "log_format": st.sampled_from(FORMATS),
}


def check_survives(config: EngineConfig) -> None:
    line = config.to_json()
    assert "\n" not in line, "the process reads one line"
    line.encode("ascii")
    assert EngineConfig.from_json(line) == config


@pytest.mark.parametrize("kind", VALUES)
def test_every_setting_is_drawn(kind: type) -> None:
    """Else a new one would be lost on its way without a test that says so."""
    assert VALUES[kind].keys() == {f.name for f in fields(kind)}


@settings(max_examples=examples(200), deadline=None)
@given(st.builds(EngineConfig, **VALUES[EngineConfig]))
def test_a_config_survives_as_one_line_of_json(config: EngineConfig) -> None:
    check_survives(config)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(queue=QueueLimits(pools_of_tokens=math.inf, wait=math.inf), threads=3),
        EngineConfig(model=ModelSettings(model="mod\udce9le\n\x85\u2028", served_model_name="")),  # a file's raw bytes
    ],
)
def test_what_is_odd_survives(config: EngineConfig) -> None:
    check_survives(config)


def test_a_config_that_loses_a_setting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EngineConfig.to_json

    def without(config: EngineConfig) -> str:
        values = json.loads(whole(config))
        del values["scheduler"]["steps_in_flight"]
        return json.dumps(values)

    config = EngineConfig(scheduler=SchedulerSettings(steps_in_flight=2))
    check_survives(config)
    monkeypatch.setattr(EngineConfig, "to_json", without)
    with pytest.raises(AssertionError):
        check_survives(config)


def test_values_that_cannot_be_are_refused_on_the_other_side_too() -> None:
    values = json.loads(EngineConfig().to_json())
    values["queue"]["wait"] = 0
    with pytest.raises(ValueError, match="--max-queue-time is 0"):
        EngineConfig.from_json(json.dumps(values))


def test_the_servers_settings_reach_the_engine() -> None:
    server = ServerSettings(
        model=ModelSettings(model="m", dtype="float32"),
        scheduler=SchedulerSettings(max_sequences=3),
        queue=QueueLimits(requests=5),
        request=RequestLimits(stop_strings=9),
        cache=CacheSettings(prefix_cache=False),
    )
    parts = (server.model, server.scheduler, server.queue, server.request, server.cache)
    assert server.engine_config == EngineConfig(*parts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "cloud"}, "--engine is 'cloud', must be one of auto, thread, process"),
        ({"engine": ""}, "--engine is ''"),
        ({"engine": "thread", "ray": True}, "--engine thread and --ray exclude each other"),
        *(({"replicas": value}, f"--replicas is {value}, must be in") for value in (0, -1, 257)),
        ({"replicas": 2, "engine": "thread"}, "--replicas is 2: only one engine fits in a thread"),
        ({"engine": "thread", "ray_address": "h:1"}, "--engine thread and --ray exclude each other"),
        *(
            ({"ray_address": value}, f"--ray-address is '{value}', must be HOST:PORT")
            for value in ("auto", "ray://h:1")
        ),
        ({"ray_token_file": "f"}, "--ray-token-file is for a cluster that is there"),
        ({"spread": True, "ray": True}, "--spread is for a cluster that is there"),
        ({"ray_cpus": 2, "ray": True}, "--ray-cpus is for a cluster that is there"),
        *(({"ray_cpus": value, "ray_address": "h:1"}, f"--ray-cpus is {value}") for value in (0, -1.0, math.nan)),
        *(({"start": value}, f"--engine-start-timeout is {value}, must be above 0") for value in (0, -1.0, math.nan)),
        *(({"silence": value}, f"--engine-timeout is {value}, must be above 0") for value in (0.0, -0.5, math.nan)),
    ],
)
def test_wrong_settings_are_refused_by_their_flag(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        EngineSettings(**values)


def test_no_two_settings_share_a_flag() -> None:
    kinds = [kind for kind in get_type_hints(ServerSettings).values() if is_dataclass(kind)]
    assert EngineSettings in kinds
    flags = Counter(flag_of(setting) for kind in kinds for setting in fields(kind))
    assert [flag for flag, times in flags.items() if times > 1] == []


RAY, PROCESS = "rpc.cluster.driver", MODULE


@pytest.mark.parametrize("nvidia", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("engine", "ray"), [("auto", False), ("thread", False), ("process", False), ("auto", True), ("process", True)]
)
def test_the_settings_name_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia: bool, device: str, engine: str, ray: bool
) -> None:
    nodes = [tmp_path / "nvidiactl", tmp_path / "dxg"]
    monkeypatch.setattr(hosts, "NVIDIA", tuple(str(node) for node in nodes))
    if nvidia:
        nodes[1].touch()
    server = ServerSettings(model=ModelSettings(device=device), engine=EngineSettings(engine=engine, ray=ray))
    cuda = device == "cuda" or (device == "auto" and nvidia)
    expected = RAY if ray else PROCESS if engine == "process" or (engine == "auto" and cuda) else None
    (chosen,) = hosts.choose_hosts(server, b"secret")
    if expected is None:
        assert isinstance(chosen, ThreadHost)
    elif ray:
        assert isinstance(chosen, RayHost)
    else:
        assert isinstance(chosen, ProcessHost)
        assert chosen.settings == server.engine
        assert isinstance(chosen.launcher, Spawner if cuda or sys.platform != "linux" else Forker)
    assert chosen.config == replace(server.engine_config, secret=b"secret".hex())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelSettings(), "quire:quire-demo"),
        (ModelSettings(model="/models/llama"), "quire:llama"),
        (ModelSettings(model="meta/llama", served_model_name="mine"), "quire:mine"),
    ],
)
def test_a_ray_cluster_is_told_whose_engines_they_are(model: ModelSettings, name: str) -> None:
    (chosen,) = hosts.choose_hosts(ServerSettings(model=model, engine=EngineSettings(ray=True)), b"secret")
    assert isinstance(chosen, RayHost)
    assert chosen.cluster.name == name


@pytest.mark.parametrize("engine", ["auto", "process"])
def test_replicas_are_processes_that_share_the_machine_and_the_secret(engine: str) -> None:
    replicas = hosts.choose_hosts(ServerSettings(engine=EngineSettings(engine=engine, replicas=3)), b"secret")
    assert len(replicas) == 3
    for chosen in replicas:
        assert isinstance(chosen, ProcessHost)
        assert isinstance(replicas[0], ProcessHost)
        assert chosen.launcher is replicas[0].launcher, "each has a fork server of its own"
        assert (chosen.config.engines_here, chosen.config.secret) == (3, b"secret".hex())
        assert chosen.config.publishes_kv_events


@pytest.mark.parametrize(
    ("gpus", "shown", "replicas", "most", "device", "ray", "refused"),
    [
        (2, None, 2, None, "auto", False, "--replicas is 2: without --ray all engines would share the first of 2 GPUs"),
        (4, "0,2, 3", 2, None, "cuda", False, "the first of 3 GPUs"),
        (2, None, 1, 3, "auto", False, "--max-replicas is 3: without --ray"),
        (2, None, 1, None, "auto", False, ""),
        (2, None, 2, None, "cpu", False, ""),
        (2, None, 2, None, "cuda", True, ""),
        (1, None, 2, None, "cuda", False, ""),
        (2, "1", 2, None, "cuda", False, ""),
        (2, "0,-1,1", 2, None, "cuda", False, ""),
        (2, "", 2, None, "auto", False, ""),
    ],
)
def test_replicas_beside_several_gpus_need_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, shown: str | None, replicas: int, most: int | None,
    device: str, ray: bool, refused: str,
) -> None:  # fmt: skip
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (tmp_path / name).touch()
    monkeypatch.setattr(hosts, "NVIDIA", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(hosts, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    server = ServerSettings(
        model=ModelSettings(device=device),
        engine=EngineSettings(replicas=replicas, ray=ray),
        scaling=ScalingSettings(replicas=most),
    )
    if not refused:
        assert len(hosts.choose_hosts(server, b"")) == (most or replicas)
        return
    with pytest.raises(ValueError, match=re.escape(refused)):
        hosts.choose_hosts(server, b"")


def test_modules_that_hosts_run_exist() -> None:
    for name in (RAY, PROCESS):
        assert find_spec(name) is not None


@pytest.mark.parametrize("engine", ["engine='process'", "ray=True"])
def test_a_frontend_of_an_engine_elsewhere_imports_neither_torch_nor_ray(engine: str) -> None:
    code = (
        "import sys; from rpc.hosts import choose_hosts; from rpc.settings import *; "
        f"choose_hosts(ServerSettings(engine=EngineSettings({engine})), b''); "
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "set()"


def test_hosts_settings_are_not_the_engines() -> None:
    """A server's waits are no part of an engine's settings."""
    impatient = replace(EngineSettings(), start=1.0, silence=2.0)
    assert ServerSettings(engine=impatient).engine_config == ServerSettings().engine_config
