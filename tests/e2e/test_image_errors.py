"""Errors of an image, or of the places for images, name it and hurt no other request."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from PIL import Image
from quire.v1 import generation_service_pb2 as pb

from tests.e2e.test_images import asked, message
from tests.model.vision.cases import BY_NAME, IMAGE
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.seen import Seen
from tests.model.vision.test_images import bomb, saved
from tests.support.image_chats import BLIND
from tests.support.server import RunningServer, details, quire, running_server

GOOD = encoded(picture(20, 20))
MARKERS = {1: "<image>", 2: "<image><image>", 3: "<image>" * 3}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    shelf = Shelf(tmp_path_factory.mktemp("seeing"))
    directory = shelf.checkpoint(BY_NAME["llava-clip"])
    (directory / "chat_template.jinja").write_text(BLIND)
    made = Seen(BY_NAME["llava-clip"], shelf)
    yield made
    made.preparer.close()


@pytest.fixture(scope="module")
def server(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A limit from each place where settings stand."""
    file = tmp_path_factory.mktemp("config") / "quire.toml"
    file.write_text('max-image-bytes = "30KiB"\n')
    flags = ("--model", str(seen.directory), "--kv-cache-memory", "16MiB", "--config", str(file), "--max-images", "2")
    with running_server(*flags, QUIRE_MAX_IMAGE_PIXELS="9000") as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def refused(server: RunningServer, channel: grpc.Channel, spec: pb.GenerationSpec) -> tuple[str, str]:
    """The field and the message; unary and streamed alike."""
    stub = server.stub(channel)
    with pytest.raises(grpc.RpcError) as unary:
        stub.Generate(pb.GenerateRequest(spec=spec))
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)))
    for error in (unary.value, streamed.value):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == unary.value.details()
    (violation,) = details(unary.value)["BadRequest"].field_violations
    return violation.field.removeprefix("spec."), unary.value.details()


def check_serves(server: RunningServer, channel: grpc.Channel, seen: Seen) -> None:
    for i in range(3):
        spec = message(seen, i)
        answer = server.stub(channel).Generate(pb.GenerateRequest(spec=spec))
        assert list(answer.sequences[0].token_ids) == seen.expected[i]


def animation() -> bytes:
    frames = [Image.fromarray(picture(16, 16, seed)) for seed in range(3)]
    return saved(frames[0], save_all=True, append_images=frames[1:])


BAD = {
    "no image": (b"hello" * 100, "PNG or JPEG"),
    "empty": (b"", "PNG or JPEG"),
    "cut off": (encoded(picture(40, 40))[:-600], "cut off"),
    "cut off jpeg": (encoded(picture(40, 40), "JPEG")[:-300], "cut off"),
    "gif": (encoded(picture(16, 16), "GIF"), "PNG or JPEG"),
    "webp": (encoded(picture(16, 16), "WEBP"), "PNG or JPEG"),
    "animated": (animation(), "must not be animated"),
    "bomb": (bomb(60_000, 60_000), "at most 9000 pixels"),
    "largest bomb": (bomb(2**31 - 1, 2**31 - 1), "at most 9000 pixels"),
    "line": (bomb(1, 8000), "at most 100 times"),
    "pixels": (encoded(picture(100, 91)), "'91 x 100 pixels': at most 9000 pixels"),
    "bytes": (GOOD + bytes(30 * 1024), "at most 30720 bytes"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.sample(3)
def test_a_bad_image_is_named_and_the_server_goes_on(
    name: str, server: RunningServer, channel: grpc.Channel, seen: Seen
) -> None:
    data, complaint = BAD[name]
    for images, field in (((data,), "images[0]"), ((GOOD, data), "images[1]")):
        found, text = refused(server, channel, asked(MARKERS[len(images)], *images))
        assert found == field
        assert text.startswith(f"{field} is ")
        assert complaint in text
    check_serves(server, channel, seen)


def test_a_bad_image_of_a_conversation_is_named_by_its_part(server: RunningServer, channel: grpc.Channel) -> None:
    spec = pb.GenerationSpec()
    parts = [pb.ContentPart(text="a"), pb.ContentPart(image=pb.Image(data=GOOD))]
    spec.chat.messages.add(role="user", parts=parts)
    bad = spec.chat.messages.add(role="user", parts=[pb.ContentPart(image=pb.Image(data=b"x"))])
    assert refused(server, channel, spec)[0] == "chat.messages[1].parts[0].image"
    bad.parts[0].image.data = GOOD
    field, text = refused(server, channel, spec)
    assert (field, text) == ("chat", "chat is 'a text with 0 <image>': needs 2, one for each of its images")
    bad.parts.add().image.data = GOOD
    field, text = refused(server, channel, spec)
    assert field == "chat.messages[1].parts[1].image"
    assert "at most 2 in a request" in text


@pytest.mark.parametrize(
    ("spec", "field", "complaint"),
    [
        (asked(MARKERS[3], GOOD, GOOD, GOOD), "images[2]", "one of 3 images': at most 2 in a request"),
        (asked("the cat", GOOD), "text", "a text with 0 <image>': needs 1"),
        (asked(MARKERS[2], GOOD), "text", "a text with 2 <image>': needs 1"),
        (asked("the <image> cat"), "text", "1 image placeholders (token 320)': needs 0 for 0 images"),
        (pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5, IMAGE])), "token_ids", "needs 0 for 0 images"),
        (
            pb.GenerationSpec(token_ids=pb.TokenIds(ids=[IMAGE] * 15), images=[pb.Image(data=GOOD)]),
            "token_ids",
            "15 image placeholders (token 320)': needs 16 for 1 images",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_and_their_places_are_as_many(
    spec: pb.GenerationSpec, field: str, complaint: str, server: RunningServer, channel: grpc.Channel, seen: Seen
) -> None:
    found, text = refused(server, channel, spec)
    assert found == field
    assert complaint in text
    check_serves(server, channel, seen)


def test_ids_of_a_client_s_own_are_served(server: RunningServer, channel: grpc.Channel, seen: Seen) -> None:
    spec = message(seen, 0)
    ids = seen.preparer.tokenizer.encode(spec.text, True)
    place = ids.index(IMAGE)
    spec.token_ids.ids.extend([*ids[:place], *[IMAGE] * 16, *ids[place + 1 :]])
    answer = server.stub(channel).Generate(pb.GenerateRequest(spec=spec))
    assert list(answer.sequences[0].token_ids) == seen.expected[0]


def peak(server: RunningServer) -> int:
    """Most bytes that the server's process had in memory so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def test_bombs_take_no_memory(seen: Seen) -> None:
    """60,000 x 60,000 pixels would be 10 GiB; with the default limits."""
    flags = ("--model", str(seen.directory), "--kv-cache-memory", "16MiB")
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        check_serves(server, channel, seen)
        refused(server, channel, asked(MARKERS[1], bomb(7_000, 7_000)))
        before = peak(server)
        for side in (7_000, 20_000, 60_000, 2**31 - 1):
            field, text = refused(server, channel, asked(MARKERS[1], bomb(side, side)))
            assert (field, "at most 40000000 pixels" in text) == ("images[0]", True)
        assert peak(server) - before < 16 * 2**20
        check_serves(server, channel, seen)


def test_messages_with_images_may_be_larger_but_not_without_end(
    server: RunningServer, channel: grpc.Channel, seen: Seen, tmp_path: Path
) -> None:
    """8 bytes for each of 1,024 tokens + 64 KiB + four images."""
    most = 8 * 1024 + 2**16 + 4 * 30 * 1024
    large = GOOD + bytes(most // 2 - len(GOOD) - 300)
    field, text = refused(server, channel, asked(MARKERS[2], large, large))
    assert (field, "at most 30720 bytes" in text) == ("images[0]", True), "a message that came through"
    with pytest.raises(grpc.RpcError) as caught:
        server.stub(channel).Generate(pb.GenerateRequest(spec=asked(MARKERS[2], large, large + bytes(700))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"vs. {most})" in caught.value.details()
    (tmp_path / "a.png").write_bytes(GOOD + bytes(most))
    done = quire("generate", "<image>", "--server", server.address, "--image", str(tmp_path / "a.png"))
    assert done.returncode == 1
    assert "larger than max" in done.stderr
    assert "the server's --max-message-bytes is the limit" in done.stderr
    check_serves(server, channel, seen)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max-images", "-1"), "--max-images is -1, must be at least 0"),
        (("--max-image-bytes", "0"), "--max-image-bytes is 0, must be at least 1"),
        (("--max-image-pixels", "0"), "--max-image-pixels is 0"),
        (("--max-image-ratio", "0"), "--max-image-ratio is 0"),
    ],
)
def test_limits_that_are_none_stop_the_start(flags: tuple[str, str], complaint: str) -> None:
    done = quire("serve", *flags)
    assert done.returncode == 1
    assert complaint in done.stderr
    name = flags[0].removeprefix("--").replace("-", "_").upper()
    assert complaint in quire("serve", **{f"QUIRE_{name}": flags[1]}).stderr
