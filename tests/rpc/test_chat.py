"""A preparer turns conversations into requests."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from model.inputs.chat import ChatTemplate
from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_renderer import ChatRenderer
from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.outputs import Outputs
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.observe.metrics import Metrics
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Stopping
from scheduler.prompts import Chat, ChatMessage, ImageHere, Truncation
from scheduler.spec import Spec
from scheduler.tools import Tool, ToolChoice, ToolUse
from tests.support.frontends import PuppetEngine

LIMITS = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)
SOURCE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content * (times or 1) }}{% endfor %}"


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer) -> Iterator[Preparer]:
    template = ChatTemplate(SOURCE, Path("chat_template.jinja"), {"bos_token": "<|end|>"})
    made = Preparer("m", tokenizer, ModelDefaults(), ((0, 1, 2),), ChatRenderer(template))
    yield made
    made.close()


def chat(*contents: str, **arguments: str) -> Spec:
    return Spec(Chat(tuple(ChatMessage("user", content) for content in contents), tuple(arguments.items())))


def refusal(preparer: Preparer, spec: Spec) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        preparer.prepare(spec, LIMITS)
    assert refused.value.code == "INVALID_ARGUMENT"
    return refused.value


def test_a_model_that_is_not_to_call_cannot_begin_a_call(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(SOURCE, Path("chat_template.jinja"), {"bos_token": "<|end|>"})
    outputs = Outputs(ChatOutput.of("", {7: "<tool_call>"}, "hermes"))
    made = Preparer("m", tokenizer, ModelDefaults(), (), ChatRenderer(template), outputs=outputs)
    try:
        for choice, banned in ((ToolChoice.NONE, ((7,),)), (ToolChoice.AUTO, ())):
            for tools in ((Tool("f"),), ()):
                conversation = Chat((ChatMessage("user", "the cat"),), tool_use=ToolUse(tools, choice))
                request = made.prepare(Spec(conversation), LIMITS)
                assert request.controls.logits_params.banned == (banned if tools else ())
    finally:
        made.close()


def test_the_prompt_is_the_rendered_text(preparer: Preparer, tokenizer: Tokenizer) -> None:
    request = preparer.prepare(chat("the cat", "<|end|>"), LIMITS)
    expected = tokenizer.encode("<|end|>[user]the cat[user]<|end|>", add_special_tokens=False)
    assert request.prompt.tolist() == expected
    assert expected[0] == expected[-1] == 0
    assert request.scope.public == 1, "a public prefix counts as far as it goes"


def test_limits_hold_for_what_comes_in_and_for_what_comes_out(preparer: Preparer) -> None:
    for spec, field, reason, message in (
        (chat("x" * 70_000), "chat", "INVALID_FIELD", "chat is '70004 bytes'"),
        (chat("x" * 300, times="300"), "chat", "CHAT_LIMIT", "more than 65536 characters"),
        (chat("é" * 200, times="300"), "chat", "INVALID_FIELD", "at most 65536 bytes"),
        (chat("xyz" * 200), "chat", "INVALID_FIELD", "prompt and output must fit in 256 tokens"),
        (chat("x", times='"2"'), "chat", "CHAT_ERROR", "TypeError"),
        (chat("x", times="x"), "chat.template_arguments[times]", "INVALID_FIELD", "must be a JSON value"),
    ):
        failure = refusal(preparer, spec)
        assert (failure.field, failure.reason) == (field, reason)
        assert message in failure.message


def test_a_conversation_can_be_continued_where_it_ends(preparer: Preparer, tokenizer: Tokenizer) -> None:
    messages = (ChatMessage("user", "the"), ChatMessage("assistant", "cat"))
    continued = Spec(Chat(messages, add_generation_prompt=False, continue_final_message=True))
    expected = tokenizer.encode("<|end|>[user]the[assistant]cat", add_special_tokens=False)
    assert preparer.prepare(continued, LIMITS).prompt.tolist() == expected
    with pytest.raises(InvalidRequest, match="goes without chat"):
        Chat(messages, continue_final_message=True)
    seen = ChatMessage("assistant", (ImageHere(),))
    with pytest.raises(InvalidRequest, match="the last message has no text"):
        Chat((seen,), add_generation_prompt=False, continue_final_message=True)


def test_a_prompt_is_cut_to_what_is_asked_for(preparer: Preparer) -> None:
    ids = tuple(range(1, 101))
    for prompt, truncation, expected in (
        (ids, Truncation(3), [98, 99, 100]),
        (ids, Truncation(3, keep_first=True), [1, 2, 3]),
        (ids, Truncation(100), list(ids)),
        (ids * 3, Truncation(), list((ids * 3)[-252:])),
        (ids * 3, Truncation(keep_first=True), list((ids * 3)[:252])),
    ):
        spec = Spec(prompt, stopping=Stopping(max_tokens=4), truncation=truncation)
        assert preparer.prepare(spec, LIMITS).prompt.tolist() == expected
    whole = preparer.prepare(chat("the cat" * 9), LIMITS).prompt.tolist()
    cut = replace(chat("the cat" * 9), truncation=Truncation(5))
    assert preparer.prepare(cut, LIMITS).prompt.tolist() == whole[-5:]
    assert len(preparer.prepare(Spec(ids * 3, truncation=Truncation()), LIMITS).prompt) == 255
    too_long = Spec(ids, stopping=Stopping(max_tokens=999), truncation=Truncation())
    assert "at most 255 fit after 1 prompt tokens" in refusal(preparer, too_long).message
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        Truncation(0)
    with pytest.raises(InvalidRequest, match="goes with prompts without images"):
        Spec("x", images=(b"",), truncation=Truncation())


def test_a_cut_text_keeps_the_special_tokens_that_begin_it() -> None:
    library = Library(WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3, "?": 4}, unk_token="?"))  # noqa: S106
    library.pre_tokenizer = WhitespaceSplit()
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    preparer = Preparer("m", Tokenizer(library), ModelDefaults())
    for text, adds, tokens, expected in (
        ("a b c", True, 3, [0, 2, 3]), ("a b c", False, 2, [2, 3]), ("a b c", True, 1, [0]), ("a", True, 2, [0, 1]),
    ):  # fmt: skip
        spec = Spec(text, add_special_tokens=adds, truncation=Truncation(tokens))
        assert preparer.prepare(spec, LIMITS).prompt.tolist() == expected


def test_a_model_without_a_template_says_so(tokenizer: Tokenizer) -> None:
    failure = refusal(Preparer("m", tokenizer, ModelDefaults()), chat("Hi"))
    assert (failure.field, failure.reason) == ("chat", "NO_CHAT_TEMPLATE")
    Preparer("m", tokenizer, ModelDefaults()).close()


def test_conversations_are_rendered_beside_the_loop_and_shutdown_ends_the_process(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    render = ChatRenderer.render

    def spy(*arguments: object, **flags: bool) -> str:
        threads.append(threading.current_thread().name)
        return render(*arguments, **flags)

    async def test() -> None:
        template = ChatTemplate(SOURCE, Path("chat_template.jinja"), {})
        preparer = Preparer("m", tokenizer, ModelDefaults(), (), ChatRenderer(template))
        before = psutil.Process().children()
        frontend = Frontend(preparer, FrontendSettings(), Metrics("m"))
        frontend.attach(PuppetEngine())
        monkeypatch.setattr(ChatRenderer, "render", spy)
        async with frontend.open(chat("cat"), "a", None) as live:
            assert live.stream.request.prompt.tolist() == tokenizer.encode("[user]cat", False)
        frontend.shutdown()
        assert len(psutil.Process().children()) == len(before) - 1

    asyncio.run(asyncio.wait_for(test(), 30))
    assert len(threads) == 1
    assert threads[0].startswith("quire-prepare")
