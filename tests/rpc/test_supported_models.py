"""`quire models --supported` names every architecture that can be served, and asks no server."""

from typer.testing import CliRunner

from model.families import ALIASES, FAMILIES, TEXT_ALONE
from model.multimodal import NANO
from model.vision_families import KINDS
from rpc.cli.main import app


def test_every_architecture_has_a_line() -> None:
    done = CliRunner().invoke(app, ["models", "--supported"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {*FAMILIES, *ALIASES, *TEXT_ALONE, *KINDS, NANO}
    assert len(lines) == len(FAMILIES) + len(ALIASES) + len(TEXT_ALONE) + len(KINDS) + 1
    assert {line.split()[0] for line in lines if line.endswith(", with images")} == {*KINDS, NANO}


def test_a_line_has_the_family_too() -> None:
    lines = CliRunner().invoke(app, ["models", "--supported"]).stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("Olmo3ForCausalLM ")] == ["OLMo 3"]
