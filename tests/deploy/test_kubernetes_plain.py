"""The Deployment without Ray: built by kubectl, against schemas, and that times, ports, selectors and flags fit."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rpc.gateway.settings import GatewaySettings
from rpc.services.health import LIVENESS
from rpc.settings import ServerSettings
from tests.deploy.files import DEPLOY, flags, kubernetes
from tests.deploy.test_agreement import STOPPING, parameters
from tests.deploy.test_kubernetes import VERSIONS, why_kubectl_cannot

START = 120  # seconds beside --engine-start-timeout that the first start may take
PUBLIC = {"quire/client": {"grpc", "http"}, "quire/prometheus": {"quire-metrics"}}
KINDS = {
    "Deployment/quire",
    "Service/quire",
    "Service/quire-gateway",
    "NetworkPolicy/quire",
    "PodDisruptionBudget/quire",
}


def plain() -> dict[str, Any]:
    """The objects by kind/name."""
    return kubernetes("plain")


def pod() -> dict[str, Any]:
    return plain()["Deployment/quire"]["spec"]["template"]["spec"]


def containers() -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod()["containers"]}


def given(name: str) -> dict[str, str]:
    """Flags of a container's command."""
    return flags(containers()[name]["args"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl (Debian: kubernetes-client)")
def test_kubectl_builds_what_these_tests_read() -> None:
    if why := why_kubectl_cannot("base"):
        pytest.skip(why)
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes/plain")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {f"{made['kind']}/{made['metadata']['name']}": made for made in yaml.safe_load_all(done.stdout)}
    assert built == plain()
    assert set(built) == KINDS


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_form_of_its_schema(version: str) -> None:
    """`validate` raises at the first field that the schema does not have."""
    for made in plain().values():
        kubernetes_validate.validate(made, version, strict=True)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a probe's name": lambda pod: pod["containers"][0].update(livenesProbe={}),
    "a number for a string": lambda pod: pod["containers"][0]["env"][0].update(value=1),
    "a port": lambda pod: pod["containers"][0]["ports"][0].update(containerPort="grpc"),
    "the grace": lambda pod: pod.update(terminationGracePeriodSeconds="90s"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_schemas_find(fault: str) -> None:
    made = copy.deepcopy(plain()["Deployment/quire"])
    WRONG[fault](made["spec"]["template"]["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made, VERSIONS[-1], strict=True)


def test_commands_and_their_flags_exist() -> None:
    assert [container["args"][0] for container in containers().values()] == ["serve", "gateway"]
    for container in containers().values():
        assert set(flags(container["args"])) <= parameters(container["args"][:1])
    names = [variable["name"] for container in containers().values() for variable in container.get("env", ())]
    assert names == ["QUIRE_MODEL"]


def test_ports_are_those_that_the_commands_open() -> None:
    server, gateway = containers()["server"], containers()["gateway"]
    settings = ServerSettings().listen
    assert {port["name"]: port["containerPort"] for port in server["ports"]} == {
        "grpc": int(given("server")["--port"]),
        "quire-metrics": int(given("server")["--metrics-port"]),
    }
    assert (settings.port, settings.metrics_port) == (50051, 9464)
    assert [port["containerPort"] for port in gateway["ports"]] == [GatewaySettings().port]
    assert given("gateway")["--port"] == str(GatewaySettings().port)
    assert given("gateway")["--server"] == f"127.0.0.1:{given('server')['--port']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["grpc"]["port"] == settings.port
    annotations = plain()["Deployment/quire"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == given("server")["--metrics-port"]
    assert given("server")["--metrics-host"] == "0.0.0.0"  # noqa: S104 - a text


def test_a_pod_is_given_longer_than_its_drain() -> None:
    for name, container in containers().items():
        program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep"
        ends = int(seconds) + float(given(name)["--drain-time"]) + STOPPING
        assert pod()["terminationGracePeriodSeconds"] >= ends


def test_probes_wait_for_what_a_server_may_wait_for() -> None:
    server = containers()["server"]

    def window(name: str) -> float:
        return server[name]["periodSeconds"] * server[name]["failureThreshold"]

    assert window("startupProbe") >= float(given("server")["--engine-start-timeout"]) + START
    assert server["livenessProbe"]["grpc"]["service"] == LIVENESS, "one that waits for an engine is not killed"
    assert window("readinessProbe") <= 10
    gateway = containers()["gateway"]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert "tcpSocket" in gateway["startupProbe"]
    assert "tcpSocket" in gateway["livenessProbe"], "a server that starts is no reason to start its gateway anew"


def test_selectors_find_the_pods() -> None:
    made = plain()
    labels = made["Deployment/quire"]["spec"]["template"]["metadata"]["labels"]
    names = {port["name"] for container in containers().values() for port in container["ports"]}
    assert made["Deployment/quire"]["spec"]["selector"]["matchLabels"] == labels
    for service in ("Service/quire", "Service/quire-gateway"):
        assert made[service]["spec"]["selector"] == labels
        assert {port["targetPort"] for port in made[service]["spec"]["ports"]} <= names
    assert made["Service/quire"]["spec"]["clusterIP"] == "None"
    assert made["PodDisruptionBudget/quire"]["spec"]["selector"]["matchLabels"] == labels
    policy = made["NetworkPolicy/quire"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    opened = {
        next(iter(rule["from"][0]["podSelector"]["matchLabels"])): {port["port"] for port in rule["ports"]}
        for rule in policy["ingress"]
    }
    assert opened == PUBLIC
    assert set().union(*opened.values()) == names
    (constraint,) = pod()["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"] == labels


def test_a_node_can_be_drained_and_an_update_takes_no_pod_away_first() -> None:
    made = plain()
    assert made["PodDisruptionBudget/quire"]["spec"]["maxUnavailable"] == 1
    assert made["Deployment/quire"]["spec"]["replicas"] > 1
    assert made["Deployment/quire"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_nothing_runs_as_root_or_can_become_it() -> None:
    security = pod()["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["enableServiceLinks"] is False, "QUIRE_PORT would be --port"
    volumes = {volume["name"] for volume in pod()["volumes"]}
    for container in containers().values():
        check = container["securityContext"]
        assert (check["allowPrivilegeEscalation"], check["readOnlyRootFilesystem"]) == (False, True)
        assert check["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    written = {mount["mountPath"] for mount in containers()["server"]["volumeMounts"]}
    assert written == {"/tmp", "/dev/shm", "/var/cache/quire"}  # noqa: S108
