"""The public messages and Quire's own types: a field that is set to nothing is not a field that is unset."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from quire.v1 import generation_service_pb2 as pb

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed
from rpc.frontend.output import Delta, Finish, FinishReason
from rpc.frontend.pacing import Pacer
from rpc.frontend.stream import RequestStream
from rpc.frontend.token_logprobs import TokenLogprob
from rpc.services import convert
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Beam, Output, Sampling, Stopping
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.request import PromptImage
from scheduler.resolve import resolve
from scheduler.spec import Spec

LIMITS = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)


def spec_of(**parts: object) -> Spec:
    return convert.spec_from(pb.GenerationSpec(text="x", **parts))  # type: ignore[arg-type]


def test_what_is_unset_is_the_models_own() -> None:
    assert spec_of() == Spec("x")
    assert spec_of(sampling=pb.SamplingParameters(), stopping=pb.StoppingCriteria()) == Spec("x")


def test_what_is_set_to_nothing_is_set() -> None:
    zeros = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"), 0) | {"top_p": 1}
    sampling = pb.SamplingParameters(**zeros | {"repetition_penalty": 1}, frequency_penalty=0, presence_penalty=0)
    assert spec_of(sampling=sampling).sampling == Sampling(0.0, 1.0, 0, 0.0, 0, 1.0, 0.0, 0.0)
    search = pb.SamplingParameters(beam_search=pb.BeamSearch(width=2, length_penalty=0))
    assert spec_of(sampling=search).sampling.beam == Beam(2, 0.0)
    assert spec_of(sampling=pb.SamplingParameters(beam_search=pb.BeamSearch(width=2))).sampling.beam == Beam(2, 1.0)
    output = spec_of(output=pb.OutputOptions(text=False, skip_special_tokens=False)).output
    assert output == Output(text=False, skip_special_tokens=False)
    assert not spec_of(add_special_tokens=False).add_special_tokens


def test_every_field_of_a_request_arrives() -> None:
    message = pb.GenerationSpec(text="x", model="m", cache_salt="s", priority=-5)
    message.output_prefix.ids.extend([7, 8])
    message.max_time.FromMilliseconds(1500)
    message.max_queue_time.FromMilliseconds(250)
    message.stopping.max_tokens, message.stopping.min_tokens = 9, 3
    message.stopping.stop.append("a")
    message.stopping.stop_token_ids.append(4)
    message.stopping.include_stop = message.stopping.ignore_eos = True
    message.output.token_ids = message.output.logprobs = message.output.prompt_logprobs = True
    message.output.top_logprobs = 2
    assert convert.spec_from(message, "ann") == Spec(
        "x", model="m", cache_salt="s", priority=-5, tenant="ann", output_prefix=(7, 8), max_time=1.5,
        max_queue_time=0.25,
        stopping=Stopping(9, 3, ("a",), (4,), True, True), output=Output(True, True, True, 2, True),
    )  # fmt: skip


def test_one_text_is_a_text_and_several_parts_stay_several() -> None:
    text, image = pb.ContentPart(text="a"), pb.ContentPart(image=pb.Image(data=b"png"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", parts=parts) for parts in ([], [text], [text, image, text])])
    spec = convert.spec_from(pb.GenerationSpec(chat=chat))
    contents = ("", "a", ("a", ImageHere(), "a"))
    assert spec.prompt == Chat(tuple(ChatMessage("user", content) for content in contents))
    assert spec.images == (b"png",)


def with_images(spec: pb.GenerationSpec) -> None:
    spec.chat.messages.add(role="user").parts.add(text="a")
    spec.images.add(data=b"png")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (with_images, "images"),
        (lambda s: s.chat.messages.add(role="u").parts.extend([pb.ContentPart(text="")] * 16_385), "chat.messages"),
        (lambda s: s.max_time.CopyFrom(Duration(seconds=10**6, nanos=1)), "max_time"),
        (lambda s: s.max_queue_time.CopyFrom(Duration(seconds=-1, nanos=500_000_000)), "max_queue_time"),
        (lambda s: s.ClearField("text"), "prompt"),
    ],
)
def test_what_no_spec_can_hold_is_refused_by_name(change: Callable[[pb.GenerationSpec], object], field: str) -> None:
    message = pb.GenerationSpec(text="x")
    change(message)
    with pytest.raises(RequestFailed) as refused:
        convert.spec_from(message)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize(("asked", "expected"), [(0, 1), (1, 1), (40, 40), (41, 40), (2**31, 40)])
def test_a_client_makes_the_server_hold_no_more_than_it_may(asked: int, expected: int) -> None:
    assert convert.grouping_from(pb.StreamOptions(min_tokens_per_message=asked), 40).tokens == expected


FINISHES = [
    (Finish(FinishReason.LENGTH), (pb.FINISH_REASON_LENGTH, None, None)),
    (Finish(FinishReason.STOP, stop_token_id=0), (pb.FINISH_REASON_STOP, None, 0)),
    (Finish(FinishReason.STOP, stop_string="a"), (pb.FINISH_REASON_STOP, "a", None)),
    (Finish(FinishReason.ABORTED), (pb.FINISH_REASON_ABORTED, None, None)),
    (Finish(FinishReason.DEADLINE), (pb.FINISH_REASON_DEADLINE, None, None)),
    (Finish(FinishReason.CLOSED), (pb.FINISH_REASON_CLOSED, None, None)),
]


@pytest.mark.parametrize(("finish", "expected"), FINISHES)
@pytest.mark.parametrize("ids", [True, False])
def test_a_delta_has_all_that_is_new_and_ids_if_they_are_asked_for(
    finish: Finish, expected: tuple[int, str | None, int | None], ids: bool
) -> None:
    message = pb.StreamGenerateResponse()
    delta = Delta(1, 5, "ab", [70, 71], [[TokenLogprob(70, -0.5, 1)]], finish)
    added = convert.add_delta(message, delta, ids)
    list(convert.add_logprobs(delta.logprobs, added.logprobs))
    (found,) = message.deltas
    assert (found.index, found.first_position, found.text, found.token_count) == (1, 5, "ab", 2)
    assert list(found.token_ids) == ([70, 71] if ids else [])
    assert [(one.token_id, one.logprob, one.rank) for one in found.logprobs[0].tokens] == [(70, -0.5, 1)]
    stops = [getattr(found, name) if found.HasField(name) else None for name in ("stop_string", "stop_token_id")]
    assert (found.finish_reason, *stops) == expected


def stream_of(tokenizer: Tokenizer, spec: Spec) -> RequestStream:
    return RequestStream(spec, resolve(spec, [5, 6], LIMITS, ModelDefaults(), minted_seed=77), tokenizer)


def result_of(stream: RequestStream) -> pb.GenerateResponse:
    return asyncio.run(Pacer().run(convert.result_message(stream, "id")))


def test_a_result_is_read_at_the_end_alone(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, Spec("x", output=Output(token_ids=True)))
    with pytest.raises(RequestFailed) as early:
        result_of(stream)
    assert early.value.reason == "NOT_ENDED"
    stream.sequences[0].total = -1.5
    stream.close(Finish(FinishReason.LENGTH))
    message = result_of(stream)
    assert (message.request_id, message.prompt_info.seed, message.usage.prompt_tokens) == ("id", 77, 2)
    assert message.sequences[0].score == -1.5
    stream.failure = RequestFailed("INTERNAL", "X", "x")
    with pytest.raises(RequestFailed) as failed:
        result_of(stream)
    assert failed.value is stream.failure


def test_tokens_of_images_are_told_with_the_prompt(tokenizer: Tokenizer) -> None:
    stream = stream_of(tokenizer, Spec("x"))
    pixels = np.zeros((1, 3, 2, 2), np.uint8)
    images = tuple(PromptImage(pixels, b"", np.arange(n, dtype=np.int32), (1, n)) for n in (3, 4))
    stream.request = replace(stream.request, images=images)
    assert convert.prompt_info(stream).image_token_count == 7
