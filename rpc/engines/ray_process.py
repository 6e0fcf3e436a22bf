"""The process that has an engine in a Ray actor: `rpc.engines.process` says how it is started.

Ray's driver is here and not in the server, so that what Ray does to its driver when a daemon dies touches no stream.
Ray places the actor and tells of its end; tokens go over the engine link, from the actor to the server. The cluster
has no dashboard, asks for a token that nobody else can read, and keeps its files in the directory that the server gave.
Ray never restarts the actor: the server starts a new process, and so a new cluster.
"""

import logging
import os
import secrets
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rpc.engines.engine_process import (
    EngineFailedError,
    ignore_signals,
    read_config,
    run_and_report,
    set_up_logging,
    take_standard_output,
)
from rpc.engines.ray_actor import EngineActor
from rpc.engines.reaping import adopt_orphans, kill_session, reap
from rpc.settings import EngineConfig

OBJECT_STORE_BYTES = 128 * 2**20  # nothing is stored; Ray wants some

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
    "RAY_worker_niceness": "0",  # the engine is no background work: Ray's own choice is 15
    "RAY_COLOR_PREFIX": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no other machine takes part: every port is on loopback
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # of 60, in which threads that look for a dead GCS burn two cores
}


def start_cluster(directory: Path) -> None:
    """A local cluster of Ray with its driver in this process. Raises what `ray.init` does."""
    os.umask(0o077)  # Ray's logs and sockets are this user's alone
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(token))
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)  # of some other cluster
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace="quire",
        logging_level=logging.WARNING,
        _temp_dir=str(directory / "ray"),
    )
    ignore_signals()  # `ray.init` has put a handler of its own in place


def run_actor(config: EngineConfig, directory: Path) -> None:
    """An engine in an actor, until it ends. Raises EngineFailedError."""
    import ray

    gpus = 1 if config.model.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    # Ray gives an actor as many OpenMP threads as it reserves processors.
    config = replace(config, threads=config.threads or usable_cores())
    actor: Any = ray.remote(EngineActor).options(num_cpus=1, num_gpus=gpus, max_restarts=0).remote()
    try:
        why = ray.get(actor.run.remote(config.to_json(), str(directory)))
    except ray.exceptions.RayError as error:
        raise EngineFailedError(f"the engine's actor has died: {str(error).splitlines()[0]}") from None
    raise EngineFailedError(why)


def usable_cores() -> int:
    """As many threads as torch takes where nobody tells it: physical cores that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    return min(cores, len(os.sched_getaffinity(0))) if sys.platform == "linux" else cores


def main() -> None:
    ignore_signals()
    report = take_standard_output()
    set_up_logging()
    adopt_orphans()
    config, directory = read_config(), Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()

    def run() -> None:
        start_cluster(directory)
        run_actor(config, directory)

    why = run_and_report(run)
    os.write(report, why.encode())
    _end(directory, 1)


def _end_with_parent(directory: Path) -> None:
    """The server closes this process's standard input to end it; so does the server's death."""
    while os.read(0, 4096):
        pass
    _end(directory, 0)


def _end(directory: Path, code: int) -> None:
    """Kills what Ray started here: nothing in it is worth a second of shutting down."""
    try:
        sys.stderr.flush()
        if code == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Ray has to say of its daemons' end
        kill_session(os.getpid())
        reap()
        while directory.exists():  # the main thread may still be starting Ray in it
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
