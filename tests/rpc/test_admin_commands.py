"""Commands of operators, with the answers of a server: what fits a terminal, and which request is meant."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from click.testing import Result
from quire.v1 import admin_service_pb2 as pb
from typer.testing import CliRunner

from rpc.cli.main import app

ID = "0123456789abcdef0123456789abcdef"
OTHER = "0123456789abcdef0123456789abcdee"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, list[Any]]]:
    """Runs a command in a terminal of 80 columns; the server gives the answer to each call. With the calls."""

    def of(command: Sequence[str], answer: object) -> tuple[Result, list[Any]]:
        asked = list[Any]()

        def call(_server: str, _token_file: object, _method: str, request: object, *_rest: object) -> object:
            asked.append(request)
            return answer

        monkeypatch.setattr("rpc.cli.admin.call", call)
        monkeypatch.setattr("rpc.cli.cluster.call", call)
        return CliRunner().invoke(app, command, env={"COLUMNS": "80"}), asked

    return of


Run = Callable[..., tuple[Result, list[Any]]]


def requests(*ids: tuple[str, str], total: int | None = None) -> pb.ListRequestsResponse:
    live = [
        pb.LiveRequest(request_id=name, tenant=tenant, state=pb.REQUEST_STATE_RUNNING, replica=0, prompt_tokens=9)
        for name, tenant in ids
    ]
    return pb.ListRequestsResponse(requests=live, total_count=len(live) if total is None else total)


def lines(done: Result) -> list[str]:
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("tenant", ["default", "a-tenant-with-a-name-of-forty-characters"])
def test_ids_are_shown_whole(run: Run, tenant: str) -> None:
    _, *rows, _ = lines(run(["admin", "requests"], requests((ID, tenant), ("[red]", tenant)))[0])
    assert "".join(row.split(" ")[0] for row in rows) == ID + "[red]"
    assert tenant != "default" or rows[0].startswith(ID)


@pytest.mark.parametrize(
    ("given", "tenant", "meant"),
    [
        (ID, None, (ID, "a")),
        (ID[:-1], "a", (ID, "a")),
        ("cd", None, ("cde", "b")),
        ("cde", None, ("cde", "b")),
        ("nobody", None, ("nobody", "")),
        ("nobody", "c", ("nobody", "c")),
    ],
)
def test_the_beginning_of_an_id_is_enough_where_only_one_has_it(
    run: Run, given: str, tenant: str | None, meant: tuple[str, str]
) -> None:
    answer = requests((ID, "a"), (OTHER, "b"), ("cde", "b"), ("cdef", "b") if given == "cde" else ("x", "b"))
    done, asked = run(["admin", "cancel", given, *(["--tenant", tenant] if tenant else [])], answer)
    assert done.exit_code == 0, done.output
    assert (asked[-1].request_id, asked[-1].tenant) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ID[:5], f"'01234' may be {ID} (a), {OTHER} (b): give more of its id"),
        ("same", "'same' may be same (a), same (b): give more of its id, or a --tenant"),
        ("r", "'r' may be r0 (a), r1 (a), r2 (a), r3 (a), r4 (a) and 2 more"),
        ("cd", "only 12 of 2000 live requests were looked at: give the whole id"),
    ],
)
def test_an_id_that_may_be_several_ends_none(run: Run, given: str, message: str) -> None:
    many = [(f"r{number}", "a") for number in range(7)]
    answer = requests((ID, "a"), (OTHER, "b"), ("same", "a"), ("same", "b"), ("cde", "b"), *many, total=2000)
    done, asked = run(["admin", "cancel", given], answer)
    assert done.exit_code == 1
    assert message in done.stderr
    assert not any(isinstance(request, pb.CancelRequestRequest) for request in asked)


def test_the_page_map_is_a_picture_of_the_whole_pool(run: Run) -> None:
    states = [pb.PAGE_STATE_HELD] * 4096 + [pb.PAGE_STATE_CACHED] * 4096 + [pb.PAGE_STATE_FREE] * 8191
    holder = pb.PageHolder(request_id=ID, pages=[1, 2])
    *picture, said, legend, _, held = lines(
        run(["admin", "page-map"], pb.GetPageMapResponse(page_size=16, states=states, holders=[holder]))[0]
    )
    assert [line.split()[0] for line in picture] == [str(start) for start in range(0, 16384, 1024)]
    assert "".join(line.split()[1] for line in picture) == "█" * 256 + "⠿" * 256 + "·" * 512
    assert said == "16383 pages of 16 tokens, 16 in a character:"
    assert legend == "· free 8191, ░▒▓█ held 4096, ⠂⠆⠶⠿ cached 4096, ! set aside 0"
    assert re.fullmatch(rf"{ID} +2", held)


def test_cluster_status_fits_a_terminal(run: Run) -> None:
    replica = pb.Replica(
        number=0, state=pb.REPLICA_STATE_SERVING, epoch=1, request_count=123, running=99, waiting=12,
        waiting_tokens=34567, pages_used=177, pages_cached=1024, pages_total=16384, place="process 31494",
    )  # fmt: skip
    _, _, row = lines(run(["cluster", "status"], pb.ListReplicasResponse(replicas=[replica]))[0])
    assert row.split(maxsplit=10) == [
        "0", "serving", "1", "123", "99", "12", "(34567)", "177,", "1024,", "16384", "process 31494"
    ]  # fmt: skip
