"""Reads `deploy/`: its YAML, its overlays applied, its commands as words."""

import copy
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("overlays/redis", "overlays/cuda")


def kubernetes(directory: str = "base") -> dict[str, Any]:
    """The objects of a kustomization by kind/name, its JSON patches applied."""
    place = DEPLOY / "kubernetes" / directory
    kustomization = read(place / "kustomization.yaml")[0]
    objects: dict[str, Any] = {}
    for resource in kustomization["resources"]:
        if (place / resource).is_dir():
            objects |= kubernetes(str((place / resource).resolve().relative_to(DEPLOY / "kubernetes")))
            continue
        for found in read(place / resource):
            # YAML's aliases are one object: a patch would change them all.
            objects[f"{found['kind']}/{found['metadata']['name']}"] = unaliased(found)
    for patch in kustomization.get("patches", ()):
        target = objects[f"{patch['target']['kind']}/{patch['target']['name']}"]
        for operation in yaml.safe_load(patch["patch"]):
            apply(operation, target)
    return objects


@cache
def read(path: Path) -> list[Any]:
    """The documents of a YAML file, not to be changed."""
    return list(yaml.safe_load_all(path.read_text()))


def unaliased(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unaliased(of) for key, of in value.items()}
    return [unaliased(of) for of in value] if isinstance(value, list) else copy.copy(value)


def apply(operation: dict[str, Any], target: Any) -> None:
    """One operation of RFC 6902: test, add or replace."""
    *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    for part in path:
        target = target[int(part) if isinstance(target, list) else part]
    kind, value = operation["op"], operation["value"]
    if isinstance(target, list) and last == "-":
        assert kind == "add"
        target.append(value)
        return
    key = int(last) if isinstance(target, list) else last
    if kind == "test":
        assert target[key] == value
        return
    assert kind == "add" or key in target
    assert kind in ("add", "replace")
    target[key] = value


def cluster(directory: str = "base") -> dict[str, Any]:
    """The RayCluster's spec."""
    return kubernetes(directory)["RayCluster/quire"]["spec"]


def groups(directory: str = "base") -> dict[str, dict[str, Any]]:
    """Returns the RayCluster's groups by name."""
    spec = cluster(directory)
    return {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pods(directory: str = "base") -> dict[str, dict[str, Any]]:
    """The pod's spec of each group."""
    return {name: group["template"]["spec"] for name, group in groups(directory).items()}


def compose() -> dict[str, Any]:
    return read(DEPLOY / "docker/compose.yaml")[0]


def launcher() -> dict[str, Any]:
    return read(DEPLOY / "ray/cluster.yaml")[0]


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after `quire` or `ray` wherever it is called in shell, YAML or Markdown; the folder that a Dockerfile
    copies is no call.
    """
    whole = re.sub(r"\\\n\s*(#\s*)?", " ", text)
    for found in re.finditer(rf"(?:^|[\s/`'\"(])(?<!COPY ){program} ((?:[a-z]+|--)[^\n`|&;]*)", whole):
        words = found[1].split("#")[0].strip().removesuffix("'")
        yield shlex.split(words.replace("$", ""), posix=True)


def flags(words: list[str]) -> dict[str, str]:
    """--flag=value and --flag value of a command; "" where there is none."""
    given: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            given[flag] = value or ("" if after.startswith("-") else after)
    return given


def seconds(text: str) -> int:
    """Returns the seconds of a duration such as compose's "90s"."""
    return int(text.removesuffix("s"))
