"""Runs engines in processes of their own, one at a time."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.peers.floor import MachineFloor, bytes_of
from bench.peers.report import PeerRun
from bench.peers.workloads import Workload

START_SECONDS, RUN_SECONDS = 600, 600

KV_TOKENS = {"llama-135m": 40_960, "qwen3-0.6b": 16_384}
"""Tokens of each engine's KV cache by model; all caches and weights are in memory at once."""

# Engine to its virtual environment ("" for Quire's own), its module, and its arguments after the model and KV_TOKENS.
ENGINES = {
    "quire": ("", "quire_engine", ()),
    "quire int8": ("", "quire_engine", ("int8",)),
    "quire over gRPC": ("", "quire_server", ()),
    "vLLM eager": ("vllm", "vllm_engine", ("eager",)),
    "vLLM compiled + zentorch": ("vllm", "vllm_engine", ("compile",)),
    "llama.cpp bf16": ("llama", "llama_cpp_engine", ()),
    "llama.cpp q8_0": ("llama", "llama_cpp_engine", ()),
    "transformers": ("vllm", "transformers_engine", ()),
}


def start_all(names: list[str], peers: Path, model: Path) -> list["PeerProcess"]:
    """Starts engines, and stops each after its first token. Leaves out those that are missing or fail."""
    machine, sides = MachineFloor(), list[PeerProcess]()
    for name in names:
        environment, module, rest = ENGINES[name]
        python = peers / environment / "bin" / "python" if environment else Path(sys.executable)
        if not python.exists():
            print(f"{name}: there is no {python}", file=sys.stderr)
            continue
        path = as_gguf(peers, model, name.split()[1]) if environment == "llama" else model
        command = [str(python), "-m", f"bench.peers.{module}", str(path), str(KV_TOKENS[model.name]), *rest]
        log = peers / f"{name.replace(' ', '-')}.log"
        try:
            side = PeerProcess(name, command, _environment(peers, name, model), machine, log)
        except RuntimeError as error:
            print(f"{error}: see {log}", file=sys.stderr)
            continue
        sides.append(side)
        print(f"{name} {side.version}: first token after {side.started:.1f} s", file=sys.stderr, flush=True)
    return sides


def as_gguf(peers: Path, model: Path, kind: str) -> Path:
    out = model.with_name(f"{model.name}.{kind}.gguf")
    if not out.exists():
        python = peers / "vllm" / "bin" / "python"
        subprocess.run([python, "-m", "bench.peers.as_gguf", model, kind, out], check=True)
    return out


def _environment(peers: Path, name: str, model: Path) -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    # Importing Quire sets it in this process, too; with it llama.cpp ran at a third of its speed.
    environment.pop("OMP_WAIT_POLICY", None)
    if ENGINES[name][0] != "vllm":
        return environment
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), peers / "vllm" / "lib" / "libiomp5.so"]
    kv_bytes = KV_TOKENS[model.name] * bytes_of(model.name)[1]
    environment |= {
        "LD_PRELOAD": ":".join(str(file) for file in found if file.exists()),
        "KMP_BLOCKTIME": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // 2**30)),  # whole GiB
    }
    if name.endswith("zentorch"):
        environment["PYTHONPATH"] += f":{peers / 'zentorch'}"
    return environment


class PeerProcess:
    """One engine in a process of its own.

    Args:
        name: Name of the engine.
        command: Command of its worker.
        environment: Environment variables.
        machine: Computes floors.
        log: File for the engine's output.

    Attributes:
        version: Version that the engine reports.
        started: Seconds from the start of its process to its first token.
        memory: Largest proportional set size of its processes after a run, in bytes.

    Raises:
        RuntimeError: The engine does not start.
    """

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], machine: MachineFloor, log: Path
    ) -> None:
        self.name, self._machine = name, machine
        began = time.monotonic()
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True,
                start_new_session=True,
            )  # fmt: skip
        try:
            self.version = self._answer(START_SECONDS)["version"]
            self.started = time.monotonic() - began
            self._ask("warm 0", RUN_SECONDS)
        except RuntimeError:
            self.close()
            raise
        self.memory = 0
        self._signal(signal.SIGSTOP)

    def turn(self, workload: Workload, asked: str, model: str) -> PeerRun:
        """Runs a workload while all other engines are stopped. Raises RuntimeError without an answer."""
        rates = self._machine.rates()
        floor = self._machine.floor(model, workload, rates)
        self._signal(signal.SIGCONT)
        before, everyone, began = self._spent(), _busy(), time.monotonic()
        answer = self._ask(asked, RUN_SECONDS)
        share = (_busy() - everyone - (self._spent() - before)) / (time.monotonic() - began) / (os.cpu_count() or 1)
        self.memory = max(self.memory, sum(p.memory_full_info().pss for p in self._tree()))
        self._signal(signal.SIGSTOP)
        return PeerRun.of(self.name, workload, answer, floor, rates, max(0.0, share))

    def close(self) -> None:
        processes = self._tree()
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for process in processes:
            if process.is_running():
                process.kill()

    def _ask(self, line: str, seconds: float) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        out = self._process.stdout
        ready = out is not None and select.select([out], [], [], seconds)[0]
        line = out.readline() if out is not None and ready else ""
        if not line:
            raise RuntimeError(f"{self.name}: no answer within {seconds} s, or it has died")
        return json.loads(line)

    def _tree(self) -> list[psutil.Process]:
        if self._process.poll() is not None:
            return []
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _spent(self) -> float:
        """Returns the CPU seconds of its processes."""
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def _signal(self, number: int) -> None:
        for process in self._tree():
            process.send_signal(number)


def _busy() -> float:
    """Returns the CPU seconds of all processes of the machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq
