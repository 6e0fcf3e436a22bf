"""The kustomizations: built by kubectl, against schemas, and that they are what they say. No cluster is asked."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rpc.cluster.token import find_token
from rpc.settings import ListenSettings
from tests.deploy.files import DEPLOY, OVERLAYS, cluster, groups, kubernetes, pods

ALL = ("base", *OVERLAYS)
VERSIONS = ("1.29", "1.36")
SCHEMA = json.loads((Path(__file__).parent / "raycluster.schema.json").read_text())
GROUPS = ("head", "frontend", "engine")
TOKEN = "/run/quire/ray_token"  # noqa: S105 - a path

each_group = pytest.mark.parametrize("group", GROUPS)


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def autoscaler(directory: str) -> dict[str, Any]:
    """The pod of the container that KubeRay makes of these options and puts beside the head's."""
    options = cluster(directory)["autoscalerOptions"]
    container = {name: options[name] for name in ("env", "volumeMounts", "resources", "securityContext")}
    return as_pod({"containers": [{"name": "autoscaler", "image": "-", **container}]})


# Form


def why_kubectl_cannot(directory: str) -> str:
    if shutil.which("kubectl") is None:
        return "there is no kubectl (Debian: kubernetes-client)"
    done = subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True)
    minor = int("".join(filter(str.isdigit, json.loads(done.stdout)["clientVersion"]["minor"])))
    return f"overlays need kubectl 1.21, this is 1.{minor}" if directory != "base" and minor < 21 else ""


@pytest.mark.parametrize("directory", ALL)
def test_kubectl_builds_what_these_tests_read(directory: str) -> None:
    if why := why_kubectl_cannot(directory):
        pytest.skip(why)
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {f"{made['kind']}/{made['metadata']['name']}": made for made in yaml.safe_load_all(done.stdout)}
    assert built == kubernetes(directory)


@pytest.mark.parametrize("directory", ALL)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_form_of_its_schema(directory: str, version: str) -> None:
    """`validate` raises at the first field that the schema does not have."""
    objects = kubernetes(directory)
    check_forms(objects.pop("RayCluster/quire"), list(pods(directory).values()), version)
    for made in [*objects.values(), autoscaler(directory)]:
        kubernetes_validate.validate(made, version, strict=True)


def check_forms(ray: dict[str, Any], templates: list[dict[str, Any]], version: str) -> None:
    """Checks the forms of a RayCluster and its pods."""
    jsonschema.validate(ray, SCHEMA, jsonschema.Draft202012Validator)
    for spec in templates:
        kubernetes_validate.validate(as_pod(spec), version, strict=True)


WRONG = {
    "a name": lambda spec: spec.update(rayVersions="2"),
    "a group's name": lambda spec: spec["workerGroupSpecs"][1].update(minReplica=1),
    "a number for a string": lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    "the autoscaler's version": lambda spec: spec["autoscalerOptions"].update(version="v3"),
    "no address": lambda spec: spec["gcsFaultToleranceOptions"].pop("redisAddress"),
    "a probe's name": lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"][0].update(livenesProbe={}),
    "a port": lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["ports"][0].update(
        containerPort="grpc"
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_schemas_find(fault: str) -> None:
    ray = copy.deepcopy(kubernetes("overlays/redis")["RayCluster/quire"])
    WRONG[fault](ray["spec"])
    templates = [
        group["template"]["spec"] for group in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"])
    ]
    with pytest.raises(jsonschema.ValidationError):  # kubernetes-validate's is one too
        check_forms(ray, templates, VERSIONS[-1])


@each_group
def test_scripts_are_shell(group: str) -> None:
    (container,) = pods()[group]["containers"]
    assert container["command"] == ["/usr/bin/tini", "--", "/bin/bash", "-c"]
    (script,) = container["args"]
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    # The last command takes the shell's place: it gets the stop signal.
    assert "exec " in script.strip().splitlines()[-1] or "exec quire serve" in script
    assert kubernetes()["RayCluster/quire"]["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}


# Permissions


@pytest.mark.parametrize("directory", ALL)
def test_nothing_runs_as_root_or_can_become_it(directory: str) -> None:
    for name, pod in pods(directory).items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.get("automountServiceAccountToken", True) is (name == "head")  # the autoscaler beside it
        for container in [*pod["initContainers"], *pod["containers"]]:
            check_container(container)
    check_container(cluster(directory)["autoscalerOptions"])


def check_container(container: dict[str, Any]) -> None:
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    environment = {variable["name"]: variable["value"] for variable in container.get("env", ())}
    if environment:
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == TOKEN
        assert "RAY_AUTH_TOKEN" not in environment


@each_group
def test_volumes_are_there_and_hold_what_is_written(group: str) -> None:
    pod = pods()[group]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [
        mount for container in [*pod["initContainers"], *pod["containers"]] for mount in container["volumeMounts"]
    ]
    assert {mount["name"] for mount in mounts} == set(volumes)
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    in_memory = {place for place, volume in places.items() if volume["emptyDir"].get("medium") == "Memory"}
    assert in_memory == {"/run/quire", "/dev/shm"}  # noqa: S108
    assert set(places) - in_memory == {"/tmp", "/home/quire", "/var/cache/quire"}  # noqa: S108


@each_group
def test_the_token_that_is_copied_is_one_that_quire_takes(group: str, tmp_path: Path) -> None:
    """A Secret's file is as the kubelet makes it for an fsGroup: its group reads it."""
    (copying,) = pods()[group]["initContainers"]
    (volume,) = (volume for volume in pods()[group]["volumes"] if volume["name"] == "secret")
    secret, token = tmp_path / "token", tmp_path / "ray_token"
    secret.write_text("secret")
    secret.chmod(volume["secret"]["defaultMode"] | 0o440)
    with pytest.raises(ValueError, match="can be used by others"):
        find_token(str(secret), {})
    given = {"/run/secrets/quire/token": str(secret), TOKEN: str(token)}
    subprocess.run([given.get(word, word) for word in copying["command"]], check=True)
    assert find_token(str(token), {}) == str(token)


def test_only_the_frontends_port_is_reached_from_outside() -> None:
    names = ("quire-cluster", "quire-clients", "quire-metrics")
    policies = [kubernetes()[f"NetworkPolicy/{name}"]["spec"] for name in names]
    inside, clients, metrics = policies
    assert len(policies) == sum(name.startswith("NetworkPolicy/") for name in kubernetes())
    everyone = {"matchLabels": {"ray.io/cluster": "quire"}}
    assert inside["podSelector"] == everyone
    assert inside["ingress"] == [{"from": [{"podSelector": everyone}]}]
    service = kubernetes()["Service/quire"]["spec"]
    assert service["clusterIP"] == "None"
    assert clients["podSelector"]["matchLabels"] == service["selector"]
    assert service["selector"] == {"ray.io/cluster": "quire", "ray.io/group": "frontend"}
    ((port,),) = (rule["ports"] for rule in clients["ingress"])
    opened, page = pods()["frontend"]["containers"][0]["ports"]
    assert port["port"] == opened["containerPort"] == service["ports"][0]["port"]
    assert service["ports"][0]["targetPort"] == opened["name"]
    assert metrics["podSelector"] == clients["podSelector"]
    assert [rule["ports"] for rule in metrics["ingress"]] == [[{"port": page["containerPort"], "protocol": "TCP"}]]
    assert page["containerPort"] == ListenSettings().metrics_port
    assert all(policy["policyTypes"] == ["Ingress"] for policy in policies)
    sources = [source for rule in (*clients["ingress"], *metrics["ingress"]) for source in rule["from"]]
    assert all(source.keys() == {"podSelector"} for source in sources)


@each_group
def test_no_service_sets_a_variable_of_quires(group: str) -> None:
    """Kubernetes tells of a Service quire in QUIRE_PORT, which is --port."""
    assert pods()[group]["enableServiceLinks"] is False


# The overlays


def test_redis_is_told_of_without_its_password() -> None:
    options = cluster("overlays/redis")["gcsFaultToleranceOptions"]
    assert options["redisPassword"].keys() == {"valueFrom"}
    assert "gcsFaultToleranceOptions" not in cluster()


def test_cuda_gives_each_engine_a_gpu_and_the_frontend_none() -> None:
    made, plain = groups("overlays/cuda"), groups()
    container = made["engine"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["image"].endswith("-cuda")
    frontend = made["frontend"]["template"]["spec"]["containers"][0]
    assert {"name": "QUIRE_DEVICE", "value": "cuda"} in frontend["env"]
    assert made["head"] == plain["head"]
