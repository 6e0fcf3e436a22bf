"""Flags of the prefix cache: what they become, and what is said where they cannot be."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rpc.server
from cache_manager import policies
from cache_manager.settings import POLICIES, CacheSettings
from model.settings import ModelSettings
from rpc.cache_secret import read_secret
from rpc.cli.main import app
from rpc.frontend.prepare import load_preparer
from rpc.settings import EngineConfig, ServerSettings
from scheduler.limits import Limits
from scheduler.spec import Spec

Serve = Callable[..., Result]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """Returns the settings that `quire serve` would have served with."""
    settings: list[ServerSettings] = []

    async def serve(given: ServerSettings, *_parts: object) -> None:
        settings.append(given)

    monkeypatch.setattr(rpc.server, "serve", serve)
    return settings


def quire_serve(*flags: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["serve", *flags], env=environment)


def one(served: list[ServerSettings], *flags: str, **environment: str) -> ServerSettings:
    result = quire_serve(*flags, **environment)
    assert result.exit_code == 0, result.output
    return served.pop()


def test_flags_become_settings(served: list[ServerSettings]) -> None:
    assert one(served).cache == CacheSettings(True)
    flags = ("--no-prefix-cache", "--eviction-policy", "lru", "--cache-secret-file", "f", "--public-prefixes", "p")
    settings = one(served, *flags)
    assert settings.cache == CacheSettings(False, "lru", "f")
    assert settings.frontend.public_prefixes == "p"


def test_a_switch_that_is_on_can_be_set_in_every_way(served: list[ServerSettings], tmp_path: Path) -> None:
    """Command line over file over environment, each in both directions."""
    off, on = tmp_path / "off.toml", tmp_path / "on.toml"
    off.write_text("prefix-cache = false\n")
    on.write_text("prefix-cache = true\n")

    def kept(*flags: str, **environment: str) -> bool:
        return one(served, *flags, **environment).cache.prefix_cache

    assert kept("--prefix-cache") is True
    for value, expected in (("0", False), ("false", False), ("no", False), ("1", True), ("true", True)):
        assert kept(QUIRE_PREFIX_CACHE=value) is expected
    assert kept("--config", str(off)) is False
    assert kept("--config", str(off), QUIRE_PREFIX_CACHE="1") is False
    assert kept("--config", str(on), QUIRE_PREFIX_CACHE="0") is True
    assert kept("--prefix-cache", "--config", str(off), QUIRE_PREFIX_CACHE="0") is True
    assert kept("--no-prefix-cache", "--config", str(on), QUIRE_PREFIX_CACHE="1") is False


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('prefix-cache = "yes"', "prefix-cache = 'yes' is of the wrong type"),
        ("prefix-cache = 0", "prefix-cache = 0 is of the wrong type"),
        ("no-prefix-cache = true", "'no-prefix-cache' is no flag of quire serve: did you mean prefix-cache?"),
        ("eviction-policy = true", "eviction-policy = True is of the wrong type"),
    ],
)
def test_a_file_with_something_else_is_refused(
    served: list[ServerSettings], tmp_path: Path, content: str, complaint: str
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(content + "\n")
    result = quire_serve("--config", str(file), COLUMNS="300", TERMINAL_WIDTH="300")
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("\u2502", " ").split())
    assert served == []


def test_a_policy_that_is_none_is_refused_with_those_that_are(served: list[ServerSettings]) -> None:
    result = quire_serve("--eviction-policy", "mru")
    assert result.exit_code == 1
    assert f"--eviction-policy is 'mru', must be one of {', '.join(POLICIES)}" in result.output
    assert served == []


def test_every_policy_that_can_be_named_is_there() -> None:
    assert set(policies.POLICIES) == set(POLICIES)
    for name, make in policies.POLICIES.items():
        assert make(8).name == name


# The secret.


def secret_file(directory: Path, content: bytes, mode: int = 0o600) -> CacheSettings:
    path = directory / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return CacheSettings(secret_file=str(path))


def test_engines_with_one_file_have_one_secret(tmp_path: Path) -> None:
    settings = secret_file(tmp_path, b"0123456789abcdef0123456789abcdef\n", 0o400)
    assert read_secret(settings) == read_secret(settings) == b"0123456789abcdef0123456789abcdef\n"


def test_without_a_file_no_two_engines_have_the_same() -> None:
    secrets = {read_secret(CacheSettings()) for _ in range(3)}
    assert len(secrets) == 3
    assert {len(secret) for secret in secrets} == {32}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620])
def test_a_secret_that_others_can_use_is_none(tmp_path: Path, mode: int) -> None:
    settings = secret_file(tmp_path, b"x" * 32, mode)
    with pytest.raises(ValueError, match=r"--cache-secret-file .*secret can be used by others .* chmod 600"):
        read_secret(settings)


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 31])
def test_a_short_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    length = len(content)
    with pytest.raises(ValueError, match=f"--cache-secret-file .* has {length} bytes, must have at least 32"):
        read_secret(secret_file(tmp_path, content))


def test_a_secret_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        read_secret(CacheSettings(secret_file=str(tmp_path / "nowhere")))
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        read_secret(CacheSettings(secret_file=str(tmp_path)))


def test_the_way_to_another_process_keeps_it(tmp_path: Path) -> None:
    config = EngineConfig(cache=CacheSettings(False, POLICIES[-1], "a secret's place"))
    assert EngineConfig.from_json(config.to_json()) == config


# Public prefixes.

DEMO = ModelSettings()
LIMITS = Limits(2048, 1024, 100_000, 8)
RULES = "You are a courteous servant of the court. Answer in verse.\n\nFirst question:"


def public_tokens(place: Path, prompt: str) -> int:
    """Counts the public tokens of a prompt, and those of the declared text."""
    return load_preparer(DEMO, str(place)).prepare(Spec(prompt), LIMITS).scope.public


def test_a_prompt_that_starts_with_a_public_text_shares_so_many_tokens(tmp_path: Path) -> None:
    place = tmp_path / "rules.txt"
    place.write_text(RULES + "\n", encoding="utf-8")
    preparer = load_preparer(DEMO, str(place))
    (declared,) = preparer.public
    assert list(declared) == preparer.tokenizer.encode(RULES, True), "the newline at the end of the file is no part"
    assert public_tokens(place, RULES) == len(declared)
    assert public_tokens(place, RULES + " Who art thou?") in (len(declared) - 1, len(declared))
    half = public_tokens(place, RULES[: len(RULES) // 2] + "#")
    assert 0 < half < len(declared), "what it has in common is public all the same"
    assert public_tokens(place, "Something else") == 0


def test_a_directory_is_all_its_files(tmp_path: Path) -> None:
    for name, text in (("a.txt", RULES), ("b.md", "Dramatis personae: ROMEO, JULIET\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "more").mkdir()
    assert len(load_preparer(DEMO, str(tmp_path)).public) == 2
    assert public_tokens(tmp_path, RULES) > 10
    assert public_tokens(tmp_path, "Dramatis personae: ROMEO, JULIET and others") > 5


def test_none_is_public_unless_declared(tmp_path: Path) -> None:
    assert load_preparer(DEMO).public == ()
    assert load_preparer(DEMO, str(tmp_path)).public == ()


def test_public_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rules").write_bytes(b"caf\xe9")
    for place in (tmp_path / "rules", tmp_path):
        with pytest.raises(ValueError, match=f"--public-prefixes {place} holds a file that is no UTF-8 text"):
            load_preparer(DEMO, str(place))
    with pytest.raises(OSError, match="nowhere"):
        load_preparer(DEMO, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("flag", ["--cache-secret-file", "--public-prefixes"])
def test_a_server_says_in_one_line_that_a_file_is_not_there(tmp_path: Path, flag: str) -> None:
    result = quire_serve("--port", "0", "--metrics-port", "0", "--engine", "thread", flag, str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert "nowhere" in result.output
    assert "Traceback" not in result.output
