"""The openai library against a gateway and real servers: what comes is what the servers' own API gives."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from openai import OpenAI
from quire.v1 import generation_service_pb2 as pb

from rpc.distribution import own_version
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.image_chats import CAPITALS
from tests.support.server import RunningServer, running_server

MODEL = "quire-demo"
PAGE = "https://page.example"
SAMPLED = {"temperature": 0.9, "seed": 5, "top_p": 0.9}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--kv-cache-memory", str(512 * 16 * 3072)) as running:
        yield running


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that sees, with a chat template."""
    directory = Shelf(tmp_path_factory.mktemp("seeing")).checkpoint(BY_NAME["smolvlm"])
    (directory / "chat_template.jinja").write_text(CAPITALS)
    flags = ("--model", str(directory), "--served-model-name", "org/seer", "--kv-cache-memory", "16MiB")
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway(
        [server.address], "--allow-origin", PAGE, "--allow-origin", "http://localhost:3000"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def chats(seeing: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway([seeing.address]) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with gateway.client() as made:
        yield made


@pytest.fixture
def chat_client(chats: RunningGateway) -> Iterator[OpenAI]:
    with chats.client() as made:
        yield made


def native(server: RunningServer, spec: pb.GenerationSpec) -> pb.GenerateResponse:
    with grpc.insecure_channel(server.address) as channel:
        return server.stub(channel).Generate(pb.GenerateRequest(spec=spec))


def asked(text: str, tokens: int, **sampling: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        text=text,
        sampling=pb.SamplingParameters(**sampling),
        stopping=pb.StoppingCriteria(max_tokens=tokens),
        output=pb.OutputOptions(token_ids=True, logprobs=True, top_logprobs=3),
    )


def test_models(client: OpenAI, chat_client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.model_extra) == (
        MODEL,
        "model",
        "quire",
        {"max_model_len": 1024},
    )
    assert client.models.retrieve(MODEL) == model
    assert chat_client.models.retrieve("org/seer").id == "org/seer"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("gpt-5")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_a_completion_is_the_servers(client: OpenAI, server: RunningServer) -> None:
    expected = native(server, asked("ROMEO:", 40, **SAMPLED))
    whole = client.completions.create(model=MODEL, prompt="ROMEO:", max_tokens=40, **SAMPLED)
    assert whole.choices[0].text == expected.sequences[0].text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 40)
    assert whole.usage.total_tokens == 42
    assert (whole.model, whole.object, whole.choices[0].finish_reason) == (MODEL, "text_completion", "length")
    assert whole.system_fingerprint.startswith("fp_")
    with client.completions.create(model=MODEL, prompt="ROMEO:", max_tokens=40, stream=True, **SAMPLED) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.sequences[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert len({chunk.id for chunk in chunks} | {whole.id}) == 2
    assert len(client.completions.create(model=MODEL, prompt="A", temperature=0).choices[0].text) > 0


def test_many_at_once_with_the_asyncio_client(gateway: RunningGateway, server: RunningServer) -> None:
    async def run() -> list[str]:
        async with gateway.async_client() as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt="JULIET:", max_tokens=30, seed=seed, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                chunks = [chunk async for chunk in stream]
                assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 30)
                assert all(chunk.usage is None for chunk in chunks[:-1])
                return "".join(chunk.choices[0].text for chunk in chunks[:-1])

            return await asyncio.gather(*(one(seed) for seed in range(24)))

    texts = asyncio.run(run())
    assert len(set(texts)) == 24
    for seed in (0, 7, 23):
        assert texts[seed] == native(server, asked("JULIET:", 30, seed=seed)).sequences[0].text


def test_prompts_of_all_forms_and_several_choices(client: OpenAI, server: RunningServer) -> None:
    more = {"model": MODEL, "max_tokens": 12, "n": 2, **SAMPLED}
    expected = [native(server, asked(text, 12, sequence_count=2, **SAMPLED)) for text in ("ROMEO:", "JULIET:")]
    texts = [sequence.text for answer in expected for sequence in answer.sequences]
    assert len(set(texts)) > 2
    answer = client.completions.create(prompt=["ROMEO:", "JULIET:"], **more)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in expected)
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=["ROMEO:", "JULIET:"], stream=True, **more):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts
    ids = native(server, asked("ROMEO:", 6, temperature=0)).sequences[0].token_ids
    single = [client.completions.create(prompt=p, **more).choices for p in (list(ids), [list(ids)])]
    assert [choice.text for choice in single[0]] == [choice.text for choice in single[1]]


def test_logprobs_of_completions(client: OpenAI, server: RunningServer) -> None:
    (expected,) = native(server, asked("ROMEO:", 20, temperature=0)).sequences
    more = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 20, "temperature": 0, "logprobs": 3}
    (choice,) = client.completions.create(**more).choices
    values = [position.tokens[0].logprob for position in expected.logprobs]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-6)
    assert "".join(choice.logprobs.tokens) == choice.text == expected.text
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    assert all(max(top.values()) == value for top, value in zip(choice.logprobs.top_logprobs, values, strict=True))
    assert {len(top) for top in choice.logprobs.top_logprobs} == {3}
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **more)]
    assert [token for part in parts if part for token in part.tokens] == choice.logprobs.tokens
    assert [o for part in parts if part for o in part.text_offset] == choice.logprobs.text_offset


def test_an_echo_scores_the_prompt(client: OpenAI, server: RunningServer) -> None:
    spec = asked("ROMEO: But soft, what light", 1, temperature=0)
    spec.output.prompt_logprobs = True
    expected = native(server, spec).prompt_info.logprobs
    more = {"model": MODEL, "prompt": spec.text, "echo": True, "logprobs": 1, "temperature": 0}
    (scored,) = client.completions.create(max_tokens=0, **more).choices
    assert (scored.text, scored.finish_reason) == (spec.text, "length")
    assert "".join(scored.logprobs.tokens) == spec.text
    values = [position.tokens[0].logprob for position in expected[1:]]
    assert scored.logprobs.token_logprobs == pytest.approx([None, *values], abs=1e-5)
    (longer,) = client.completions.create(max_tokens=3, **more).choices
    assert longer.text.startswith(spec.text)
    assert "".join(longer.logprobs.tokens) == longer.text
    assert longer.logprobs.tokens[: len(scored.logprobs.tokens)] == scored.logprobs.tokens
    chunks = list(client.completions.create(max_tokens=3, stream=True, **more))
    assert "".join(chunk.choices[0].text for chunk in chunks) == longer.text
    (plain,) = client.completions.create(model=MODEL, prompt=[5, 6, 7], echo=True, max_tokens=2, temperature=0).choices
    (alone,) = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, temperature=0).choices
    assert plain.text.endswith(alone.text)
    assert len(plain.text) > len(alone.text)


def test_stops_penalties_and_what_vllm_calls_it(client: OpenAI, server: RunningServer) -> None:
    text = native(server, asked("ROMEO:", 60, temperature=0)).sequences[0].text
    word = text.split()[3]
    (stopped,) = client.completions.create(
        model=MODEL, prompt="ROMEO:", max_tokens=60, temperature=0, stop=[word, "zzz"]
    ).choices
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(word)], "stop")
    assert stopped.model_extra == {"stop_reason": word}
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    spec = asked("ROMEO:", 30, temperature=0.8, seed=3, top_k=9, min_p=0.01, repetition_penalty=1.1, bad_words=["the"],
                 logit_bias={5: -100.0}, **penalties)  # fmt: skip
    spec.stopping.ignore_eos, spec.stopping.min_tokens = True, 30
    extras = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1, "bad_words": ["the"], "ignore_eos": True,
              "min_tokens": 30}  # fmt: skip
    (choice,) = client.completions.create(
        model=MODEL, prompt="ROMEO:", max_tokens=30, temperature=0.8, seed=3, logit_bias={"5": -100},
        extra_body=extras, **penalties,
    ).choices  # fmt: skip
    assert choice.text == native(server, spec).sequences[0].text
    beams = pb.SamplingParameters(sequence_count=3, beam_search=pb.BeamSearch(width=3))
    found = native(server, pb.GenerationSpec(text="ROMEO:", sampling=beams, stopping=pb.StoppingCriteria(max_tokens=8)))
    searched = client.completions.create(
        model=MODEL, prompt="ROMEO:", max_tokens=8, n=3, extra_body={"use_beam_search": True}
    )
    assert [choice.text for choice in searched.choices] == [sequence.text for sequence in found.sequences]


def test_what_vllms_clients_ask_for(client: OpenAI, server: RunningServer) -> None:
    spec = asked("ROMEO: But soft, what light", 8, temperature=0)
    spec.output.prompt_logprobs = spec.output.prompt_token_ids = True
    expected = native(server, spec)
    prompt, ids = list(expected.prompt_info.token_ids), list(expected.sequences[0].token_ids)
    more = {"model": MODEL, "prompt": spec.text, "max_tokens": 8, "temperature": 0}
    extras = {"return_token_ids": True, "prompt_logprobs": 2, "request_id": "mine"}
    answer = client.completions.create(**more, extra_body=extras)
    assert answer.id == "cmpl-mine"
    (choice,) = answer.choices
    assert (choice.prompt_token_ids, choice.token_ids, choice.logprobs) == (prompt, ids, None)
    assert choice.prompt_logprobs[0] is None
    for token, told, known in zip(
        prompt[1:], choice.prompt_logprobs[1:], expected.prompt_info.logprobs[1:], strict=True
    ):
        first = known.tokens[0]
        assert (token, told[str(token)]["rank"]) == (first.token_id, first.rank)
        assert told[str(token)]["logprob"] == pytest.approx(first.logprob, abs=1e-5)
        assert len(told) == 2 + (first.rank > 2)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": usage, "extra_body": {"return_token_ids": True, "stream_interval": 3}}
    *chunks, last = client.completions.create(**more, **options)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(set(counts))
    assert len(counts) < 8
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(prompt)}
    assert (counts[-1], last.choices, last.usage.completion_tokens) == (8, [], 8)
    (cut,) = client.completions.create(**more, echo=True, extra_body={"truncate_prompt_tokens": 3}).choices
    (alone,) = client.completions.create(**more | {"prompt": prompt[-3:]}, echo=True).choices
    assert cut.text == alone.text
    fits = client.completions.create(**more | {"prompt": "w " * 1500}, extra_body={"truncate_prompt_tokens": -1})
    assert (fits.usage.prompt_tokens, fits.usage.completion_tokens) == (1024 - 8, 8)


def test_a_conversation_is_continued(chat_client: OpenAI, seeing: RunningServer) -> None:
    turns = {"user": "the cat", "assistant": "and the"}
    spec = pb.GenerationSpec(stopping=pb.StoppingCriteria(max_tokens=6, ignore_eos=True))
    spec.sampling.temperature, spec.output.prompt_token_ids = 0, True
    for role, content in turns.items():
        spec.chat.messages.add(role=role, parts=[pb.ContentPart(text=content)])
    new = native(seeing, spec)
    spec.chat.continue_final_message = True
    continued = native(seeing, spec)
    ids = [list(one.prompt_info.token_ids) for one in (new, continued)]
    assert len(ids[0]) > len(ids[1])
    assert ids[0][: len(ids[1])] == ids[1]
    messages = [{"role": role, "content": content} for role, content in turns.items()]
    more = {"model": "org/seer", "messages": messages, "temperature": 0, "max_tokens": 6}
    extras = {"ignore_eos": True, "return_token_ids": True}
    for flags, expected in (
        ({}, new),
        ({"continue_final_message": True, "add_generation_prompt": False}, continued),
        ({"add_generation_prompt": False}, None),
    ):
        answer = chat_client.chat.completions.create(**more, extra_body=extras | flags)
        if expected is not None:
            assert answer.prompt_token_ids == list(expected.prompt_info.token_ids)
            assert answer.choices[0].message.content == expected.sequences[0].text
        else:
            assert len(ids[1]) < len(answer.prompt_token_ids) < len(ids[0])


def test_hints_change_nothing(client: OpenAI) -> None:
    more = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 6, "seed": 3}
    plain = client.completions.create(**more)
    hints = {"safety_identifier": "a", "prompt_cache_key": "b", "service_tier": "flex", "metadata": {"a": "b"}}
    hinted = client.completions.create(**more, user="me", extra_body=hints | {"store": False, "session_id": "c"})
    assert hinted.choices == plain.choices


def test_pages_of_known_origins_may_ask(gateway: RunningGateway, chats: RunningGateway) -> None:
    ask = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    for origin, allowed in ((PAGE, True), ("http://localhost:3000", True), ("https://other.example", False)):
        status, headers, _ = gateway.ask("OPTIONS", "/v1/completions", origin=origin, **ask)
        assert (status, headers.get("access-control-allow-origin") == origin) == (200 if allowed else 400, allowed)
        status, headers, _ = gateway.ask("GET", "/v1/models", origin=origin)
        assert (status, headers.get("access-control-allow-origin") == origin) == (200, allowed)
        assert headers["access-control-expose-headers"] == "x-request-id, retry-after"
        wrong = gateway.answer("/v1/completions", {"wat": 1}, origin=origin)
        assert (wrong[0], wrong[1].get("access-control-allow-origin") == origin) == (400, allowed)
    status, headers, _ = chats.ask("GET", "/v1/models", origin=PAGE)
    assert (status, "access-control-allow-origin" in headers) == (200, False)


def test_its_version(gateway: RunningGateway) -> None:
    status, _, said = gateway.ask("GET", "/version")
    assert (status, said) == (200, {"version": own_version()})


def test_a_conversation_with_an_image(chat_client: OpenAI, seeing: RunningServer) -> None:
    image = encoded(picture(70, 110, 1))
    spec = pb.GenerationSpec(
        sampling=pb.SamplingParameters(temperature=0), stopping=pb.StoppingCriteria(max_tokens=10, ignore_eos=True)
    )
    spec.chat.messages.add(role="system", parts=[pb.ContentPart(text="that")])
    parts = [pb.ContentPart(image=pb.Image(data=image)), pb.ContentPart(text="the cat?")]
    spec.chat.messages.add(role="user", parts=parts)
    expected = native(seeing, spec)
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the cat?"}]
    more = {
        "model": "org/seer", "temperature": 0, "max_completion_tokens": 10, "extra_body": {"ignore_eos": True},
        "messages": [{"role": "system", "content": "that"}, {"role": "user", "content": content}],
    }  # fmt: skip
    whole = chat_client.chat.completions.create(**more)
    assert whole.choices[0].message.content == expected.sequences[0].text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
    again = chat_client.chat.completions.create(**more)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(chat_client.chat.completions.create(stream=True, **more))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected.sequences[0].text
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].object) == ("length", "chat.completion.chunk")
    for bad, param, says in (
        (
            "data:image/png;base64," + base64.b64encode(image[:99]).decode(),
            "messages[1].content[0].image_url",
            "broken",
        ),
        ("http://127.0.0.1:1/a.png", "messages[1].content[0].image_url.url", "the server fetches nothing"),
    ):
        content[0] = {"type": "image_url", "image_url": {"url": bad}}
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            chat_client.chat.completions.create(**more)
        assert refused.value.param == param


def test_logprobs_of_chats(chat_client: OpenAI) -> None:
    more = {"model": "org/seer", "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 4,
            "messages": [{"role": "user", "content": "the cat"}], "extra_body": {"ignore_eos": True}}  # fmt: skip
    (choice,) = chat_client.chat.completions.create(**more).choices
    assert len(choice.logprobs.content) == 8
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob == max(t.logprob for t in entry.top_logprobs)
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    parts = [chunk.choices[0].logprobs for chunk in chat_client.chat.completions.create(stream=True, **more)]
    assert [e.token for p in parts if p for e in p.content] == [e.token for e in choice.logprobs.content]


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"top_p": 7}, "top_p", "top_p is 7.0: must be in (0, 1]"),
        ({"n": 100}, "n", "n is 100: must be in [1, 8]"),
        ({"n": 2, "temperature": 0}, "n", "temperature is 0: all sequences would be the same"),
        ({"logprobs": 99}, "logprobs", "logprobs is 99"),
        ({"max_tokens": 2000}, "max_tokens", "max_tokens is 2000: at most 1022 fit after 2 prompt tokens"),
        ({"stop": ["a"] * 9}, "stop", "stop is '9 strings': at most 4"),
        ({"prompt": ["A", "w " * 4000]}, "prompt[1]", "must fit in 1024 tokens"),
        ({"prompt": [[1], [9999]]}, "prompt[1]", "token ids must be in [0, 2048)"),
        ({"prompt": ""}, "prompt", "the prompt has no tokens"),
        ({"extra_body": {"priority": 300}}, "priority", "must be in [-100, 100]"),
        ({"extra_body": {"wat": 3}}, "wat", "Unknown parameter: 'wat'."),
        ({"suffix": "x"}, "suffix", "suffix is not supported"),
        ({"extra_body": {"allowed_token_ids": [1, 4096]}}, "allowed_token_ids[1]", "must be in [0, 2048)"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(client: OpenAI, more: dict[str, Any], param: str, says: str, stream: bool) -> None:
    """In a stream of several prompts one that is wrong can come after others' tokens."""
    several = stream and len(more.get("prompt", "")) == 2
    with pytest.raises(openai.APIError if several else openai.BadRequestError) as refused:
        list(client.completions.create(**{"model": MODEL, "prompt": "ROMEO:", "stream": stream} | more))
    assert refused.value.param == param
    assert says in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_other_errors(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="gpt-5", prompt="A", stream=stream)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as silent:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "A"}])
    assert silent.value.code == "no_chat_template"
    with pytest.raises(openai.NotFoundError) as lost:
        client.embeddings.create(model=MODEL, input="A")
    assert lost.value.code == "unknown_url"


def test_the_example_of_the_documentation(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    page = (Path(__file__).parents[2] / "docs" / "guides" / "openai.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example.replace("http://127.0.0.1:8000", gateway.url), "gateway.md", "exec"), {})  # noqa: S102
    assert len(capsys.readouterr().out) > 20
