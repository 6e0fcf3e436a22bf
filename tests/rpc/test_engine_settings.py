"""An engine's settings survive the way to its process, and name the place where it runs."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.settings import POLICIES, CacheSettings
from model.settings import BACKENDS, DEVICES, DTYPES, KV_DTYPES, QUANTIZATIONS, ModelSettings, SimulationSettings
from model.simulated.faults import SLOW, STALL, Fault
from rpc import hosts
from rpc.cli.options import flag_of
from rpc.cluster.host import RayHost
from rpc.engines import gpus
from rpc.engines.launchers import MODULE, Forker, Spawner, fork_order
from rpc.engines.process import ProcessHost
from rpc.engines.thread import ThreadHost
from rpc.observe.settings import FORMATS
from rpc.settings import EngineConfig, EngineSettings, ServerSettings
from scheduler.settings import (
    MOST_AGEING,
    MOST_BACKFILL,
    MOST_CONSERVATIVENESS,
    MOST_DRAFTS,
    MOST_PREEMPTIONS,
    MOST_SEQUENCES,
    SCHEDULING_POLICIES,
    QueueLimits,
    RecordSettings,
    RequestLimits,
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
        "max_batched_tokens": st.none() | st.integers(MOST_SEQUENCES, 2**62),
        "max_sequences": SEQUENCES,
        "prefill_chunk": st.none() | COUNT,
        "steps_in_flight": st.integers(1, 2),
        "policy": st.sampled_from(SCHEDULING_POLICIES),
        "target_itl": st.none() | st.floats(0.001, 10),
        "tenant_weights": st.none() | st.from_regex(r"[a-z]{1,9}=[1-9]", fullmatch=True),
        "priority_ageing": st.floats(0, MOST_AGEING),
        "backfill_time": st.floats(0, MOST_BACKFILL),
        "schedule_conservativeness": st.floats(0, MOST_CONSERVATIVENESS),
        "max_preemptions": st.integers(0, MOST_PREEMPTIONS),
        "draft_tokens": st.integers(0, MOST_DRAFTS),
        "jump_forward": st.booleans(),
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
    RecordSettings: {"file": st.text(), "steps": COUNT, "tokens": st.booleans()},
    SimulationSettings: {
        "speed": st.floats(0.001, 1000.0),
        "output_tokens": st.just(0.0) | st.floats(1.0, 1e6),
        "faults": st.none() | st.text(),
    },
    Fault: {
        "at": st.floats(0, 1e9) | st.integers(0, 9),
        "kind": st.sampled_from((SLOW, STALL)),
        "engine": st.integers(0, 2**62),
        "seconds": st.floats(0, 1e9),
        "factor": st.floats(1e-3, 1e6),
    },
}
HINTS = get_type_hints(EngineConfig)
VALUES[EngineConfig] = {
    **{name: st.builds(kind, **VALUES[kind]) for name, kind in HINTS.items() if kind in VALUES},
    "threads": st.none() | COUNT,
    "secret": st.binary().map(bytes.hex),
    "publishes_kv_events": st.booleans(),
    "engines_here": COUNT,
    "engines_on_gpu": COUNT,
    "shows_metrics": st.booleans(),
    "log_format": st.sampled_from(FORMATS),
    "step_faults": st.lists(st.builds(Fault, **VALUES[Fault]), max_size=3).map(tuple),
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
        record=RecordSettings("file", 7, tokens=True),
    )
    parts = (server.model, server.scheduler, server.queue, server.request, server.cache)
    assert server.engine_config == EngineConfig(*parts, record=server.record)


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


GPUS_OF_ENGINES = [
    # GPUs, CUDA_VISIBLE_DEVICES, engines, ranks of each, --devices; the GPUs of each engine, and engines on one
    (2, None, 2, 1, None, ["0", "1"], 1),
    (4, "3,1, 2", 2, 1, None, ["3", "1"], 1),
    (4, None, 2, 2, None, ["0,1", "2,3"], 1),
    (4, "GPU-a,GPU-b", 2, 1, None, ["GPU-a", "GPU-b"], 1),
    (2, None, 1, 1, None, [None], 1),
    (1, None, 2, 1, None, [None, None], 2),
    (2, "1", 2, 1, None, [None, None], 2),
    (2, "0,-1,1", 2, 1, None, [None, None], 2),
    (2, "", 2, 1, None, [None, None], 2),
    (4, None, 2, 1, "3;1", ["3", "1"], 1),
    (4, None, 2, 2, "3, 1;0,2", ["3,1", "0,2"], 1),
    (2, None, 3, 1, "0;1;0", ["0", "1", "0"], (2, 1, 2)),
    (1, "MIG-a,MIG-b", 2, 1, None, ["MIG-a", "MIG-b"], 1),
    (2, "0,5,1", 2, 1, None, [None, None], 2),
    (0, None, 2, 1, "0;1", ["0", "1"], 1),
    (0, None, 2, 1, None, [None, None], 2),
    (2, None, 1, 1, "1", ["1"], 1),
    (2, None, 1, 1, "GPU-a", ["GPU-a"], 1),
]


def server_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, shown: str | None, engines: int, ranks: int,
    devices: str | None, device: str = "cuda", **more: Any,
) -> ServerSettings:  # fmt: skip
    """Settings of a server on a machine with GPUs."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(there))):
        (tmp_path / name).touch()
    monkeypatch.setattr(hosts, "NVIDIA", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    model = ModelSettings(device=device, tensor_parallel=ranks)
    return ServerSettings(model=model, engine=EngineSettings(replicas=engines, devices=devices, **more))


@pytest.mark.parametrize(("there", "shown", "engines", "ranks", "devices", "expected", "sharing"), GPUS_OF_ENGINES)
def test_each_engine_has_gpus_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, shown: str | None, engines: int, ranks: int,
    devices: str | None, expected: list[str | None], sharing: int | tuple[int, ...],
) -> None:  # fmt: skip
    chosen = hosts.choose_hosts(server_beside(tmp_path, monkeypatch, there, shown, engines, ranks, devices), b"")
    assert len(chosen) == engines
    each = sharing if isinstance(sharing, tuple) else (sharing,) * engines
    for host, names, beside in zip(chosen, expected, each, strict=True):
        assert isinstance(host, ProcessHost)
        assert host.environment == ({} if names is None else {"CUDA_VISIBLE_DEVICES": names})
        assert (host.config.engines_on_gpu, host.config.engines_here) == (beside, engines)


@pytest.mark.parametrize(
    ("there", "engines", "ranks", "devices", "said"),
    [
        (2, 3, 1, None, "--replicas is 3, --tensor-parallel 1: that takes 3 GPUs, there are 2. Lower one"),
        (3, 2, 2, None, "that takes 4 GPUs, there are 3"),
        (2, 2, 1, "0", "--devices is '0', which is for 1 engines: --replicas is 2"),
        (2, 1, 2, "0", "--devices is '0': with --tensor-parallel 2 each engine takes 2 GPUs"),
        (2, 1, 2, "1,1", "with --tensor-parallel 2 each engine takes 2 GPUs"),
        (2, 1, 1, "2", "--devices names GPU 2, there are 0, 1"),
        (2, 2, 1, "0;", "--devices is '0;': '' names no GPU"),
        (2, 1, 1, "-1", "'-1' names no GPU"),
        (2, 1, 1, "0 1", "'0 1' names no GPU"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, engines: int, ranks: int, devices: str | None,
    said: str,
) -> None:  # fmt: skip
    server = server_beside(tmp_path, monkeypatch, there, None, engines, ranks, devices)
    with pytest.raises(ValueError, match=re.escape(said)):
        hosts.choose_hosts(server, b"")


def test_devices_are_gpus_even_where_torch_sees_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (chosen,) = hosts.choose_hosts(server_beside(tmp_path, monkeypatch, 2, None, 1, 1, "1", device="auto"), b"")
    assert isinstance(chosen, ProcessHost)
    assert chosen.config.model.device == "cuda"


def test_devices_are_for_engines_that_are_processes_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_beside(tmp_path, monkeypatch, 2, None, 2, 1, "0;1", device="cpu")
    with pytest.raises(ValueError, match="--devices is '0;1', but engines run on a CPU"):
        hosts.choose_hosts(server, b"")
    for more in ({"ray": True}, {"engine": "thread"}):
        with pytest.raises(ValueError, match="Ray places its engines itself, and one in a thread"):
            EngineSettings(devices="0", **more)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_an_engines_process_sees_its_gpus() -> None:
    process = await Spawner().start("unix:/nowhere", {"CUDA_VISIBLE_DEVICES": "3,1"})
    try:
        assert psutil.Process(process.pid).environ()["CUDA_VISIBLE_DEVICES"] == "3,1"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def test_a_forked_process_gets_the_variables_too() -> None:
    order = fork_order("unix:/nowhere", {"CUDA_VISIBLE_DEVICES": "3,1"})
    assert order.environment == {**os.environ, "CUDA_VISIBLE_DEVICES": "3,1"}


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
