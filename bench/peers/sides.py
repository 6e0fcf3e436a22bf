"""Runs engines in processes of their own, one at a time."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.peers.floor import MachineFloor
from bench.peers.forms import MissingForm, checkpoint, held_bytes, stored_bytes
from bench.peers.report import PeerRun
from bench.peers.workloads import Workload
from model.errors import CheckpointError

START_SECONDS, RUN_SECONDS = 600, 600

KV_TOKENS = {
    "llama-135m": 40_960, "qwen3-0.6b": 16_384, "qwen3.5-0.8b": 40_960, "granite-4-h-350m": 40_960,
    "deepseek-0.5b": 16_384,
}  # fmt: skip
"""Tokens of each engine's KV cache by model; all caches and weights are in memory at once."""


@dataclass(frozen=True, slots=True)
class Side:
    """An engine, and the weights that it serves.

    Attributes:
        module: Module of its worker, in this package.
        environment: Name of its virtual environment; "" for Quire's own.
        form: Form of its checkpoint; see `forms.FORMS`.
        arguments: Arguments of its worker after the checkpoint and the tokens of the KV cache.
    """

    module: str
    environment: str = ""
    form: str = "plain"
    arguments: tuple[str, ...] = ()

    def weights(self, place: Path) -> int:
        """Returns the bytes of weights that a step must read: as they are stored, or as Quire keeps them if less."""
        stored = stored_bytes(place)
        held = 0 if self.environment else held_bytes(place, *(self.arguments or (None,)))
        return min(stored, held or stored)


ENGINES = {
    "quire": Side("quire_engine"),
    "quire int8": Side("quire_engine", arguments=("int8",)),
    "quire int4": Side("quire_engine", arguments=("int4",)),
    "quire gptq8": Side("quire_engine", form="gptq8"),
    "quire q8_0": Side("quire_engine", form="q8_0"),
    "quire q4_0": Side("quire_engine", form="q4_0"),
    "quire q4_k_m": Side("quire_engine", form="q4_k_m"),
    "quire over gRPC": Side("quire_server"),
    "quire int4 over gRPC": Side("quire_server", arguments=("int4",)),
    "vLLM eager": Side("vllm_engine", "vllm", arguments=("eager",)),
    "vLLM compiled + zentorch": Side("vllm_engine", "vllm", arguments=("compile",)),
    "llama.cpp bf16": Side("llama_cpp_engine", "llama", "bf16"),
    "llama.cpp q8_0": Side("llama_cpp_engine", "llama", "q8_0"),
    "llama.cpp q4_0": Side("llama_cpp_engine", "llama", "q4_0"),
    "llama.cpp q4_k_m": Side("llama_cpp_engine", "llama", "q4_k_m"),
    "transformers": Side("transformers_engine", "vllm"),
}
USUAL = (
    "quire", "quire int8", "quire over gRPC", "vLLM eager", "vLLM compiled + zentorch", "llama.cpp bf16",
    "llama.cpp q8_0", "transformers",
)  # fmt: skip
"""Engines of a run that names none: all of them at once do not fit in every memory."""


def start_all(
    engines: Mapping[str, Side], peers: Path, model: Path, kv_tokens: int, kv_bytes: int
) -> list["PeerProcess"]:
    """Starts engines, and stops each after its first token. Leaves out those that are missing or fail.

    Args:
        engines: Engines by name.
        peers: Directory of the virtual environments.
        model: Directory of the plain checkpoint.
        kv_tokens: Tokens of each engine's KV cache.
        kv_bytes: Bytes of the same.
    """
    machine, sides = MachineFloor(), list[PeerProcess]()
    for name, one in engines.items():
        python = peers / one.environment / "bin" / "python" if one.environment else Path(sys.executable)
        if not python.exists():
            print(f"{name}: there is no {python}", file=sys.stderr)
            continue
        log = peers / f"{name.replace(' ', '-')}.log"
        try:
            place = checkpoint(peers, model, one.form)
            command = [str(python), "-m", f"bench.peers.{one.module}", str(place), str(kv_tokens), *one.arguments]
            environment = _environment(peers, one, kv_bytes)
            side = PeerProcess(name, command, environment, machine, one.weights(place), log)
        except (MissingForm, CheckpointError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        except RuntimeError as error:
            print(f"{error}: see {log}", file=sys.stderr)
            continue
        sides.append(side)
        print(f"{name} {side.version}: first token after {side.started:.1f} s", file=sys.stderr, flush=True)
    return sides


def _environment(peers: Path, one: Side, kv_bytes: int) -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    # Importing Quire sets it in this process, too; with it llama.cpp ran at a third of its speed.
    environment.pop("OMP_WAIT_POLICY", None)
    if one.environment != "vllm":
        return environment
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), peers / "vllm" / "lib" / "libiomp5.so"]
    environment |= {
        "LD_PRELOAD": ":".join(str(file) for file in found if file.exists()),
        "KMP_BLOCKTIME": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes // 2**30)),  # whole GiB
    }
    if "compile" in one.arguments:
        environment["PYTHONPATH"] += f":{peers / 'zentorch'}"
    return environment


class PeerProcess:
    """One engine in a process of its own.

    Args:
        name: Name of the engine.
        command: Command of its worker.
        environment: Environment variables.
        machine: Computes floors.
        weights: Bytes of weights that a step must read.
        log: File for the engine's output.

    Attributes:
        weights: As given.
        version: Version that the engine reports.
        started: Seconds from the start of its process to its first token.
        memory: Largest proportional set size of its processes after a run, in bytes.

    Raises:
        RuntimeError: The engine does not start.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        machine: MachineFloor,
        weights: int,
        log: Path,
    ) -> None:
        self.name, self._machine, self.weights = name, machine, weights
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
        floor = self._machine.floor(model, workload, rates, self.weights)
        (answer,), share = self.answers([asked])
        return PeerRun.of(self, model, workload, answer, floor, rates, share)

    def answers(self, asked: Sequence[str]) -> tuple[list[dict[str, Any]], float]:
        """Runs workloads one after the other while all other engines are stopped.

        Returns:
            Answers of the worker, see `worker.serve`, and the share of the machine that other processes used.

        Raises:
            RuntimeError: No answer.
        """
        self._signal(signal.SIGCONT)
        before, everyone, began = self._spent(), _busy(), time.monotonic()
        answers = [self._ask(line, RUN_SECONDS) for line in asked]
        share = (_busy() - everyone - (self._spent() - before)) / (time.monotonic() - began) / (os.cpu_count() or 1)
        self.memory = max(self.memory, sum(p.memory_full_info().pss for p in self._tree()))
        self._signal(signal.SIGSTOP)
        return answers, max(0.0, share)

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
