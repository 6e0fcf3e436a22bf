"""What a server records of real requests replays, and has nothing of their text."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb
from typer.testing import CliRunner

from rpc.cli.main import app
from rpc.engines.recordings import read_recording
from scheduler.explaining import Explanation, TimelinePhase
from scheduler.replaying import Replay
from tests.support.server import RunningServer, running_server, stream_request

SMALL = ("--kv-cache-memory", "600KiB", "--page-size", "4", "--max-batched-tokens", "32", "--max-sequences", "6")
WORDS = "Xylophone quartz"


def requests() -> list[pb.StreamGenerateRequest]:
    """Prompts that start alike, some long; one has two sequences, one a grammar, one has a salt."""
    asked = [stream_request(f"{WORDS}, said the king of number {i}. " * (1 + i % 4), 30) for i in range(16)]
    asked[3].spec.sampling.sequence_count = 2
    schema = {"type": "object", "properties": {WORDS: {"type": "boolean"}}, "required": [WORDS]}
    asked[5].spec.structured_output.json_schema = json.dumps(schema | {"additionalProperties": False})
    asked[5].spec.stopping.ignore_eos = False
    asked[5].spec.stopping.max_tokens = 60
    asked[7].spec.cache_salt = "pepper"
    return asked


def send(server: RunningServer, leave: int) -> None:
    """Sends all requests at once. The client of the last `leave` ones leaves after the first answer."""
    asked = requests()

    def stream(i: int) -> None:
        with grpc.insecure_channel(server.address) as channel:
            call = server.stub(channel).StreamGenerate(asked[i], timeout=60)
            for _ in call:
                if i >= len(asked) - leave:
                    call.cancel()
                    return

    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(stream, range(len(asked))))


def check(path: Path) -> Replay:
    replay = Replay(read_recording(path))
    assert replay.run() is None
    assert WORDS.split()[0] not in path.read_text()
    assert "pepper" not in path.read_text()
    return replay


def test_a_recording_of_a_server_replays(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    with running_server("--record", str(path), *SMALL) as server:
        send(server, leave=2)
        send(server, leave=2)
    replay = check(path)
    assert replay.requests == 32
    assert replay.scheduler.stats().preemptions
    assert replay.scheduler.stats().prefix_hits
    done = CliRunner().invoke(app, ["replay", str(path)])
    assert done.exit_code == 0
    assert done.stdout.startswith("the same plans: ")
    explained = Explanation(read_recording(path))
    for one in explained.timelines.values():
        assert sum(one.split().values()) == one.latency > 0
        assert one.ended
    spent = Counter[TimelinePhase]()
    for one in explained.timelines.values():
        spent.update(one.split())
    assert min(spent[phase] for phase in TimelinePhase if phase not in (TimelinePhase.HELD, TimelinePhase.SAT_OUT)) > 0


@pytest.mark.slow
def test_each_engine_has_a_file_which_survives_its_death(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    with running_server("--record", str(path), "--replicas", "2", *SMALL) as server:
        send(server, leave=2)
        server.process.kill()
        server.process.wait(30)
    replays = [check(one) for one in (path, path.with_name("engine.rec.1"))]
    assert sum(replay.requests for replay in replays) >= 16
    found = [CliRunner().invoke(app, ["explain", str(one), "1"]) for one in (path, path.with_name("engine.rec.1"))]
    assert sorted(done.exit_code for done in found) == [0, 1], "the number is the frontend's, and on one engine"
