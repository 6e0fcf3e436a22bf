"""The process with Ray's driver: starts actors of engines as its server orders, and reports their end.

It is a child of the server. Ray may kill its driver's process when a daemon dies, which thus touches no stream.

It reads lines of JSON from its standard input: a `ClusterConfig`, then the orders. The end of that input ends all
engines. It writes a line of JSON for each event on its standard output. Its standard error is the server's. Orders are
in the first line here, events in the second:

    {"launch": "0-1", "config": {...}, "listen": "unix:...", "token": "..."}     {"end": "0-1"}
    {"started": "0-1", "address": "10.0.0.4:40123"}     {"ended": "0-1", "why": "..."}     {"broken": "why"}

Ray never restarts an actor; the server orders a new one. A cluster of this machine alone is started here and ends with
this process. It has no dashboard, asks for a token that only this user can read, and keeps its files in the directory
that the server gave.
"""

import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from model.cgroup import processors
from rpc.cluster.actor import EngineActor, FollowerActor, last_line
from rpc.cluster.config import ClusterConfig
from rpc.cluster.placement import ClusterGoneError, Needs, PlacementError, engines_per_node, needs_gpu, nodes_of, place
from rpc.cluster.token import check_cluster, find_token
from rpc.distribution import own_version
from rpc.engines.engine_process import ignore_signals, run_and_report, take_standard_output
from rpc.engines.reaping import KILL_SECONDS, adopt_orphans, kill_session, reap
from rpc.observe.logs import redirect_output_as_json, set_up_logging
from rpc.settings import EngineConfig

log = logging.getLogger("quire.cluster")

OBJECT_STORE_BYTES = 128 * 2**20  # nothing is stored there, but Ray wants some room

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage report leaves the machine
    "RAY_worker_niceness": "0",  # the engine is no background work: Ray's own choice is 15
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",  # the log has each engine's lines; Ray's note of repeated ones would be in colour
}
ON_ONE_MACHINE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # no other machine takes part, so every port is on loopback
    "AUTOSCALER_METRIC_PORT": "0",  # any: Ray's monitor goes without metrics where another cluster has its usual 44217
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # of 60, in which threads that look for a dead GCS burn two cores
}


def join_cluster(config: ClusterConfig) -> None:
    """Starts or joins a cluster, with Ray's driver in this process. Raises what `ray.init` raises."""
    os.umask(0o077)  # Ray's logs and sockets are this user's alone
    os.environ.update(ENVIRONMENT)
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)  # it names another cluster, which `ray.init` would join
    # Names of actors and placement groups are unique in a namespace, so each server of a model has a namespace.
    namespace = f"{config.name}:{secrets.token_hex(4)}"
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.WARNING}
    if config.directory is not None:
        directory = Path(config.directory)
        token = directory / "token"
        token.write_text(secrets.token_hex(32))
        os.environ.update(ON_ONE_MACHINE, RAY_AUTH_TOKEN_PATH=str(token))
        options |= {
            "address": "local",
            "num_cpus": config.processes,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(directory / "ray"),
        }
    else:
        os.environ["RAY_AUTH_TOKEN_PATH"] = token_file = find_token(config.token_file, os.environ)
        check_cluster(config.address or "", token_file)
        options |= {"address": config.address}
    import ray
    from ray.job_config import JobConfig

    ray.init(**options, job_config=JobConfig(metadata={"job_name": config.name}))
    ignore_signals()  # again, since `ray.init` has put a handler of its own in place


class Driver:
    """Carries out the server's orders. Orders come from one thread; each engine has a thread that runs it to its end.

    Args:
        config: Configuration of the cluster.
        report: Descriptor that events are written to.
        flush_lines: See `_end`.

    Attributes:
        joined: Set once Ray is there; engines wait for it.
    """

    def __init__(self, config: ClusterConfig, report: int, flush_lines: Callable[[], None]) -> None:
        self._config, self._report, self._flush_lines = config, report, flush_lines
        self.joined = threading.Event()
        self._report_lock = threading.Lock()  # engines' threads write whole lines
        self._stops: dict[str, threading.Event] = {}
        self._actors: dict[str, list[Any]] = {}  # by engine, by rank

    def report_event(self, **event: str) -> None:
        with self._report_lock:
            os.write(self._report, json.dumps(event).encode() + b"\n")

    def handle(self, line: str) -> None:
        order = json.loads(line)
        if "end" in order:
            self._end(order["end"])
            return
        name = order["launch"]
        self._stops[name] = threading.Event()
        arguments = (name, order["config"], order["listen"], order["token"])
        threading.Thread(target=self._run_to_end, args=arguments, daemon=True).start()

    def _end(self, name: str) -> None:
        stop = self._stops.get(name)
        if stop is not None:
            stop.set()
        if not self.joined.is_set():  # nothing was started
            self.report_event(ended=name, why="it is not wanted any more")
            return
        import ray

        for actor in self._actors.get(name, ()):
            try:
                ray.kill(actor, no_restart=True)
            except Exception as error:  # Ray itself is about to end, and its engines with it
                log.warning("an actor of engine %s cannot be ended: %s", name, error)

    def _run_to_end(self, name: str, config: dict[str, Any], listen: str, token: str) -> None:
        why = ""
        self.joined.wait()  # before Ray is imported, which reads the environment that `join_cluster` sets

        def run() -> None:
            nonlocal why
            why = self._run(name, EngineConfig.from_json(json.dumps(config)), listen, token)

        failed = run_and_report(run)
        del self._stops[name]
        self.report_event(ended=name, why=failed or why)

    def _run(self, name: str, config: EngineConfig, listen: str, token: str) -> str:
        """Places an engine, starts its actors, and waits for its end. Returns why it ended."""
        import ray
        from ray.util.placement_group import remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._stops[name].is_set():
            return "it is not wanted any more"
        needs = self.needs_of(config)
        threads = config.threads or (max(1, int(needs.cpus)) if self._config.address else self._threads(config))
        config = replace(config, threads=threads)  # Ray gives an actor as many OpenMP threads as it reserves processors
        try:
            group = place(needs, self._config.start_seconds, self._stops[name], self._name_of(name))
        except ClusterGoneError as error:
            if self._config.address is None:  # Ray on this machine does not come back: the server starts another driver
                self.report_event(broken=f"Ray's daemons have died: {error}")
                _end(self._config, 1, self._flush_lines)
            return str(error)
        except PlacementError as error:
            return str(error)
        try:
            if self._config.address is not None:
                config = self._with_memory_shared(name, config, needs, nodes_of(group))
            ranks: list[Any] = [
                ray.remote(FollowerActor if rank else EngineActor)
                .options(
                    name=f"{self._name_of(name)}:rank-{rank}", num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=0,
                    max_concurrency=2, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                )
                .remote()
                for rank in range(needs.processes)
            ]  # fmt: skip
            self._actors[name] = ranks
            if self._stops[name].is_set():
                self._end(name)
            lease, apart = self._config.lease, needs.spread
            call = ranks[0].start.remote(own_version(), config.to_json(), listen, token, lease, ranks[1:], apart)
            address = ray.get(call)
            if address:
                self.report_event(started=name, address=address)
            return str(ray.get(ranks[0].wait.remote()))
        except ray.exceptions.RayError as error:
            return f"the engine's actor has died: {last_line(error)}"
        finally:
            if ray.is_initialized():
                self._end(name)  # ends ranks that are left
            self._actors.pop(name, None)
            if ray.is_initialized():
                remove_placement_group(group)

    def _with_memory_shared(
        self, name: str, config: EngineConfig, needs: Needs, nodes: Sequence[Mapping[str, Any]]
    ) -> EngineConfig:
        """Leaves memory of the engine's nodes to this server's other engines, which may come there later.

        Engines of other servers are not known here.
        """
        engines = engines_per_node(needs, self._config.processes // needs.processes, nodes)
        if engines > 1:
            log.info("engine %s takes 1/%d of its node's memory, which has room for as many", name, engines)
        return replace(config, engines_here=engines)

    def _name_of(self, engine: str) -> str:
        """Returns the name of one launch of an engine. An actor that was cut off may still hold the last launch's."""
        return f"{self._config.name}:engine-{engine}"

    def needs_of(self, config: EngineConfig) -> Needs:
        """Returns the resources that an engine of this configuration reserves."""
        import ray

        size, spread = config.model.tensor_parallel, self._config.spread
        there = ray.cluster_resources().get("GPU", 0)
        gpus = int(needs_gpu(config.model.device, there, may_come=self._config.address is not None))
        if self._config.address is None or gpus:
            return Needs(size, self._config.cpus or 1, gpus, spread)
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        return Needs(size, self._config.cpus or max(1, most if spread else most // size), 0, spread)

    def _threads(self, config: EngineConfig) -> int:
        return max(1, usable_cores() // (config.engines_here * config.model.tensor_parallel))


def usable_cores() -> int:
    """Returns the count of physical cores that this process may use: torch's default, or a container's quota."""
    cores = min(psutil.cpu_count(logical=False) or 1, processors() or sys.maxsize)
    return min(cores, len(os.sched_getaffinity(0))) if sys.platform == "linux" else cores


def main() -> None:
    ignore_signals()
    report = take_standard_output()
    set_up_logging()
    adopt_orphans()
    orders = os.fdopen(os.dup(0), encoding="utf-8")
    config = ClusterConfig(**json.loads(orders.readline() or "null"))
    flush_lines = redirect_output_as_json("cluster") if config.log_format == "json" else sys.stderr.flush
    set_up_logging(config.log_format, "cluster")
    driver = Driver(config, report, flush_lines)

    def handle_all() -> None:
        try:
            for line in orders:
                driver.handle(line)
        finally:
            _end(config, 0, flush_lines)

    threading.Thread(target=handle_all, daemon=True).start()
    why = run_and_report(lambda: join_cluster(config))
    if why:
        driver.report_event(broken=why)
        _end(config, 1, flush_lines)
    driver.joined.set()
    threading.Event().wait()


def _end(config: ClusterConfig, code: int, flush_lines: Callable[[], None]) -> None:
    """Ends this process, and kills all of Ray's processes that it started: they have nothing to save.

    Args:
        config: Configuration of the cluster.
        code: Exit code.
        flush_lines: Writes out log lines that are held back.
    """
    try:
        flush_lines()
        if code == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides Ray's messages on its daemons' end
        kill_session(os.getpid())
        reap()
        deadline = time.monotonic() + KILL_SECONDS
        while config.directory is not None and Path(config.directory).exists() and time.monotonic() < deadline:
            shutil.rmtree(config.directory, ignore_errors=True)  # again: the main thread may still start Ray in it
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
