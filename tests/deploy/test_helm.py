"""The Helm chart: linted and rendered by Helm's engine where that is installed, its values by their schema always."""

import copy
import json
import subprocess
import tomllib
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rpc.services.health import LIVENESS
from tests.deploy.files import DEPLOY, ROOT, flags, kubernetes, read
from tests.deploy.test_agreement import STOPPING, parameters
from tests.deploy.test_kubernetes import VERSIONS

CHART = DEPLOY / "helm/quire"
HELM = ROOT / "build/helm/bin/python"  # `.ci/run` installs helm-python-sdk there, which is Helm 4 as a library
WARNING = 2  # severity of a message of `helm lint`

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "image": {"tag": "0.1.0-cuda", "pullSecrets": [{"name": "registry"}]},
        "replicas": 3,
        "model": "/models/llama",
        "models": {"claim": "checkpoints"},
        "server": {
            "args": ["--kv-cache-memory=16GiB", "--max-sequences=64"],
            "env": [
                {"name": "OMP_NUM_THREADS", "value": "8"},
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "drainTime": 300,
            "startTimeout": 1200,
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"memory": "64Gi"}},
        },
        "gateway": {"args": ["--max-prompts=16"]},
        "tokens": {"secret": "quire-tokens"},
        "tls": {"secret": "quire-tls"},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "little": {
        "replicas": 1,
        "gateway": {"enabled": False},
        "metrics": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "tokens alone": {"tokens": {"secret": "quire-tokens", "key": "people"}},
    "TLS alone": {"tls": {"secret": "quire-tls"}},
}
SCRIPT = """
import json, sys
import helm_python as helm
place, cases = json.load(sys.stdin)
made = {}
with helm.Chart.load(place) as chart:
    for name, values in cases.items():
        lint = helm.lint(place, values, strict=True)
        made[name] = lint, chart.render(values, name="quire", namespace="chat")
refused = []
for values in ({"replica": 1}, {"replicas": -1}, {"server": {"args": ["kv"]}}, {"tls": {"secret": "A B"}}):
    try:
        with helm.Chart.load(place) as chart:
            chart.render(values)
    except helm.HelmError as error:
        refused.append(str(error))
print(json.dumps([made, refused]))
"""

each_case = pytest.mark.parametrize("case", CASES)
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="there is no build/helm (.ci/run: helm-python-sdk)")


@cache
def helm() -> tuple[dict[str, tuple[dict[str, Any], dict[str, str]]], list[str]]:
    """Lets Helm lint and render each case, and refuse wrong values."""
    done = subprocess.run(
        [str(HELM), "-c", SCRIPT], input=json.dumps([str(CHART), CASES]), capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made, refused = json.loads(done.stdout)
    return made, refused


def rendered(case: str) -> dict[str, Any]:
    """The objects by kind/name."""
    files = helm()[0][case][1]
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    objects = [made for text in texts for made in yaml.safe_load_all(text) if made]
    return {f"{made['kind']}/{made['metadata']['name']}": made for made in objects}


def pod(case: str) -> dict[str, Any]:
    return rendered(case)["Deployment/quire"]["spec"]["template"]["spec"]


def without_pull_policy(objects: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(objects)
    for container in made["Deployment/quire"]["spec"]["template"]["spec"]["containers"]:
        container.pop("imagePullPolicy", None)
    return made


@needs_helm
@each_case
def test_helm_lints_it_without_a_warning(case: str) -> None:
    report = helm()[0][case][0]
    assert report["errors"] == []
    assert [said for said in report["messages"] if said["severity"] >= WARNING] == []


@needs_helm
@each_case
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_form_of_its_schema(case: str, version: str) -> None:
    """`validate` raises at the first field that the schema does not have."""
    for made in rendered(case).values():
        kubernetes_validate.validate(made, version, strict=True)


@needs_helm
def test_the_defaults_make_the_plain_kustomization() -> None:
    assert without_pull_policy(rendered("defaults")) == kubernetes("plain")


@needs_helm
@each_case
def test_commands_flags_and_variables_exist(case: str) -> None:
    for container in pod(case)["containers"]:
        known = parameters(container["args"][:1])
        assert set(flags(container["args"])) <= known
        for variable in container.get("env", ()):
            if variable["name"].startswith("QUIRE_"):
                assert "--" + variable["name"].removeprefix("QUIRE_").lower().replace("_", "-") in known
    asked = CASES[case].get("server", {}).get("env", [])
    assert all(variable in pod(case)["containers"][0]["env"] for variable in asked)
    given = CASES[case].get("server", {}).get("args", [])
    assert pod(case)["containers"][0]["args"][-len(given) :] == given or not given


@needs_helm
@each_case
def test_a_pod_is_given_longer_than_its_drain_and_its_start(case: str) -> None:
    for container in pod(case)["containers"]:
        drain = float(flags(container["args"])["--drain-time"])
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod(case)["terminationGracePeriodSeconds"] >= pause + drain + STOPPING
    server = pod(case)["containers"][0]
    probed = server["livenessProbe"]
    assert LIVENESS in (probed["exec"]["command"] if "exec" in probed else probed["grpc"].values())
    window = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert window >= float(flags(server["args"])["--engine-start-timeout"]) + 120


@needs_helm
@each_case
def test_volumes_are_there_and_hold_what_is_named(case: str) -> None:
    made = pod(case)
    containers = [*made.get("initContainers", ()), *made["containers"]]
    volumes = {volume["name"] for volume in made["volumes"]}
    assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
    for container in made["containers"]:
        places = tuple(mount["mountPath"] for mount in container["volumeMounts"])
        values = [*flags(container["args"]).values(), *(given.get("value", "") for given in container.get("env", ()))]
        assert all(value.startswith(places) for value in values if value.startswith("/"))
    for container in containers:
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)


@needs_helm
@each_case
def test_what_is_open_to_others_is_said_to_be_insecure_unless_it_is_not(case: str) -> None:
    """The server itself refuses the start without TLS and tokens, or this flag."""
    values = CASES[case]
    safe = "tls" in values and "tokens" in values
    server, *others = pod(case)["containers"]
    assert ("--allow-insecure-bind" in server["args"]) is not safe
    assert ("exec" if "tls" in values else "grpc") in server["readinessProbe"]
    if "tls" in values:
        (gateway,) = others
        name, _, _ = flags(gateway["args"])["--server"].partition(":")
        assert pod(case)["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": [name]}]
        assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    notes = helm()[0][case][1]["quire/templates/NOTES.txt"]
    assert ("see tls.secret and tokens.secret" in notes) is not safe


@needs_helm
def test_what_is_switched_off_is_not_there() -> None:
    assert set(rendered("little")) == {"Deployment/quire", "Service/quire"}
    (server,) = pod("little")["containers"]
    assert [port["name"] for port in server["ports"]] == ["grpc"]
    assert "--metrics-host" not in flags(server["args"])


@needs_helm
def test_helm_refuses_wrong_values_and_names_them() -> None:
    unknown, negative, bare, name = helm()[1]
    assert "replica" in unknown
    assert "replicas" in negative
    assert "args" in bare
    assert "secret" in name


# Without Helm


def values() -> dict[str, Any]:
    return read(CHART / "values.yaml")[0]


def merged(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges values."""
    return own | {
        key: merged(own[key], value) if isinstance(value, dict) and isinstance(own.get(key), dict) else value
        for key, value in given.items()
    }


@each_case
def test_values_are_what_their_schema_says(case: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    made = merged(values(), CASES[case])
    jsonschema.validate(made, schema, jsonschema.Draft7Validator)
    assert set(schema["properties"]) - {"global"} == set(values())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made | {"replica": 1}, schema, jsonschema.Draft7Validator)


def test_the_chart_is_of_this_version() -> None:
    (chart,) = read(CHART / "Chart.yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version
    assert values()["image"]["tag"] == f"{version}-cpu"
