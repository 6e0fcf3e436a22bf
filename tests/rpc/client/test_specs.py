"""Arguments become the API's message, or a TypeError that names what is wrong."""

import pytest
from google.protobuf.message import Message
from quire.v1 import generation_service_pb2 as pb

from rpc.client.specs import GROUPS, OWN, spec_of


def test_prompts_are_text_ids_or_a_conversation() -> None:
    assert spec_of("Hello").text == "Hello"
    assert list(spec_of([1, 2, 3]).token_ids.ids) == [1, 2, 3]
    assert spec_of(()).WhichOneof("prompt") == "token_ids"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [b"PNG", "What is this?"]}]
    messages = spec_of(turns).chat.messages
    assert [(m.role, [part.WhichOneof("part") for part in m.parts]) for m in messages] == [
        ("system", ["text"]),
        ("user", ["image", "text"]),
    ]
    assert messages[1].parts[0].image.data == b"PNG"
    assert [image.data for image in spec_of("<image>", [b"1", b"2"]).images] == [b"1", b"2"]


def test_options_are_the_fields_of_the_api() -> None:
    spec = spec_of(
        "x", temperature=0.5, seed=0, logit_bias={5: -1.0}, allowed_token_ids=[1, 2], stop="end", stop_token_ids=(7,),
        max_tokens=3, token_ids=True, text=False, model="m", max_time=1.5, add_special_tokens=False, top_p=None,
        beam_search={"width": 4},
    )  # fmt: skip
    expected = pb.GenerationSpec(
        text="x",
        model="m",
        add_special_tokens=False,
        sampling=pb.SamplingParameters(
            temperature=0.5, seed=0, logit_bias={5: -1.0}, allowed_token_ids=[1, 2], beam_search=pb.BeamSearch(width=4)
        ),
        stopping=pb.StoppingCriteria(stop=["end"], stop_token_ids=[7], max_tokens=3),
        output=pb.OutputOptions(token_ids=True, text=False),
    )
    expected.max_time.FromMilliseconds(1500)
    assert spec == expected
    assert spec.sampling.HasField("seed"), "0 is a seed"
    assert not spec.sampling.HasField("top_p"), "None is left to the model"


def test_every_field_can_be_given_and_no_name_means_two() -> None:
    """A field that the API gets has a way in here, too."""
    reached = {name: group for group in GROUPS for name in _fields(getattr(pb.GenerationSpec(), group))}
    assert len(reached) == sum(len(_fields(getattr(pb.GenerationSpec(), group))) for group in GROUPS)
    rest = set(_fields(pb.GenerationSpec())) - {*GROUPS, *OWN}
    assert rest == {"text", "token_ids", "chat", "images", "output_prefix"}, "what `spec_of` makes of the prompt"
    assert not reached.keys() & set(OWN)


def _fields(message: Message) -> list[str]:
    return list(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("x", {"max_token": 3}, TypeError),
        ("x", {"temperature": "hot"}, TypeError),
        ("x", {"max_tokens": -1}, ValueError),
        ("x", {"stop_token_ids": [2**40]}, ValueError),
        ("x", {"max_time": float("inf")}, ValueError),
        ("x", {"max_queue_time": float("nan")}, ValueError),
        ([{"role": "user", "content": 3}], {}, TypeError),
        ([{"role": "user", "content": [3]}], {}, TypeError),
        ([{"role": "user", "content": None}], {}, TypeError),
        ([1, "two"], {}, TypeError),
        ([{"role": "user"}], {}, TypeError),
        ([{"role": "user", "content": "x", "speaker": "y"}], {}, TypeError),
    ],
)
def test_what_is_no_field_is_an_error_at_once(prompt: object, options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        spec_of(prompt, **options)
