"""Chooses where a server's engines run: in a thread, in processes of this machine, or in a Ray cluster.

It is no part of `rpc.engines`, which knows nothing of Ray. Imports neither torch nor ray.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from model.settings import ModelSettings
from model.simulated.faults import Fault, read_faults
from model.simulated.naming import is_simulated
from rpc.cluster.host import RayCluster, RayHost
from rpc.engines.faulty import FaultyHost
from rpc.engines.gpus import EngineGpus, gpus_of_engines
from rpc.engines.host import EngineHost
from rpc.engines.launchers import SIMULATED, Forker, Launcher, Spawner
from rpc.engines.process import ProcessHost
from rpc.engines.simulated import check_simulated
from rpc.engines.thread import ThreadHost
from rpc.paths import model_name
from rpc.settings import EngineConfig, EngineSettings, ServerSettings

NVIDIA = ("/dev/nvidiactl", "/dev/dxg")  # Linux; Windows' subsystem for it


def choose_hosts(settings: ServerSettings, secret: bytes) -> list[EngineHost]:
    """Returns a host for each engine that the settings allow.

    Args:
        settings: Settings of the server.
        secret: Key of the engines' block hashes.

    Raises:
        ValueError: The settings contradict each other, or do not fit this machine.
        OSError: The file of faults cannot be read.
    """
    engine, most = settings.engine, settings.most_replicas
    config = replace(settings.engine_config, secret=secret.hex(), publishes_kv_events=most > 1, engines_here=most)
    apart = engine.metrics_targets is not None
    simulated = is_simulated(settings.model.model)
    config = replace(config, shows_metrics=apart)
    if simulated:
        check_simulated(config)  # before a process is started for it
        config = replace(config, model=replace(config.model, device="cpu"))
    faulty, faults = settings.simulation.faults is not None, _faults_of(settings)
    if faulty and (engine.in_ray or engine.engine == "thread"):
        place = "a Ray cluster" if engine.in_ray else "a thread (--engine)"
        raise ValueError(f"--sim-faults is for engines in processes of their own, not for those in {place}")
    if engine.in_ray:
        if engine.ray_address is not None:
            config = replace(config, engines_here=1)  # the driver sets it once it knows the engine's node
        processes = most * settings.model.tensor_parallel
        cluster = RayCluster(engine, processes, _name_of(settings.model), settings.observe.log_format)
        return [RayHost(number, cluster, config, engine) for number in range(most)]
    if engine.devices is not None:
        if config.model.device == "cpu":
            raise ValueError(f"--devices is {engine.devices!r}, but engines run on a CPU (--device)")
        config = replace(config, model=replace(config.model, device="cuda"))  # not on a CPU because torch sees none
    gpus = EngineGpus((None,) * most, (1,) * most)
    if _may_use_cuda(config.model.device):
        gpus = gpus_of_engines(most, settings.replicas_flag, settings.model.tensor_parallel, engine.devices)
    shared = settings.sharing.address is not None
    if most > 1 and engine.engine == "thread":
        raise ValueError(f"--max-replicas is {most}: only one engine fits in a thread of the server's process")
    if shared and engine.engine == "thread":
        raise ValueError("--join-address: other processes cannot use an engine in a thread of this one (--engine)")
    if apart and engine.engine == "thread":
        raise ValueError(
            "--metrics-targets: an engine in a thread of this process has no metrics of its own (--engine)"
        )
    if most > 1 or shared or apart or faulty or engine.engine == "process" or _chooses_process(engine, config):
        launcher = choose_launcher(config.model.device, SIMULATED if simulated else None)
        places = [
            ProcessHost(launcher, replace(config, engines_on_gpu=sharing), engine, _environment(names))
            for names, sharing in zip(gpus.names, gpus.sharing, strict=True)
        ]
        if not faulty:
            return [*places]
        return [FaultyHost(place, [f for f in faults if f.engine == n]) for n, place in enumerate(places)]
    return [ThreadHost(config)]


def _faults_of(settings: ServerSettings) -> tuple[Fault, ...]:
    """Reads the faults of simulated engines. Raises as `choose_hosts`."""
    file = settings.simulation.faults
    return () if file is None else read_faults(Path(file), settings.most_replicas, settings.replicas_flag)


def choose_launcher(device: str, modules: Sequence[str] | None = None) -> Launcher:
    """Chooses how processes of engines start: forked where that is safe, else spawned.

    A fork is not safe on a GPU: CUDA does not survive one if the fork server has touched it, and most of a start is
    CUDA's anyway. It is not safe on macOS, where frameworks that torch loads do not survive one. And the fork server
    needs pidfd_open and prctl, which Linux alone has.

    Args:
        device: Device of the engines.
        modules: Modules that a fork server imports; None: those of an engine on a CPU.
    """
    return Forker(modules) if sys.platform == "linux" and not _may_use_cuda(device) else Spawner()


def _environment(gpus: str | None) -> dict[str, str]:
    """Returns what an engine's environment has beside the server's, with GPUs of its own."""
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}


def _name_of(model: ModelSettings) -> str:
    """Returns the served name, without a call of the hub."""
    return model.served_model_name or model_name(model.model, Path(model.model).resolve())


def _chooses_process(engine: EngineSettings, config: EngineConfig) -> bool:
    return engine.engine == "auto" and _may_use_cuda(config.model.device)


def _may_use_cuda(device: str) -> bool:
    """Returns whether engines may run on CUDA, without torch, which a frontend does not import."""
    return device == "cuda" or (device == "auto" and any(Path(node).exists() for node in NVIDIA))
