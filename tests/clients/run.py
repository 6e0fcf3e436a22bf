"""Runs real clients against a running server and gateway, each in an environment of its own, and prints a table.

python -m tests.clients.run [--only NAME ...]: environments are made in build/clients/NAME, from the network, and kept.
The exit code is 1 where a client failed. A client that cannot be installed is named with the reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rpc.paths import demo_directory
from tests.support.chats import TOOLED
from tests.support.gateway import running_gateway
from tests.support.server import clean_environment, running_server

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
INFERENCE = ROOT / "tests" / "support" / "inference_clients"
ENVIRONMENTS = ROOT / "build" / "clients"
MODEL, CONTEXT = "quire-chat", 4096
INSTALL_SECONDS, RUN_SECONDS = 1800, 900
LONGEST = 100  # characters of a reason


@dataclass(frozen=True, slots=True)
class Client:
    """One client of the table.

    Attributes:
        name: Of its environment, too.
        called: What its script calls.
        script: A file of `scripts`, or a path; run by Python, or by node for .mjs.
        packages: Of PyPI, or of npm for .mjs; the first one's version is shown.
        arguments: Of the script, with {names} of `places`.
        torch: It needs torch, which is installed as constraints.txt says, from the index that TORCH_INDEX names.
        program: A command that has to be there already.
        beside: What its script imports, where pip installs `packages` without what they say that they need.
    """

    name: str
    called: str
    script: str | Path
    packages: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("{url}", "{model}")
    torch: bool = False
    program: str = ""
    beside: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        return str(self.script).endswith(".mjs")


NATIVE = ("{grpc}", "{model}")
BENCHMARK = ("{url}", "{model}", "{directory}")
VLLM_IMPORTS = (
    "aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "llguidance", "msgspec", "numpy",
    "openai", "openai-harmony", "partial-json-parser", "pillow", "prometheus-client", "protobuf", "psutil",
    "py-cpuinfo", "pybase64", "pyzmq", "regex", "requests", "sentencepiece", "setproctitle", "tiktoken", "tqdm",
    "transformers", "uvloop", "xgrammar",
)  # fmt: skip
CLIENTS = (
    Client("openai", "chats, parse, tools, responses, streams", "openai_client.py", ("openai",)),
    Client("instructor", "TOOLS, JSON_SCHEMA, RESPONSES_TOOLS ...", "instructor_client.py", ("instructor",)),
    Client("pydantic-ai-slim", "Agent: output, tools, run_stream", "pydantic_ai_client.py",
           ("pydantic-ai-slim[openai]",)),
    Client("openai-agents", "Runner: tools, output_type, streamed", "openai_agents_client.py", ("openai-agents",)),
    Client("langchain-openai", "with_structured_output, bind_tools", "langchain_client.py", ("langchain-openai",)),
    Client("litellm", "completion, responses: formats, tools", "litellm_client.py", ("litellm",)),
    Client("node-openai", "parse, stream, runTools, responses", "node_openai.mjs", ("openai", "zod")),
    Client("ai-sdk", "text, objects, tools in steps", "ai_sdk.mjs",
           ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")),
    Client("guidellm", "run, streams", "guidellm_client.py", ("guidellm",), BENCHMARK, True),
    Client("aiperf", "profile, streamed chats", "aiperf_client.py", ("aiperf",), BENCHMARK),
    Client("tritonclient-numpy1", "infer, stream, structured_outputs", INFERENCE / "triton_sync.py",
           ("tritonclient[grpc]", "numpy<2"), NATIVE),
    Client("tritonclient-numpy2", "infer, stream, structured_outputs", INFERENCE / "triton_sync.py",
           ("tritonclient[grpc]", "numpy>=2"), NATIVE),
    Client("kserve", "InferenceGRPCClient", INFERENCE / "kserve_sdk.py", ("kserve>=0.21,<0.22",), NATIVE),
    Client("promtool", "check metrics of both", "promtool_client.py", (), ("{metrics}", "{root}/metrics"),
           program="promtool"),
    Client("vllm", "bench serve: completions, chats", "vllm_bench_client.py", ("vllm==0.33.0",), BENCHMARK, True,
           beside=VLLM_IMPORTS),  # vLLM's wheel asks for gigabytes of CUDA, which the benchmark's client does not load
)  # fmt: skip


class NotInstalled(Exception):
    """Says why a client cannot be run here."""


def first_line(text: str) -> str:
    """Returns the last line of a program's complaint that says something."""
    lines = [line for line in text.splitlines() if line.strip() and "npm error A complete log" not in line]
    return (lines[-1] if lines else "no reason given").strip()[:LONGEST]


def install(command: Sequence[str | Path], folder: Path) -> None:
    """Raises NotInstalled."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)[:LONGEST]) from None
    if done.returncode:
        raise NotInstalled(first_line(done.stderr))


def runner(client: Client) -> list[str]:
    """Makes the client's environment where it is not there yet; what runs its script. Raises NotInstalled."""
    if client.program:
        if shutil.which(client.program) is None:
            raise NotInstalled(f"{client.program} is not here")
        return [sys.executable]
    home = ENVIRONMENTS / client.name
    made, wanted = home / ".made", repr((client.packages, client.beside))
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if client.is_node:
            if shutil.which("npm") is None:
                raise NotInstalled("npm is not here")
            install(["npm", "install", "--no-fund", "--no-audit", "--prefix", home, *client.packages], home)
        else:
            venv.create(home, with_pip=True)
            pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
            pip += ["-c", ROOT / "constraints.txt"]
            if client.torch:
                index = os.environ.get("TORCH_INDEX")
                install([*pip, "torch", *(["--index-url", index] if index else [])], home)
            if client.beside:
                install([*pip, *client.beside], home)
            install([*pip, *(["--no-deps"] if client.beside else []), *client.packages], home)
        made.write_text(wanted)
    return ["node"] if client.is_node else [str(home / "bin" / "python")]


def version(client: Client, command: Sequence[str]) -> str:
    if client.program:
        said = subprocess.run([client.program, "--version"], capture_output=True, text=True)
        return next(iter((said.stdout + said.stderr).split("version ")[1:]), "").split()[0].rstrip(",")
    name = re.split(r"[\[<>=]", client.packages[0])[0]
    if client.is_node:
        package = ENVIRONMENTS / client.name / "node_modules" / name / "package.json"
        return str(json.loads(package.read_text())["version"])
    script = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([*command, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def run(client: Client, places: dict[str, str]) -> tuple[str, str, str]:
    """Returns its version, "ok", "failed" or "not installed", and why."""
    try:
        command = runner(client)
    except NotInstalled as error:
        return "-", "not installed", str(error)
    source = SCRIPTS / client.script if isinstance(client.script, str) else client.script
    if client.is_node:  # node looks for packages beside a script
        source = Path(shutil.copy(source, ENVIRONMENTS / client.name))
    arguments = [argument.format(**places) for argument in client.arguments]
    shown = version(client, command)
    home = ENVIRONMENTS / client.name / "bin"
    environment = clean_environment() | {"PATH": f"{home}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, source, *arguments],
                cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return shown, "failed", f"more than {RUN_SECONDS} s"
    if done.returncode:
        (ENVIRONMENTS / f"{client.name}.log").write_text(done.stdout + done.stderr)
        return shown, "failed", first_line(done.stderr or done.stdout)
    return shown, "ok", ""


def chat_model(folder: Path) -> Path:
    """The demo model with a chat template that offers tools, and with room for several turns of calls."""
    directory = folder / MODEL
    shutil.copytree(demo_directory(), directory)
    (directory / "chat_template.jinja").write_text(TOOLED)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[client.name for client in CLIENTS])
    only = parser.parse_args().only
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    rows = []
    with ExitStack() as stack:
        directory = chat_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        flags = ("--model", str(directory), "--served-model-name", MODEL, "--kv-cache-memory", "64MiB")
        server = stack.enter_context(running_server(*flags))
        gateway = stack.enter_context(running_gateway([server.address]))
        places = {
            "url": f"{gateway.url}/v1", "root": gateway.url, "grpc": server.address, "metrics": server.metrics_url,
            "model": MODEL, "directory": str(directory),
        }  # fmt: skip
        for client in CLIENTS:
            if not only or client.name in only:
                rows.append((client.name, client.called, *run(client, places)))
                print(f"{client.name}: {rows[-1][3]}", flush=True)
    print()
    for name, called, shown, result, reason in [("client", "called", "version", "result", ""), *rows]:
        print(f"{name:20} {shown:10} {called:36} {result:14} {reason}".rstrip())
    return int(any(row[3] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
