"""Conversations with new kinds of models on two engines, through gRPC and the gateway, while an engine is killed.

One model sees images of any size, the other has recurrent layers. Each answer is the undisturbed one.
"""

import base64
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Semaphore

import grpc
import psutil
import pytest
from quire.v1 import admin_service_pb2 as admin
from quire.v1 import admin_service_pb2_grpc as admin_grpc
from quire.v1 import generation_service_pb2 as pb

from tests.e2e.test_replicas import ENGINE
from tests.model.families import checkpoints as text_checkpoints
from tests.model.families.cases import BY_NAME as TEXT
from tests.model.vision import checkpoints
from tests.model.vision.cases import BY_NAME as SEEING
from tests.model.vision.pictures import encoded, picture
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.image_chats import EITHER
from tests.support.processes import tree, wait_until
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.slow

TOKENS, STARTED, SPEAKERS = 1000, 15, 4  # tokens: as many as may wait for a client that reads slowly
CONTEXT = 2048
SYSTEMS, ANSWERED = ("that cat sat on the mat, " * 3, "the mat sat on that cat, " * 3), "sat on the mat"
IMAGE = encoded(picture(40, 60, 1))
MODELS = {"sees": "qwen3-vl", "recurrent": "qwen3.5"}
WHERE = {"process": ENGINE, "ray": "ray::EngineActor"}
Started = Callable[[], object]


@dataclass
class Place:
    """A server with two engines and a gateway before it. engine: what the command of an engine's process has."""

    server: RunningServer
    gateway: RunningGateway
    engine: str
    sees: bool

    def engines(self) -> list[psutil.Process]:
        return [process for process in tree(self.server.process.pid) if self.engine in " ".join(process.cmdline())]

    def all_run(self) -> bool:
        """Whether both engines have requests."""
        with grpc.insecure_channel(self.server.admin) as channel:
            stub = admin_grpc.AdminServiceStub(channel)
            return all(one.request_count for one in stub.ListReplicas(admin.ListReplicasRequest()).replicas)

    def by_grpc(self, speaker: int, started: Started) -> str:
        spec = pb.GenerationSpec(
            sampling=pb.SamplingParameters(temperature=0.8, seed=speaker),
            stopping=pb.StoppingCriteria(max_tokens=TOKENS, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        image = [pb.ContentPart(image=pb.Image(data=IMAGE))] if self.sees else []
        for role, parts in (
            ("system", [pb.ContentPart(text=SYSTEMS[speaker % 2])]),
            ("user", [*image, pb.ContentPart(text=asked(speaker))]),
            ("assistant", [pb.ContentPart(text=ANSWERED)]),
            ("user", [pb.ContentPart(text="the rat?")]),
        ):
            spec.chat.messages.add(role=role, parts=parts)
        text, tokens = "", 0
        with grpc.insecure_channel(self.server.address) as channel:
            for answer in self.server.stub(channel).StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
                for delta in answer.deltas:
                    assert delta.first_position == tokens, "a gap or a duplicate"
                    if tokens < STARTED <= tokens + len(delta.token_ids):
                        started()
                    text, tokens = text + delta.text, tokens + len(delta.token_ids)
        assert tokens == TOKENS
        return text

    def by_gateway(self, speaker: int, started: Started) -> str:
        url = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
        image = [{"type": "image_url", "image_url": {"url": url}}] if self.sees else []
        text, chunks = "", 0
        with self.gateway.client() as client:
            stream = client.chat.completions.create(
                model="org/model", temperature=0.8, seed=speaker, max_completion_tokens=TOKENS, stream=True,
                messages=[
                    {"role": "system", "content": SYSTEMS[speaker % 2]},
                    {"role": "user", "content": [*image, {"type": "text", "text": asked(speaker)}]},
                    {"role": "assistant", "content": ANSWERED},
                    {"role": "user", "content": "the rat?"},
                ],
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for chunk in stream:
                text, chunks = text + (chunk.choices[0].delta.content or ""), chunks + 1
                if chunks == STARTED:
                    started()
        return text

    def answers(self, started: Started = lambda: None) -> list[str]:
        """Answers to all speakers at once, through both doors. started: each calls it once it has some text."""
        with ThreadPoolExecutor(2 * SPEAKERS) as threads:
            doors = [
                threads.submit(door, i, started) for i in range(SPEAKERS) for door in (self.by_grpc, self.by_gateway)
            ]
            return [door.result() for door in doors]


def asked(speaker: int) -> str:
    return f"the cat {speaker}?"


def written(kind: str, directory: Path) -> Path:
    longer = {"max_position_embeddings": CONTEXT}
    if kind == "sees":
        case = SEEING[MODELS[kind]]
        checkpoints.write(replace(case, more_text=dict(case.more_text) | longer), directory)
    else:
        case = TEXT[MODELS[kind]]
        text_checkpoints.write(replace(case, changes=dict(case.changes) | longer), directory)
    (directory / "chat_template.jinja").write_text(EITHER)
    return directory


@pytest.fixture(
    scope="module",
    params=[("sees", "process"), ("recurrent", "process"), ("sees", "ray"), ("recurrent", "ray")],
    ids=" ".join,
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    kind, where = request.param
    directory = written(kind, tmp_path_factory.mktemp("conversations") / "model")
    flags = ["--replicas", "2", "--kv-cache-memory", "32MiB", "--page-size", "4"]
    flags += ["--ray"] if where == "ray" else []
    with ExitStack() as stack:
        server = stack.enter_context(
            running_server("--model", str(directory), "--served-model-name", "org/model", *flags)
        )
        gateway = stack.enter_context(running_gateway([server.address]))
        yield Place(server, gateway, WHERE[where], kind == "sees")


def test_answers_outlive_an_engine(place: Place) -> None:
    expected, running = place.answers(), Semaphore(0)
    assert expected[::2] == expected[1::2], "gRPC and the gateway differ"
    assert len(set(expected)) == SPEAKERS
    with ThreadPoolExecutor(1) as thread:
        disturbed = thread.submit(place.answers, running.release)
        assert running.acquire(timeout=60), "no stream has text"
        wait_until(place.all_run, "requests on both engines")
        place.engines()[0].send_signal(signal.SIGKILL)
        assert disturbed.result(120) == expected
