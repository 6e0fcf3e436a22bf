"""The files of `deploy/` agree: with each other, with the command line, with docs/reference/ports.md."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from rpc.cli.main import app
from rpc.services.health import LIVENESS
from rpc.settings import ServerSettings
from tests.deploy.files import DEPLOY, ROOT, cluster, commands, compose, flags, groups, launcher, pods
from tests.deploy.test_docker import values
from tests.support.ports import rows

FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
STOPPING = 20  # seconds that engines and Ray may take to end after a drain
RAY_FLAGS = {
    "--port": "6379",
    "--node-manager-port": "6380",
    "--object-manager-port": "6381",
    "--runtime-env-agent-port": "6382",
    "--dashboard-agent-grpc-port": "6383",
    "--dashboard-agent-listen-port": "6384",
    "--metrics-export-port": "6385",
    "--ray-client-server-port": "6386",
    "--min-worker-port": "10002",
    "--max-worker-port": "10999",
}
ON_HEAD_ALONE = {"--port", "--ray-client-server-port"}


def parameters(words: list[str]) -> set[str]:
    """Flags of the command that these words call. Raises KeyError where there is none."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        if word in ("--version", "--help"):
            return {word}
        command = command.commands[word]
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def test_every_command_of_quire_exists_with_its_flags() -> None:
    found = [words for path in FILES for words in commands(path.read_text(), "quire")]
    found.append(json.loads(values("cpu", "CMD")[-1]))
    assert sum(words[0] == "serve" for words in found) >= 4
    for words in found:
        assert set(flags(words)) <= parameters(words), words
    with pytest.raises(KeyError):
        parameters(["serv"])


def variables() -> Iterator[tuple[str, str]]:
    """QUIRE_... in the environment of any container."""
    yield from compose()["services"]["server"]["environment"].items()
    yield from re.findall(r"(QUIRE_\w+)=(\S+)", "\n".join(values("cpu", "ENV") + values("cuda", "ENV")))
    for directory in ("base", "overlays/cuda"):
        for pod in pods(directory).values():
            yield from ((given["name"], given["value"]) for given in pod["containers"][0]["env"])


def test_every_variable_of_quire_is_a_flag() -> None:
    known = parameters(["serve"])
    found = [name for name, _ in variables() if name.startswith("QUIRE_")]
    assert {"QUIRE_MODEL", "QUIRE_KERNEL_CACHE", "QUIRE_DRAIN_TIME", "QUIRE_DEVICE"} == set(found)
    for name in found:
        assert "--" + name.removeprefix("QUIRE_").lower().replace("_", "-") in known
    for path in FILES:
        for name in re.findall(r"QUIRE_[A-Z_]+[A-Z]", path.read_text()):
            assert "--" + name.removeprefix("QUIRE_").lower().replace("_", "-") in known, (path, name)


def frontend() -> dict[str, str]:
    """Flags of the frontend's `quire serve`."""
    (script,) = pods()["frontend"]["containers"][0]["args"]
    (words,) = commands(script, "quire")
    return flags(words)


def test_images_have_the_names_that_the_dockerfile_builds() -> None:
    built = set(re.findall(r"-t (\S+)", (DEPLOY / "docker/Dockerfile").read_text()))
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert built == {f"quire:{version}-cpu", f"quire:{version}-cuda"}
    used = {container["image"] for pod in pods("overlays/cuda").values() for container in pod["containers"]}
    assert used == built
    used = {c["image"] for pod in pods().values() for c in [*pod["initContainers"], *pod["containers"]]}
    assert used == {f"quire:{version}-cpu"} == {compose()["services"]["server"]["image"]}
    for path in FILES:
        named = set(re.findall(r"\bquire:\d[\w.-]*\w", path.read_text()))
        assert named <= built, path


def test_ports_are_the_same_everywhere() -> None:
    port = str(ServerSettings().listen.port)
    assert values("cpu", "EXPOSE") == [port]
    assert frontend()["--port"] == port
    assert frontend()["--ray-address"].endswith(":" + RAY_FLAGS["--port"])
    probes = {
        "head": RAY_FLAGS["--port"],
        "engine": RAY_FLAGS["--node-manager-port"],
        "frontend": port,
    }
    for name, pod in pods().items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert str(pod["containers"][0][probe]["grpc"]["port"]) == probes[name]


def test_ray_has_the_same_ports_everywhere_and_the_docs_say_so() -> None:
    on_worker = {flag: port for flag, port in RAY_FLAGS.items() if flag not in ON_HEAD_ALONE}
    for kind, wanted in (("head", RAY_FLAGS), ("worker", on_worker)):
        (words,) = commands(launcher()[f"{kind}_start_ray_commands"][-1], "ray")
        assert {flag: port for flag, port in flags(words).items() if flag in RAY_FLAGS} == wanted
    for name, wanted in (("head", RAY_FLAGS), ("engine", on_worker)):
        given = {"--" + key: value for key, value in groups()[name]["rayStartParams"].items()}
        assert {flag: port for flag, port in given.items() if flag in RAY_FLAGS} == wanted
    (words,) = commands(pods()["frontend"]["containers"][0]["args"][0], "ray")
    assert {flag: port for flag, port in flags(words).items() if flag in RAY_FLAGS} == on_worker
    table = {flag: row.port for row in rows("`--ray-address`") for flag in row.flags if flag.startswith("--")}
    workers = f"{RAY_FLAGS['--min-worker-port']}-{RAY_FLAGS['--max-worker-port']}"
    assert table == RAY_FLAGS | {"--min-worker-port": workers, "--max-worker-port": workers}


@pytest.mark.parametrize("group", ["head", "frontend", "engine"])
def test_a_pod_is_given_longer_than_the_drain(group: str) -> None:
    (container,) = pods()[group]["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
    assert pods()[group]["terminationGracePeriodSeconds"] >= pause + float(frontend()["--drain-time"]) + STOPPING


def test_probes_wait_for_what_a_server_may_wait_for() -> None:
    (container,) = pods()["frontend"]["containers"]

    def window(name: str) -> float:
        return container[name]["periodSeconds"] * container[name]["failureThreshold"]

    assert window("startupProbe") >= float(frontend()["--engine-start-timeout"]) + 120
    assert container["livenessProbe"]["grpc"]["service"] == LIVENESS, "one that waits for engines is not killed"
    assert window("readinessProbe") <= 10


def test_an_engine_has_a_pod_of_its_own() -> None:
    """Ray's scheduler counts limits.cpu; a second engine in the pod would take its memory too."""
    limits = pods()["engine"]["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) == float(frontend()["--ray-cpus"])
    assert "num-cpus" not in groups()["engine"]["rayStartParams"]
    replicas = int(frontend()["--replicas"])
    assert groups()["engine"]["replicas"] == replicas < groups()["engine"]["maxReplicas"]
    for name in ("head", "frontend"):
        assert groups()[name]["rayStartParams"]["num-cpus"] == "0"
    assert {groups()["frontend"][count] for count in ("replicas", "minReplicas", "maxReplicas")} == {1}
    assert cluster()["autoscalerOptions"]["version"] == "v2"
    assert not any("restartPolicy" in pod for pod in pods().values())  # the autoscaler's second version sets it
    spread = pods()["engine"]["topologySpreadConstraints"]
    assert [rule["topologyKey"] for rule in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert all(
        rule["labelSelector"]["matchLabels"] == {"ray.io/cluster": "quire", "ray.io/group": "engine"} for rule in spread
    )


def test_the_readme_names_files_that_are_there() -> None:
    readme = DEPLOY / "README.md"
    for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
        assert (DEPLOY / target).exists(), target
    for path in re.findall(r"`((?:deploy|tests|docs)/[\w/.-]+)`", readme.read_text()):
        assert (ROOT / path).exists(), path
