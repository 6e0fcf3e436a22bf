"""The `quire` command as a person uses it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rpc.cli.main import app
from tests.support.forking import QUIRE, run_quire
from tests.support.server import clean_environment, running_server


def quire(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the installed command, in a new interpreter."""
    return subprocess.run(
        [QUIRE, *arguments], capture_output=True, text=True, timeout=120, env=clean_environment() | environment
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("serve", "--no-such-flag"),
        ("serve", "--page-size", "0"),
        ("admin", "page-map", "--server", "127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_a_forked_command_says_what_the_installed_one_says(arguments: tuple[str, ...]) -> None:
    """The one that other tests start in its place."""
    installed, forked = quire(*arguments), run_quire(*arguments, env=clean_environment())
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        installed.returncode,
        installed.stdout,
        installed.stderr,
    )


def test_version_and_help_import_no_torch() -> None:
    assert quire("--version").stdout.startswith("quire 0.")
    commands: list[list[str]] = [[], ["serve"], ["generate"], ["estimate"], ["admin", "cancel"]]
    script = (
        "import sys; from rpc.cli.main import app\n"
        f"for command in {commands!r}:\n"
        "    try: app([*command, '-h'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "    assert not {'torch', 'grpc', 'ray', 'triton'} & sys.modules.keys(), (command, sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(commands)


def test_client_and_frontend_import_no_torch() -> None:
    script = (
        "import sys, rpc.client, rpc.frontend.frontend, rpc.services.generation, rpc.services.health, quire.v1\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_generate_streams_to_the_terminal() -> None:
    with running_server(forked=False) as server:
        arguments = ("generate", "First Citizen:", "--server", server.address, "--seed", "1", "--max-tokens", "40")
        shown, quiet = quire(*arguments), quire(*arguments, "--quiet")
        assert shown.returncode == quiet.returncode == 0
        assert shown.stdout == "First Citizen:" + quiet.stdout
        assert len(quiet.stdout) > 40
        assert "seed 1]" in shown.stderr
        assert quiet.stderr == ""
        wrong = quire("generate", "x", "--server", server.address, "--top-p", "7")
        assert wrong.returncode == 1
        assert "sampling.top_p is 7.0: must be in (0, 1]" in wrong.stderr
    gone = quire("generate", "x", "--server", server.address)
    assert gone.returncode == 1
    assert "no server answers" in gone.stderr
    assert wrong.stdout == gone.stdout == "", "a prompt is shown with its answer alone"


def estimate(*arguments: str, **environment: str) -> Result:
    """`quire estimate` in this process: nothing is started fourteen times."""
    return CliRunner(env=dict.fromkeys(os.environ.keys() - clean_environment().keys())).invoke(
        app, ["estimate", *arguments], env=environment
    )


@pytest.mark.slow
def test_estimate_needs_no_weights(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 32768, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = estimate("--model", str(tmp_path), "--kv-cache-memory", "64GiB", "--json")
    values = json.loads(done.stdout)
    assert values["bytes_a_token"] == 2 * 32 * 32 * 128 * 2
    assert values["sequence_bytes"] == pytest.approx(17.18e9, rel=1e-3)
    assert values["sequences"] == 4
    assert values["weight_bytes"] == pytest.approx(2 * 6.74e9, rel=1e-3)
    smaller = estimate("--model", str(tmp_path), "--json", QUIRE_QUANTIZATION="int8")
    assert json.loads(smaller.stdout)["weight_bytes"] == pytest.approx(6.74e9 + 0.13e9, rel=1e-2)
    table = estimate("--model", str(tmp_path), "--kv-cache-memory", "64GiB", "--length", "100")
    shown = dict(re.findall(r"│ (\S[^│]*?) +│ +(\S[^│]*?) │", table.stdout))
    assert shown["Model"] == values["model"] == tmp_path.name
    assert shown["KV of a token"] == "524,288 bytes, 512.0 KiB"
    assert shown["Memory for KV"] == "68,719,476,736 bytes, 64.0 GiB"
    assert "quire-demo" in estimate().stdout
    assert "--length is 40000" in estimate("--model", str(tmp_path), "--length", "40000").stderr


def test_command_line_beats_file_beats_environment(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('page-size = 32\nkv-cache-memory = "64MiB"\n')

    def page_size(*flags: str, **environment: str) -> int:
        done = estimate("--json", *flags, **environment)
        assert done.exit_code == 0, done.stderr
        return int(json.loads(done.stdout)["page_size"])

    assert page_size() == 16
    assert page_size(QUIRE_PAGE_SIZE="8") == 8
    assert page_size("--config", str(file), QUIRE_PAGE_SIZE="8") == 32
    assert page_size("--page-size", "4", "--config", str(file), QUIRE_PAGE_SIZE="8") == 4
    file.write_text("page-size = 32\n[serve]\nport = 7\n[estimate]\npage-size = 64\n")
    assert page_size("--config", str(file)) == 64, (
        "a command's own table beats the top, and others' are not its concern"
    )
    for content, complaint in (
        ("page-sise = 32", "'page-sise' is no flag of quire estimate: did you mean page-size?"),
        ("[estimate]\npage-sise = 32", "'page-sise' is no flag of quire estimate: did you mean page-size?"),
        ("port = 7", "'port' is no flag of quire estimate: it is a flag of serve, frontend, gateway"),
        ("[generate]\nseed = 1", "[generate] is no command that reads a file"),
        ("page-size = true", "page-size = True is of the wrong type"),
        ("model = ['demo']", "is of the wrong type"),
        ("page-size = 1\npage_size = 2", "is given twice"),
    ):
        file.write_text(content + "\n")
        refused = estimate("--config", str(file), COLUMNS="300")
        assert refused.exit_code == 2
        assert complaint in refused.stderr


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("tls = true", "did you mean tls-cert or tls-key or tls-client-ca? it is a flag of generate, chat, "),
        ('policy = "lru"', "did you mean scheduling-policy or eviction-policy? it is a flag of cache-sim"),
        ("temperature = 0.5", "it is a flag of generate, chat"),
        ("max-tokens = 5", "it is a flag of generate, chat"),
        ("colour = 1", "`quire serve --help` lists its flags"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(tmp_path: Path, key: str, hint: str) -> None:
    (tmp_path / "quire.toml").write_text(key + "\n")
    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "quire.toml")], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert f"{key.partition(' =')[0]!r} is no flag of quire serve: " in done.stderr
    assert hint in done.stderr


def test_a_variable_that_resembles_a_flag_is_reported_and_others_are_not() -> None:
    said = estimate(
        QUIRE_PAGE_SZE="8",
        QUIRE_QUANTISATION="int8",
        QUIRE_TEMPERATURE="1",
        QUIRE_PORT="7",  # serve's
        QUIRE_SERVICE_HOST="10.0.0.1",  # Kubernetes' for a Service of this name, as the next
        QUIRE_PORT_50051_TCP="tcp://10.0.0.1:50051",
        QUIRE_HOME="/opt",
    ).stderr
    assert sorted(said.splitlines()) == [
        "quire: QUIRE_PAGE_SZE in the environment is ignored: did you mean page-size?",
        "quire: QUIRE_QUANTISATION in the environment is ignored: did you mean quantization?",
        "quire: QUIRE_TEMPERATURE in the environment is ignored: it is a flag of generate, chat",
    ]
