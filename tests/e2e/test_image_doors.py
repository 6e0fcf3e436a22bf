"""Images through batch jobs, the command line and LLM: the same tokens as through the API."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from quire import LLM, RequestFailed, Sampling, Stopping
from quire.v1 import generation_service_pb2 as pb

from tests.e2e.test_images import asked
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded
from tests.model.vision.seen import NEW, PROMPTS, TEXTS, Seen
from tests.support.forking import run_quire
from tests.support.image_chats import CAPITALS
from tests.support.server import RunningServer, clean_environment, quire, running_server

GREEDY, STOPPING = Sampling(temperature=0), Stopping(max_tokens=NEW, ignore_eos=True)
REST = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": NEW, "ignore_eos": True}}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    shelf = Shelf(tmp_path_factory.mktemp("seeing"))
    directory = shelf.checkpoint(BY_NAME["smolvlm"])
    (directory / "chat_template.jinja").write_text(CAPITALS)
    made = Seen(BY_NAME["smolvlm"], shelf)
    yield made
    made.preparer.close()


@pytest.fixture(scope="module")
def server(seen: Seen) -> Iterator[RunningServer]:
    with running_server("--model", str(seen.directory), "--kv-cache-memory", "16MiB") as running:
        yield running


@pytest.fixture(scope="module")
def folder(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the images in files 0.png, 1.png, ..."""
    folder = tmp_path_factory.mktemp("job")
    for i, image in enumerate(seen.images):
        (folder / f"{i}.png").write_bytes(encoded(image))
    return folder


def conversation(image: object) -> list[dict[str, object]]:
    return [
        {"role": "system", "content": "that"},
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "the cat?"}]},
    ]


@pytest.fixture(scope="module")
def answered(seen: Seen, server: RunningServer, folder: Path) -> list[int]:
    """Returns the API's answer to that conversation."""
    spec = asked("", (folder / "1.png").read_bytes())
    image = spec.images.pop()
    spec.chat.messages.add(role="system", parts=[pb.ContentPart(text="that")])
    spec.chat.messages.add(role="user", parts=[pb.ContentPart(image=image), pb.ContentPart(text="the cat?")])
    with grpc.insecure_channel(server.address) as channel:
        return list(server.stub(channel).Generate(pb.GenerateRequest(spec=spec)).sequences[0].token_ids)


@pytest.mark.parametrize("own", [True, False], ids=["own engine", "server"])
@pytest.mark.slow
def test_batch_jobs_read_files_and_base64(
    own: bool, seen: Seen, server: RunningServer, folder: Path, answered: list[int], tmp_path: Path
) -> None:
    lines: list[dict[str, object]] = []
    for n, (text, which) in enumerate(PROMPTS):
        names = [f"{i}.png" if n % 2 else base64.b64encode((folder / f"{i}.png").read_bytes()).decode() for i in which]
        lines.append({"prompt": text, "images": names} | REST)
    lines += [{"prompt": text} | REST for text in TEXTS]
    lines.append({"messages": conversation(str(folder / "1.png"))} | REST)
    for bad in (["none.png"], ["0.png", "0.png"], ["aGVsbG8="], []):
        lines.append({"prompt": "<image>", "images": bad} | REST)
    (folder / "in").write_text("\n".join(json.dumps(line) for line in lines))
    where = ("--model", str(seen.directory), "--kv-cache-memory", "16MiB") if own else ("--server", server.address)
    command = ["batch", *where, "--input", str(folder / "in"), "--output", str(tmp_path / "out")]
    done = run_quire(*command, env=clean_environment())
    assert done.returncode == 3, "lines failed"
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [result["token_ids"] for result in results[:5]] == seen.expected
    assert results[5]["token_ids"] == answered
    errors = [result["error"] for result in results[6:]]
    assert {error["code"] for error in errors} == {"INVALID_ARGUMENT"}
    for error, part in zip(errors, ("No such file", "needs 2", "PNG or JPEG", "needs 0"), strict=True):
        assert part in error["message"]


def test_the_command_line_sends_files(seen: Seen, server: RunningServer, folder: Path, answered: list[int]) -> None:
    flags = ("--server", server.address, "--temperature", "0", "--max-tokens", str(NEW), "--min-tokens", str(NEW), "-q")
    text, which = PROMPTS[1]
    files = [flag for i in which for flag in ("--image", str(folder / f"{i}.png"))]
    done = quire("generate", text, *flags, *files)
    assert done.returncode == 0, done.stderr
    with grpc.insecure_channel(server.address) as channel:
        stub = server.stub(channel)

        def text_of(spec: pb.GenerationSpec) -> str:
            spec.stopping.CopyFrom(pb.StoppingCriteria(max_tokens=NEW, min_tokens=NEW))
            return str(stub.Generate(pb.GenerateRequest(spec=spec)).sequences[0].text)

        images = [encoded(seen.images[i]) for i in which]
        assert done.stdout == text_of(asked(text, *images)) + "\n"
        chat = asked("")
        parts = [pb.ContentPart(image=pb.Image(data=data)) for data in images]
        chat.chat.messages.add(role="user", parts=[*parts, pb.ContentPart(text="the cat?")])
        assert quire("generate", "the cat?", "--chat", *flags, *files).stdout == text_of(chat) + "\n"
    assert "does not exist" in quire("generate", "a", "--image", str(folder / "none.png"), *flags).stderr


def test_llm_takes_bytes_and_paths(seen: Seen, folder: Path, answered: list[int]) -> None:
    with LLM(str(seen.directory), kv_cache_memory=16 * 2**20) as llm:
        images = [[encoded(seen.images[0])], [folder / "1.png", str(folder / "2.png")], [folder / "0.png"], [], ()]
        done = llm.generate([*(text for text, _ in PROMPTS), *TEXTS], GREEDY, STOPPING, images=images)
        assert [completion.token_ids for completion in done] == seen.expected
        (one,) = llm.generate(PROMPTS[0][0], GREEDY, STOPPING, images=[folder / "0.png"])
        assert one.token_ids == seen.expected[0]
        assert one.cached_tokens > 0
        (same,) = llm.generate(
            {"prompt": PROMPTS[0][0], "multi_modal_data": {"image": folder / "0.png"}}, GREEDY, STOPPING
        )
        assert same.token_ids == one.token_ids
        pair = llm.chat(
            [conversation(folder / "1.png"), conversation((folder / "1.png").read_bytes())], GREEDY, STOPPING
        )
        assert [completion.token_ids for completion in pair] == [answered] * 2
        with pytest.raises(RequestFailed, match=r"images\[0\] is '1 bytes': is no image"):
            llm.generate("<image>", images=[b"x"])
        with pytest.raises(FileNotFoundError):
            llm.generate("<image>", images=[folder / "none.png"])
        with pytest.raises(ValueError, match="1 lists of images for 2 prompts"):
            llm.generate(["a", "b"], images=[[]])
        with pytest.raises(RequestFailed, match=r"chat.messages\[1\].parts\[0\].image is"):
            llm.chat([conversation(b"x")])
