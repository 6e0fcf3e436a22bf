"""A model with recurrent layers and images on two engines: streams outlive an engine, with the tokens they would get.

A new engine has none of the states: it computes them from the prompt and the tokens that were delivered.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from tests.e2e.test_replicas import ENGINE
from tests.model.vision import checkpoints
from tests.model.vision.cases import BY_NAME
from tests.model.vision.pictures import encoded, picture
from tests.support.processes import tree
from tests.support.server import RunningServer, running_server

TOKENS, SEEN = 300, 20
PROMPTS = ("<image>the cat sat", "that <image>sat <image>\non the mat", "the cat sat on the mat, " * 4, "sat")
IMAGES = [encoded(picture(*size, seed)) for seed, size in enumerate(((40, 60), (64, 24), (16, 90)))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = checkpoints.write(BY_NAME["qwen3.5-vl"], tmp_path_factory.mktemp("recurrent") / "model")
    flags = ("--replicas", "2", "--kv-cache-memory", "32MiB", "--page-size", "4")
    with running_server("--model", str(directory), *flags) as running:
        yield running


def run_all(server: RunningServer, running: Barrier | None = None) -> list[list[int]]:
    """The tokens of all streams; `running` is met by each once it has some."""

    def one(number: int) -> list[int]:
        text, tokens = PROMPTS[number], list[int]()
        spec = pb.GenerationSpec(
            text=text,
            images=[pb.Image(data=data) for data in IMAGES[: text.count("<image>")]],
            sampling=pb.SamplingParameters(temperature=0.8, seed=number),
            stopping=pb.StoppingCriteria(max_tokens=TOKENS, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        with grpc.insecure_channel(server.address) as channel:
            for answer in server.stub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
                for delta in answer.deltas:
                    assert delta.first_position == len(tokens), "a gap or a duplicate"
                    if running is not None and len(tokens) < SEEN <= len(tokens) + len(delta.token_ids):
                        running.wait(60)
                    tokens.extend(delta.token_ids)
        return tokens

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(one, range(len(PROMPTS))))


def test_streams_of_a_killed_engine_go_on_with_their_states(server: RunningServer) -> None:
    expected, running = run_all(server), Barrier(len(PROMPTS) + 1)
    assert [len(tokens) for tokens in expected] == [TOKENS] * len(PROMPTS)
    with ThreadPoolExecutor(1) as thread:
        streams = thread.submit(run_all, server, running)
        running.wait(60)
        victim = next(process for process in tree(server.process.pid) if ENGINE in process.cmdline())
        victim.send_signal(signal.SIGKILL)
        assert streams.result(120) == expected
