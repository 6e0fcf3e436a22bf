"""`quire bench serve` refuses a load that it cannot send in one line, before anything is sent."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from rpc.cli import bench
from rpc.cli.main import app

NOBODY = ("--server", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--protocol", "smtp"), "--protocol is 'smtp', must be one of quire, inference, openai"),
        (("--server", "nowhere"), "the server's address is 'nowhere', must be HOST:PORT"),
        (("--plot", "a.gif"), "--plot a.gif must end in .png or .html"),
        (("--rate", "2", "--concurrency", "2"), "--concurrency and --rate are different loads"),
        (("--ttft-target", "0"), "--ttft-target is 0.0, must be above 0"),
        (("--tpot-target", "nan"), "--tpot-target is nan, must be above 0"),
        (("--tokenizer", "demo"), "--tokenizer is for --protocol openai"),
        (("--protocol", "openai", "--tokenizer", "/nowhere"), "--tokenizer /nowhere: no such directory"),
        (("--protocol", "inference", *NOBODY), "needs --model"),
        (NOBODY, "no server answers at 127.0.0.1:1"),
        (("--protocol", "openai", *NOBODY), "http://127.0.0.1:1/v1"),
    ],
)
def test_what_is_wrong_is_said(flags: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", *flags])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.startswith("quire: ")


@pytest.mark.parametrize(("protocol", "service"), [("quire", "quire.v1"), ("inference", "inference")])
def test_a_port_of_another_service_is_said_to_be_one(protocol: str, service: str) -> None:
    """As the admin port is, which is the next one."""
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    flags = ("--protocol", protocol, "--server", address, "--model", "m")
    done = CliRunner().invoke(app, ["bench", "serve", *flags])
    server.stop(None).wait()
    assert done.exit_code == 1
    assert f"UNIMPLEMENTED: {address} does not serve {service}" in done.stderr
    assert "gRPC port is 50051" in done.stderr
    assert "admin port 50052" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--protocol", "openai"),
            "needs httpx, which is not installed: in Quire's checkout `make setup EXTRAS=bench`",
        ),
        (
            ("--plot", "a.png"),
            "needs matplotlib, which is not installed: in Quire's checkout `make setup EXTRAS=plots`",
        ),
    ],
)
def test_libraries_that_lack_are_named(flags: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda _: None)
    done = CliRunner().invoke(app, ["bench", "serve", *flags])
    assert done.exit_code == 1
    assert said in done.stderr


def test_extras_that_errors_name_exist() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'bench = [\n    "httpx' in project
    assert 'plots = [\n    "matplotlib' in project
