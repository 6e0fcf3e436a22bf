"""Tokens and their tenants; files that change, and files that are none."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.access import reloaded
from rpc.access.reloaded import Reloaded
from rpc.access.tokens import AccessTokens, Principal

ANN, BOB, OPS = "ann-" + "a" * 20, "bob-" + "b" * 20, "ops-" + "o" * 20


def write(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> AccessTokens:
    return AccessTokens(
        write(tmp_path / "tokens", "# ours", "", f"ann {ANN}", f" bob\t{BOB} # his", f"ops {OPS} operator")
    )


def bearer(token: str) -> dict[str, object]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_says_who_calls(tokens: AccessTokens) -> None:
    assert tokens.principal_of(bearer(ANN)) == Principal("ann")
    assert tokens.principal_of({"authorization": f"bearer  {BOB} "}) == Principal("bob")
    assert tokens.principal_of(bearer(OPS)) == Principal("ops", operator=True)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        bearer(""),
        bearer(ANN[:-1]),
        bearer(ANN + "a"),
        bearer(ANN.upper()),
        bearer("ann"),
        {"authorization": ANN},
        {"authorization": f"Basic {ANN}"},
        {"authorization": b"Bearer " + ANN.encode()},
        {"authorization-bin": bearer(ANN)["authorization"]},
        bearer("\u00e4" * 20),
    ],
)
def test_what_shows_no_token_is_nobody(tokens: AccessTokens, metadata: dict[str, object]) -> None:
    assert tokens.principal_of(metadata) is None


@given(st.text())
def test_no_other_text_is_a_token(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokens = AccessTokens(write(tmp_path_factory.getbasetemp() / "tokens", f"ann {ANN}"))
    assert (tokens.principal_of(bearer(text)) is None) == (text.strip() != ANN)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "has no token"),
        (["# nothing"], "has no token"),
        (["ann"], "line 1: must be TENANT TOKEN"),
        (["default " + "a" * 20], "cannot be a tenant's name"),
        (["x y z w"], "must be TENANT TOKEN"),
        ([f"ann {ANN} admin"], "must be TENANT TOKEN"),
        ([f"an/n {ANN}"], "the tenant must be"),
        ([f"{'a' * 65} {ANN}"], "the tenant must be"),
        (["ann " + "a" * 15], "at least 16"),
        ([f"ann {ANN}", f"bob {ANN}"], "line 2: the token stands in a line before it"),
        (["ann t\u00f6ken" + "a" * 20], "bytes that no token has"),
        (["ann \x01" + "a" * 20], "visible"),
    ],
)
def test_what_is_no_token_file_is_refused_and_says_no_token(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as raised:
        AccessTokens(write(tmp_path / "tokens", *lines))
    assert ANN not in str(raised.value)
    assert "--token-file" in str(raised.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        AccessTokens(write(tmp_path / "tokens", f"ann {ANN}", mode=0o640))


def test_tokens_change_while_a_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloaded, "PERIOD", 0.0)
    path = write(tmp_path / "tokens", f"ann {ANN}")
    tokens = AccessTokens(path)
    assert tokens.principal_of(bearer(BOB)) is None
    new = write(tmp_path / "new", f"bob {BOB}")
    os.replace(new, path)
    assert tokens.principal_of(bearer(BOB)) == Principal("bob")
    assert tokens.principal_of(bearer(ANN)) is None, "it was taken out"
    write(path, "nonsense")
    assert tokens.principal_of(bearer(BOB)) == Principal("bob"), "what was right before stays in force"
    path.unlink()
    assert tokens.principal_of(bearer(BOB)) == Principal("bob")
    write(path, f"ann {ANN}")
    assert tokens.principal_of(bearer(ANN)) == Principal("ann")


def test_files_are_looked_at_once_a_second(tmp_path: Path) -> None:
    path, now, reads = tmp_path / "file", [0.0], list[str]()
    path.write_text("a")

    def read() -> str:
        reads.append(path.read_text())
        return reads[-1]

    held = Reloaded([path], read, lambda: now[0])
    path.write_text("changed")
    assert held.current() == "a"
    now[0] = 1.0
    assert held.current() == "changed"
    now[0] = 5.0
    assert held.current() == "changed"
    assert reads == ["a", "changed"], "it is read when it has changed"


def test_a_token_may_have_a_hash_in_it(tmp_path: Path) -> None:
    whole = "0123456789abcdefgh#rest"
    tokens = AccessTokens(write(tmp_path / "tokens", f"ann {whole} # hers", f"#bob {BOB}"))
    assert tokens.principal_of(bearer(whole)) == Principal("ann")
    assert tokens.principal_of(bearer(whole.partition("#")[0])) is None
    assert tokens.principal_of(bearer(BOB)) is None
