"""The container's files: linted, against their schema, and that they are what they say. Nothing builds them here."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from dockerfile_parse import DockerfileParser
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpc.services.health import LIVENESS
from rpc.settings import ServerSettings
from tests.deploy.files import DEPLOY, ROOT, compose, read, seconds

DOCKERFILE = DEPLOY / "docker/Dockerfile"
TOOLS = Path(sys.executable).parent
TARGETS = ("cpu", "cuda")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and their values by the name of the stage; the first is FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for part in DockerfileParser(path=str(DOCKERFILE)).structure:
        if part["instruction"] == "FROM":
            name = part["value"].rpartition(" AS ")[2]
            found[name] = []
        if name and part["instruction"] != "COMMENT":
            found[name].append((part["instruction"], part["value"]))
    return found


def image(target: str) -> list[tuple[str, str]]:
    """Instructions of a target and of the stages that it begins with, in their order."""
    made = stages()
    parent = made[target][0][1].partition(" ")[0]
    return (image(parent) if parent in made else []) + made[target]


def values(target: str, instruction: str) -> list[str]:
    return [value for kind, value in image(target) if kind == instruction]


@pytest.mark.skipif(not (TOOLS / "hadolint").exists(), reason="there is no hadolint for this platform")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([TOOLS / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_quire_under_tini_as_nobody_in_particular(target: str) -> None:
    assert values(target, "USER") == ["10001:10001"]
    assert image(target)[-1][0] == "USER"
    assert json.loads(values(target, "ENTRYPOINT")[-1]) == ["/usr/bin/tini", "--", "quire"]
    assert json.loads(values(target, "CMD")[-1])[0] == "serve"
    assert values(target, "STOPSIGNAL") == ["SIGTERM"]
    (check,) = values(target, "HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["python", "/opt/health.py"]
    start = seconds(re.search(r"--start-period=(\d+s)", check)[1])
    assert start > ServerSettings().engine.start
    installed = " ".join(values(target, "RUN"))
    assert "tini" in installed
    assert "--gid 10001 quire" in installed
    assert "--uid 10001" in installed
    # KubeRay's commands run in a login shell, which has a PATH of its own.
    assert "ln -s /opt/quire/bin/quire /opt/quire/bin/ray /usr/local/bin/" in installed


def test_the_variants_differ_by_torch_alone() -> None:
    made = stages()
    cpu, cuda = (made[f"environment-{target}"][1:] for target in TARGETS)
    assert [(kind, re.sub(r" --index-url \S+", "", value)) for kind, value in cpu] == cuda
    assert "--index-url https://download.pytorch.org/whl/cpu" in cpu[0][1]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    for target in TARGETS:
        assert values(target, "COPY")[-1] == f"--from=environment-{target} /opt/quire /opt/quire"
    assert list(made)[-1] == "cpu"


def test_ray_is_one_that_quire_takes_and_kubernetes_is_told_of() -> None:
    (wanted,) = set(re.findall(r"ray\[default\]==([\d.]+)", DOCKERFILE.read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (taken,) = (need for need in project["dependencies"] if need.startswith("ray>="))
    least, below = (tuple(map(int, part.split("."))) for part in re.findall(r"[\d.]+", taken))
    assert least <= tuple(map(int, wanted.split("."))) < below
    for file in ("ray/cluster.yaml", "kubernetes/base/raycluster.yaml", "README.md"):
        named = re.findall(r"(?:ray\[default\]==|rayVersion: \"|Ray )(2\.[\d.]+\d)", (DEPLOY / file).read_text())
        assert set(named) == {wanted}, file


def test_what_is_copied_is_all_of_the_package_and_nothing_else_gets_in() -> None:
    copied = [value.split() for value in (v for stage in stages().values() for k, v in stage if k == "COPY")]
    sources = [word for words in copied if not words[0].startswith("--") for word in words[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignore = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignore if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(sources)
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.rstrip("*") for name in find["include"]} <= set(sources)
    assert not re.search(r"(?i)password|secret|token\s*=|api_key|^ADD ", DOCKERFILE.read_text(), re.MULTILINE)


# compose.yaml


def test_compose_has_the_form_of_its_schema(tmp_path: Path) -> None:
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    file = DEPLOY / "docker/compose.yaml"
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(file.read_text().replace("stop_grace_period", "stop_grace_periods"))
    with ThreadPoolExecutor() as pool:
        good, bad = pool.map(lambda f: subprocess.run([*command, f], capture_output=True, text=True), (file, wrong))
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1
    assert "stop_grace_periods" in bad.stdout


def test_compose_serves_loopback_and_waits_for_the_drain() -> None:
    server = compose()["services"]["server"]
    assert "command" not in server
    assert server["ports"] == ["127.0.0.1:50051:50051", "127.0.0.1:3000:3000"]
    assert "profiles" not in server
    assert server["user"] == values("cpu", "USER")[-1]
    assert server["build"]["target"] in TARGETS
    assert (DEPLOY / "docker" / server["build"]["context"] / server["build"]["dockerfile"]).samefile(DOCKERFILE)
    assert seconds(server["stop_grace_period"]) >= float(server["environment"]["QUIRE_DRAIN_TIME"]) + 20
    assert ["CMD", *json.loads(values("cpu", "HEALTHCHECK")[0].partition("CMD ")[2])] == server["healthcheck"]["test"]
    # All that is written is in the volume or in memory.
    written = [mount.partition(":")[2] for mount in server["volumes"]]
    assert written == values("cpu", "VOLUME")
    assert all(path.startswith("/var/cache/quire/") for path in re.findall(r"/var/\S+/\S+", values("cpu", "ENV")[-1]))


def test_no_container_may_more_than_it_has_to() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith("0:"), name
        assert {volume.partition(":")[0] for volume in service["volumes"] if volume[0] != "."} <= set(
            compose()["volumes"]
        )


def test_what_watches_the_server_is_where_it_shows_itself_and_has_our_files() -> None:
    services = compose()["services"]
    settings, places = ServerSettings().listen, {}
    for name in ("prometheus", "grafana"):
        assert services[name]["network_mode"] == "service:server"  # its metrics are on loopback
        assert services[name]["profiles"] == ["monitoring"]
        assert "ports" not in services[name]
        mounts = [volume.split(":") for volume in services[name]["volumes"] if volume.startswith("..")]
        assert {mode for _, _, mode in mounts} == {"ro"}
        places |= {inside: DEPLOY / "docker" / outside for outside, inside, _ in mounts}
    assert all(place.is_dir() for place in places.values())
    (config,) = (word.split("=")[1] for word in services["prometheus"]["command"] if word.startswith("--config.file="))
    jobs = read(places["/etc/prometheus"] / config.removeprefix("/etc/prometheus/"))[0]["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == [f"127.0.0.1:{settings.metrics_port}"]
    (source,) = read(places["/etc/grafana/provisioning"] / "datasources/prometheus.yml")[0]["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    (provider,) = read(places["/etc/grafana/provisioning"] / "dashboards/quire.yml")[0]["providers"]
    assert list(places[provider["options"]["path"]].glob("*.json"))


# health.py


@pytest.fixture
def served() -> Iterator[tuple[health.HealthServicer, int]]:
    """A health service, and its port."""
    server, service = grpc.server(ThreadPoolExecutor(1)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, port
    server.stop(None)


def test_health_is_what_the_server_says(served: tuple[health.HealthServicer, int]) -> None:
    service, port = served

    def ask(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, DEPLOY / "docker/health.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={"QUIRE_PORT": str(port)})
        return done.returncode, done.stdout.split()[0]

    service.set("", SERVING)
    assert ask() == (0, "SERVING")
    service.set("", NOT_SERVING)
    assert ask() == (1, "NOT_SERVING")
    service.set(LIVENESS, SERVING)
    assert ask(str(port), LIVENESS) == (0, "SERVING")


@pytest.mark.parametrize("variables", [{}, {"QUIRE_TLS_CERT": "CERT"}], ids=["plain", "TLS"])
def test_health_of_a_server_that_is_not_there(variables: dict[str, str], tmp_path: Path) -> None:
    trustme.CA().issue_cert("quire.chat.svc").cert_chain_pems[0].write_to_path(tmp_path / "cert")
    environment = {name: str(tmp_path / "cert") for name in variables}
    script = DEPLOY / "docker/health.py"
    done = subprocess.run([sys.executable, script, "1"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()[0]) == (1, "UNAVAILABLE")


@pytest.mark.parametrize("name", ["quire.chat.svc", "*.chat.svc", "10.0.0.4"])
def test_health_of_a_server_with_tls(name: str, tmp_path: Path) -> None:
    """The certificate is trusted because it is the server's own; the signer's is not there."""
    issued = trustme.CA().issue_cert(name)
    own, other = tmp_path / "own", tmp_path / "other"
    issued.cert_chain_pems[0].write_to_path(own)
    trustme.CA().issue_cert(name).cert_chain_pems[0].write_to_path(other)
    server, service = grpc.server(ThreadPoolExecutor(1)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    service.set("", SERVING)
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()

    def ask(certificate: Path) -> tuple[int, str]:
        script, variables = DEPLOY / "docker/health.py", {"QUIRE_PORT": str(port), "QUIRE_TLS_CERT": str(certificate)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=variables)
        return done.returncode, done.stdout.split()[0]

    assert ask(own) == (0, "SERVING")
    assert ask(other) == (1, "UNAVAILABLE")
    service.set("", NOT_SERVING)
    assert ask(own) == (1, "NOT_SERVING")
    server.stop(None)
