"""Images through real servers, the engine in a thread, in a process and in a Ray actor: tokens are transformers'."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from scheduler.limits import Limits
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.seen import NEW, Seen
from tests.support.image_chats import CAPITALS, EITHER
from tests.support.server import RunningServer, quire, running_server

LIMITS = Limits(vocabulary=420, context=1024, pool_tokens=4096, sequences=8)
TEMPLATES = {"llava-clip": EITHER, "smolvlm": CAPITALS}
FLAGS = {"paligemma": ("--max-batched-tokens", "1280")}
ENGINES = {"thread": ("--engine", "thread"), "process": ("--engine", "process"), "ray": ("--ray",)}
PLACES = [("llava-clip", "thread"), ("smolvlm", "process"), ("paligemma", "process")]
MORE_PLACES = [("smolvlm", "thread"), ("paligemma", "thread"), ("llava-clip", "process"), ("llava-clip", "ray")]
ENCODED = "quire_images_encoded_total"


@dataclass
class Place:
    """A server and what it must answer."""

    server: RunningServer
    stub: object
    seen: Seen

    def ask(self, spec: pb.GenerationSpec) -> pb.GenerateResponse:
        return self.stub.Generate(pb.GenerateRequest(spec=spec))  # type: ignore[attr-defined]


def message(seen: Seen, i: int) -> pb.GenerationSpec:
    """Returns the message of the i-th of its requests."""
    spec = seen.spec(i)
    return asked(str(spec.prompt), *spec.images)


def asked(text: str, *images: bytes) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        text=text,
        images=[pb.Image(data=data) for data in images],
        sampling=pb.SamplingParameters(temperature=0),
        stopping=pb.StoppingCriteria(max_tokens=NEW, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )


@pytest.fixture(scope="module")
def all_seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    shelf, made = Shelf(tmp_path_factory.mktemp("seeing")), {}
    for name in ("llava-clip", "smolvlm", "paligemma"):
        directory = shelf.checkpoint(BY_NAME[name])
        if name in TEMPLATES:
            (directory / "chat_template.jinja").write_text(TEMPLATES[name])
        made[name] = Seen(BY_NAME[name], shelf)
    yield made
    for one in made.values():
        one.preparer.close()


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(place, id=" ".join(place)) for place in PLACES),
        *(pytest.param(place, id=" ".join(place), marks=pytest.mark.slow) for place in MORE_PLACES),
    ],
)
def place(request: pytest.FixtureRequest, all_seen: dict[str, Seen]) -> Iterator[Place]:
    case, engine = request.param
    seen = all_seen[case]
    flags = ("--model", str(seen.directory), "--kv-cache-memory", "16MiB", *ENGINES[engine], *FLAGS.get(case, ()))
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        yield Place(server, server.stub(channel), seen)


@pytest.mark.sample(3)
def test_tokens_of_mixed_concurrent_streams_are_transformers(place: Place) -> None:
    """Text and images, each request three times, all at once; usage counts the tokens of the images."""
    seen, before = place.seen, place.server.metrics()[ENCODED]

    def stream(i: int) -> tuple[list[int], pb.PromptInfo]:
        request = pb.StreamGenerateRequest(spec=message(seen, i))
        answers = list(place.stub.StreamGenerate(request))  # type: ignore[attr-defined]
        return [token for a in answers for delta in a.deltas for token in delta.token_ids], answers[0].prompt_info

    count = len(seen.expected)
    with ThreadPoolExecutor(3 * count) as pool:
        results = list(pool.map(stream, [i % count for i in range(3 * count)]))
    for n, (tokens, info) in enumerate(results):
        request = seen.request(LIMITS, n % count)
        assert tokens == seen.expected[n % count]
        assert info.token_count == len(request.prompt)
        assert info.image_token_count == sum(len(image.places) for image in request.images)
    place.server.wait_for_metric(ENCODED, before + len(seen.images))  # one call for each content


def test_an_image_is_encoded_once_and_its_tokens_are_computed_once(place: Place) -> None:
    """Here in two prompts, and in two files: a JPEG of the same pixels would be another, a PNG is not."""
    before = place.server.metrics()[ENCODED]
    pixels = picture(40, 40, 77)
    first, again, other = (
        place.ask(asked(f"<image>the cat sat on the mat{more}", encoded(pixels, compress_level=level)))
        for more, level in (("", 1), ("", 9), (" that", 1))
    )
    assert first.prompt_info.cached_token_count == 0
    assert again.prompt_info.cached_token_count > 0
    assert again.sequences[0].token_ids == first.sequences[0].token_ids
    whole = place.seen.preparer.prefix_lm
    assert (other.prompt_info.cached_token_count == 0) == whole, "a prefix-LM's prompts share as a whole"
    place.server.wait_for_metric(ENCODED, before + 1)
    place.ask(asked("<image>the cat sat on the mat", encoded(picture(40, 40, 78))))
    place.server.wait_for_metric(ENCODED, before + 2)


def test_a_conversation_is_the_text_of_its_template(place: Place) -> None:
    first, second = (encoded(picture(40, 40, seed)) for seed in (5, 6))
    spec = asked("", first)
    spec.ClearField("images")
    turn = spec.chat.messages.add(role="user")
    turn.parts.extend([pb.ContentPart(image=pb.Image(data=first)), pb.ContentPart(text="the cat?")])
    spec.chat.messages.add(role="assistant", parts=[pb.ContentPart(text="the mat")])
    turn = spec.chat.messages.add(role="user")
    turn.parts.extend([pb.ContentPart(text="that "), pb.ContentPart(image=pb.Image(data=second))])
    if place.seen.preparer.chat is None:
        with pytest.raises(grpc.RpcError, match="the model has no chat template"):
            place.ask(spec)
        return
    smolvlm = "<bos>User:<image>the cat?<end_of_utterance>\nAssistant: the mat<end_of_utterance>\n"
    text = {
        CAPITALS: f"{smolvlm}User: that <image><end_of_utterance>\nAssistant:",
        EITHER: "<user><image>the cat?</user><assistant>the mat</assistant><user>that <image></user><assistant>",
    }[(place.seen.directory / "chat_template.jinja").read_text()]
    answer, plain = place.ask(spec), place.ask(asked(text, first, second))
    assert answer.prompt_info.image_token_count == plain.prompt_info.image_token_count > 0
    assert answer.prompt_info.token_count == plain.prompt_info.token_count
    assert answer.sequences[0].token_ids == plain.sequences[0].token_ids
    turn.parts[1].image.data = b"hello"
    with pytest.raises(grpc.RpcError) as refused:
        place.ask(spec)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("chat.messages[2].parts[1].image is '5 bytes'")


def test_several_sequences_come_of_one_image(place: Place) -> None:
    before = place.server.metrics()[ENCODED]
    spec = asked("<image>the cat", encoded(picture(33, 44, 99)))
    spec.sampling.MergeFrom(pb.SamplingParameters(temperature=1, seed=1, sequence_count=3))
    answer = place.ask(spec)
    assert len({tuple(sequence.token_ids) for sequence in answer.sequences}) == 3
    place.server.wait_for_metric(ENCODED, before + 1)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_steps_that_cannot_hold_a_prompt_of_paligemma_stop_the_start(engine: str, all_seen: dict[str, Seen]) -> None:
    ports = ("--port", "0", "--metrics-port", "0", "--admin-port", "0")
    done = quire("serve", *ports, "--model", str(all_seen["paligemma"].directory), *ENGINES[engine])
    assert done.returncode == 1
    assert "serve it with --max-batched-tokens 1280" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_large_image_crosses_the_link(tmp_path: Path) -> None:
    """Some megabytes of pixels, more than gRPC takes unless it is told to."""
    sides = {"size": {"shortest_edge": 1280}, "crop_size": {"height": 1280, "width": 1280}}
    case = replace(BY_NAME["llava-clip"], images=sides, more_tower={"image_size": 1280, "patch_size": 160})
    flags = ("--model", str(Shelf(tmp_path).checkpoint(case)), "--kv-cache-memory", "16MiB", "--engine", "process")
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        large = asked("<image>", encoded(picture(1300, 1280, 1), "JPEG"))
        answer = server.stub(channel).Generate(pb.GenerateRequest(spec=large))
    assert answer.prompt_info.image_token_count == 64
