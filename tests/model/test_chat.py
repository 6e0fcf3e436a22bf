"""Conversations become the text that transformers makes of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from model.errors import CheckpointError
from model.inputs.chat import ChatTemplate, find_chat_template
from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from model.inputs.tokenizer_files import load_tokenizer
from tests.support.chats import CONVERSATIONS, TEMPLATES, TOKENS, conversation, write_tokenizer

MOST = 100_000


def transformers_text(directory: Path, messages: list[dict[str, str]], **arguments: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    given = {"tokenize": False, "add_generation_prompt": True} | arguments
    text: str = tokenizer.apply_chat_template(messages, **given)
    return text


def quire_text(directory: Path, messages: list[dict[str, str]], **arguments: Any) -> str:
    template = find_chat_template(directory)
    assert template is not None
    renderer = ChatRenderer(template)
    try:
        return renderer.render(messages, arguments, MOST)
    finally:
        renderer.close()


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one of the templates in a file of its own."""
    directory = write_tokenizer(tmp_path_factory.mktemp("model") / "m", **TOKENS | {"image_token": "<img>"})
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param])
    return directory


@pytest.fixture(scope="module")
def renderer(directory: Path) -> Iterator[ChatRenderer]:
    template = find_chat_template(directory)
    assert template is not None
    made = ChatRenderer(template)
    yield made
    made.close()


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_text_is_transformers(directory: Path, renderer: ChatRenderer, name: str) -> None:
    messages = CONVERSATIONS[name]
    try:
        expected = transformers_text(directory, messages)
    except jinja2.TemplateError as error:
        with pytest.raises(ChatFailed, match=re.escape(str(error))) as refused:
            renderer.render(messages, {}, MOST)
        assert refused.value.reason == "CHAT_REFUSED"
    else:
        assert renderer.render(messages, {}, MOST) == expected


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_the_last_message_is_continued_as_in_transformers(directory: Path, renderer: ChatRenderer, name: str) -> None:
    for last in ({}, {"role": "assistant", "content": "So  \n"}):
        messages = [*CONVERSATIONS[name], last] if last else CONVERSATIONS[name]
        for continues in (True, False):
            flags = {"add_generation_prompt": False, "continue_final_message": continues}
            try:
                expected = transformers_text(directory, messages, **flags)
            except (jinja2.TemplateError, ValueError) as error:
                left_out = isinstance(error, ValueError)
                with pytest.raises(ChatFailed, match="leaves out text" if left_out else re.escape(str(error))):
                    renderer.render(messages, {}, MOST, **flags)
            else:
                assert renderer.render(messages, {}, MOST, **flags) == expected


def test_parts_are_continued_at_their_last_text() -> None:
    source = "{% for m in messages %}[{% for p in m.content %}{{ p.text or '*' }}{% endfor %}]{% endfor %}"
    renderer = ChatRenderer(ChatTemplate(source, Path("chat_template.jinja"), {}))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        assert renderer.render([{"role": "user", "content": parts}], {}, MOST, **flags) == "[ab "
    finally:
        renderer.close()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_token_ids_are_transformers(tmp_path: Path, name: str) -> None:
    """The template writes the special tokens, the tokenizer adds none."""
    config = {"chat_template": TEMPLATES[name], "bos_token": "<|end|>", "eos_token": "<|end|>"}
    directory = write_tokenizer(tmp_path / "m", **config)
    messages = conversation("user: Hi<|end|> there", "assistant: x", "user: y")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = quire_text(directory, messages)
    assert load_tokenizer(directory).encode(text, add_special_tokens=False) == expected
    assert expected.count(0) == text.count("<|end|>") >= 1


@pytest.mark.parametrize(
    "arguments", [{"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "1 Jan"}, {"bos_token": "B"}]
)
def test_arguments_reach_the_template(directory: Path, renderer: ChatRenderer, arguments: dict[str, object]) -> None:
    messages = conversation("user: Hi")
    assert renderer.render(messages, arguments, MOST) == transformers_text(directory, messages, **arguments)


SHORT = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ mask_token }}{{ image_token }}"


@pytest.mark.parametrize(
    ("config", "tokens_map"),
    [
        ({"chat_template": SHORT, "bos_token": "<s>"}, None),
        ({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": SHORT}]}, None),
        ({"chat_template": SHORT, "bos_token": "<s>"}, {"bos_token": "<map>", "eos_token": {"content": "</map>"}}),
        ({"chat_template": SHORT, "bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "<map>"}),
        ({"chat_template": SHORT, "mask_token": "<m>", "image_token": "<img>", "add_bos_token": True}, None),
        ({"chat_template": SHORT, "extra_special_tokens": {"image_token": "<i>"}}, {"mask_token": "<m>"}),
        ({"chat_template": SHORT, "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}, None),
    ],
)
def test_templates_and_tokens_are_found_where_transformers_finds_them(
    tmp_path: Path, config: dict[str, Any], tokens_map: dict[str, Any] | None
) -> None:
    directory = write_tokenizer(tmp_path / "m", **config)
    if tokens_map is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(tokens_map))
    messages = conversation("user: Hi")
    assert quire_text(directory, messages) == transformers_text(directory, messages)


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "m", chat_template="config")
    (directory / "chat_template.jinja").write_bytes("file: {{ messages[0].content }}\r\né\n".encode())
    messages = conversation("user: Hi")
    assert quire_text(directory, messages) == transformers_text(directory, messages) == "file: Hi\né"


def test_no_template(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    for config in ({}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}):
        assert find_chat_template(write_tokenizer(tmp_path / "m", **config)) is None


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for config, complaint in (
        ({"chat_template": 7}, r"tokenizer_config.json: 'chat_template' is 7, must be text"),
        ({"chat_template": "x" * (2**20 + 1)}, r"tokenizer_config.json: the chat template has 1048577 characters"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            find_chat_template(write_tokenizer(tmp_path / "m", **config))
    (tmp_path / "m" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja cannot be read as text"):
        find_chat_template(write_tokenizer(tmp_path / "m"))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\n{% if %}", r"chat_template.jinja: the model's chat template fails: line 2: Expected an expression"),
        ("{{ x | nothing }}", "line 1: No filter named 'nothing'"),
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{{ 'a' * 10**8 }}", "needs more than 256 MiB"),
        ("{% include 'x' %}{{ " + "'a' * 40000000 ~ " * 9 + "'' }}", "needs more than 256 MiB"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_found_at_the_start(source: str, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        ChatRenderer(ChatTemplate(source, Path("chat_template.jinja"), {}))
