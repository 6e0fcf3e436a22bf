"""Law: conversations with images become the text and the ids that transformers' processors make of them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from model.errors import CheckpointError
from model.inputs.chat import ChatTemplate, find_chat_template
from model.inputs.chat_contents import Contents, contents_read, template_messages
from model.inputs.chat_renderer import ChatRenderer
from model.settings import ModelSettings
from rpc.frontend.errors import RequestFailed
from rpc.frontend.prepare import Preparer, load_preparer
from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.spec import Spec
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture
from tests.support.image_chats import BLIND, CAPITALS, CONVERSATIONS, EITHER, IMAGE, TEMPLATES, Messages, turn
from tests.support.image_chats import text as words

pytestmark = pytest.mark.sample(3)

LIMITS = Limits(vocabulary=420, context=1024, pool_tokens=4096, sequences=8)
SIZES = ((32, 32), (70, 40), (20, 90))


def messages_of(messages: Messages) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(m["role"], tuple(ImageHere() if p == IMAGE else p["text"] for p in m["content"])) for m in messages
    )


def spec_of(messages: Messages) -> Spec:
    chat = Chat(messages_of(messages))
    return Spec(chat, tuple(encoded(picture(*SIZES[i], i)) for i in range(len(chat.image_fields))))


class Preparers:
    """Preparers of a case with a template, made once: each has a process that renders, and tries its tokenizer."""

    def __init__(self, shelf: Shelf, root: Path) -> None:
        self._shelf, self._root = shelf, root
        self._made: dict[str, Preparer] = {}

    def directory(self, case: str, name: str, source: str) -> Path:
        directory = self._root / f"{case} {name}"
        if not directory.exists():
            shutil.copytree(self._shelf.checkpoint(BY_NAME[case]), directory)
            (directory / "chat_template.jinja").write_text(source)
        return directory

    def get(self, case: str, name: str, source: str) -> Preparer:
        key = f"{case} {name}"
        if key not in self._made:
            self._made[key] = load_preparer(ModelSettings(model=str(self.directory(case, name, source))))
        return self._made[key]

    def close(self) -> None:
        for preparer in self._made.values():
            preparer.close()


@pytest.fixture(scope="module")
def preparers(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparers]:
    made = Preparers(shelf, tmp_path_factory.mktemp("chats"))
    yield made
    made.close()


def theirs(shelf: Shelf, case: str, template: str, messages: Messages, **more: Any) -> Any:
    processor = shelf.processor(BY_NAME[case])
    return processor.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, **more)


def their_ids(shelf: Shelf, case: str, template: str, messages: Messages) -> list[int]:
    """With the images in their parts."""
    images = iter(Image.fromarray(picture(*size, i)) for i, size in enumerate(SIZES))
    shown = [
        m | {"content": [p | {"image": next(images)} if p == IMAGE else p for p in m["content"]]} for m in messages
    ]
    made = theirs(shelf, case, template, shown, tokenize=True, return_dict=True)
    return [int(i) for i in np.ravel(made["input_ids"])]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", CONVERSATIONS)
def test_text_is_transformers(name: str, talk: str, shelf: Shelf, preparers: Preparers) -> None:
    preparer, messages = preparers.get("smolvlm", name, TEMPLATES[name]), CONVERSATIONS[talk]
    text = preparer.render(Chat(messages_of(messages)), LIMITS)
    assert text == theirs(shelf, "smolvlm", TEMPLATES[name], messages)
    assert text.count("<image>") == sum(m["content"].count(IMAGE) for m in messages)


@pytest.mark.parametrize("case", ["smolvlm", "llava-clip"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", CONVERSATIONS)
def test_ids_are_transformers(case: str, name: str, talk: str, shelf: Shelf, preparers: Preparers) -> None:
    preparer, messages = preparers.get(case, name, TEMPLATES[name]), CONVERSATIONS[talk]
    request = preparer.prepare(spec_of(messages), LIMITS)
    assert request.prompt.tolist() == their_ids(shelf, case, TEMPLATES[name], messages)


@pytest.mark.parametrize(("name", "begins"), [("capitals", True), ("images first", False)])
def test_special_tokens_are_added_unless_the_template_writes_them(
    name: str, begins: bool, shelf: Shelf, preparers: Preparers
) -> None:
    """As transformers does with a tokenizer that puts <bos> before a text."""
    directory = preparers.directory("llava-clip", f"{name} bos", TEMPLATES[name])
    values = json.loads((directory / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<bos>": {"id": "<bos>", "ids": [321], "tokens": ["<bos>"]}}
    values["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens,
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    processor = transformers.LlavaProcessor(
        shelf.processor(BY_NAME["llava-clip"]).image_processor, tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    messages = CONVERSATIONS["no image"]
    expected = processor.apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    preparer = preparers.get("llava-clip", f"{name} bos", TEMPLATES[name])
    ids = preparer.prepare(spec_of(messages), LIMITS).prompt.tolist()
    assert ids == np.ravel(expected).tolist()
    assert ids.count(321) == 1
    assert (TEMPLATES[name].startswith("<bos>"), ids[0]) == (begins, 321)


def test_where_templates_stand(shelf: Shelf, tmp_path: Path) -> None:
    """A processor's own file comes before the tokenizer's; a model of text alone has no such file."""
    directory = Path(shutil.copytree(shelf.checkpoint(BY_NAME["smolvlm"]), tmp_path / "m"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "tokenizer"}))

    def found(sees: bool) -> str:
        template = find_chat_template(directory, sees)
        assert template is not None
        return template.source

    assert (found(True), found(False)) == ("tokenizer", "tokenizer")
    (directory / "chat_template.jinja").write_text("file")
    assert (found(True), found(False)) == ("file", "file")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert (found(True), found(False)) == ("old", "file")
    processor = transformers.AutoProcessor.from_pretrained(shelf.checkpoint(BY_NAME["smolvlm"], classic=False))
    read = type(processor).get_processor_dict(directory)[0]
    assert read["chat_template"] == "old"
    (directory / "processor_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert type(processor).get_processor_dict(directory)[0]["chat_template"] == "config"
    assert (found(True), found(False)) == ("config", "file")
    (directory / "processor_config.json").write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(CheckpointError, match=r"processor_config.json: 'chat_template' is 7, must be text"):
        find_chat_template(directory, True)


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        (CAPITALS, Contents.PARTS),
        (EITHER, Contents.EITHER),
        ("{{ messages[0].content }}", Contents.STRINGS),
        ("{{ 'USER: ' + messages[0].content }}", Contents.STRINGS),
        ("{{ messages[0].content[0].text }}", Contents.PARTS),
        ("{{ raise_exception('no') }}", Contents.EITHER),
    ],
)
def test_templates_are_given_the_contents_that_they_read(source: str, contents: Contents) -> None:
    renderer = ChatRenderer(ChatTemplate(source, Path("chat_template.jinja"), {}))
    try:
        assert contents_read(renderer) is contents
    finally:
        renderer.close()


def test_messages_without_images_are_strings_where_those_are_read() -> None:
    messages = (ChatMessage("system", "a"), ChatMessage("user", ("b", ImageHere())), ChatMessage("user", ("c", "d")))
    parts = {"role": "user", "content": [words("b"), IMAGE]}
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "cd"}
    assert template_messages(messages, Contents.EITHER, "<i>") == [system, parts, user]
    assert template_messages(messages, Contents.STRINGS, "<i>") == [system, parts | {"content": "b<i>"}, user]
    pairs = [turn(words("a"), role="system"), parts, turn(words("c"), words("d"))]
    assert template_messages(messages, Contents.PARTS, "<i>") == pairs


def failure(preparer: Preparer, spec: Spec) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        preparer.prepare(spec, LIMITS)
    return refused.value


def test_a_template_that_leaves_images_out_says_so(preparers: Preparers) -> None:
    refused = failure(preparers.get("llava-clip", "blind", BLIND), spec_of(CONVERSATIONS["between"]))
    assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "chat")
    assert refused.message == "chat is 'a text with 0 <image>': needs 2, one for each of its images"


def test_words_that_read_like_a_marker_are_one(preparers: Preparers) -> None:
    preparer = preparers.get("smolvlm", "capitals", CAPITALS)
    for messages in ([turn(IMAGE, words("<image>"))], [turn(words("<image>"))]):
        assert failure(preparer, spec_of(messages)).field == "chat"


def test_a_bad_image_is_named_by_its_part(preparers: Preparers) -> None:
    spec = spec_of(CONVERSATIONS["turns"])
    bad = Spec(spec.prompt, (spec.images[0], b"hello"))
    assert failure(preparers.get("smolvlm", "capitals", CAPITALS), bad).field == "chat.messages[5].parts[1].image"


def test_a_conversation_has_as_many_images_as_parts() -> None:
    spec = spec_of(CONVERSATIONS["between"])
    for images in (spec.images[:1], (*spec.images, b"")):
        with pytest.raises(InvalidRequest, match="the messages of the conversation have 2"):
            Spec(spec.prompt, images)
    with pytest.raises(InvalidRequest, match="must be text, or texts and images"):
        Chat((ChatMessage("user", ("a", b"b")),))  # type: ignore[arg-type]
