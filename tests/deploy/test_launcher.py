"""`ray up`'s file, as Ray itself reads it."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rpc.cluster.token import find_token
from tests.deploy.files import DEPLOY, ROOT, flags, launcher

READ = """
import json, sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
def read(config):
    try:
        validate_config(made := prepare_config(config))
    except Exception as error:
        return str(error)
    return {"head": made["head_start_ray_commands"], "types": made["available_node_types"]}
config = yaml.safe_load(sys.stdin)
wrong = dict(config)
wrong["cluster_nme"] = wrong.pop("cluster_name")
flags = [flag for parameter in start.params for flag in parameter.opts]
print(json.dumps({"flags": flags, "made": read(config), "wrong": read(wrong)}))
"""


def read() -> dict[str, Any]:
    """Lets Ray read the file, and one with a typo. flags: those of `ray start`."""
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=(DEPLOY / "ray/cluster.yaml").read_text(), capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_ray_takes_it_and_would_not_take_a_typo() -> None:
    found = read()
    made = found["made"]
    assert isinstance(made, dict), made
    (workers,) = made["types"].values()
    assert workers["min_workers"] == len(launcher()["provider"]["worker_ips"])
    assert made["head"] == launcher()["head_start_ray_commands"]
    for command in [*launcher()["head_start_ray_commands"], *launcher()["worker_start_ray_commands"]]:
        assert set(flags(shlex.split(command))) <= set(found["flags"]), command
    assert "cluster_nme" in found["wrong"]


def test_nodes_ask_for_a_token_and_have_no_dashboard() -> None:
    head, worker = (launcher()[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token" in command
        assert command.startswith("umask 077;")
    assert flags(shlex.split(head))["--include-dashboard"] == "false"
    assert flags(shlex.split(head))["--num-cpus"] == "0"
    assert "--dashboard-host" not in head


def test_the_token_is_where_quire_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the set-up's commands its mode is one that Quire takes."""
    where = "~/.ray/auth_token"
    assert launcher()["file_mounts"][where] == where
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir(mode=0o755)
    place = tmp_path / ".ray/auth_token"
    place.write_text("secret")
    place.chmod(0o644)
    subprocess.run(["bash", "-c", launcher()["setup_commands"][0]], check=True)
    assert find_token(None, {}) == str(place)


def test_the_wheel_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheels = set(re.findall(r"quire\w*-[\w.]+-py3-none-any\.whl", (DEPLOY / "ray/cluster.yaml").read_text()))
    assert wheels == {f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"}
    mounted = [source for source in launcher()["file_mounts"].values() if not source.startswith(("~", "dist/"))]
    assert all((ROOT / source).is_file() for source in mounted)
