"""A preparer turns prompts into ids, the public prefix, banned words, images in their places."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.prompts import Repeated
from model.settings import ModelSettings
from rpc.frontend.errors import RequestFailed
from rpc.frontend.prepare import Preparer, load_preparer
from rpc.paths import demo_directory
from scheduler.limits import Limits, ModelDefaults
from scheduler.parameters import Sampling
from scheduler.prompts import Chat, ChatMessage
from scheduler.settings import ImageLimits
from scheduler.spec import Spec
from tests.model.vision.pictures import encoded, picture
from tests.support.checkpoints import byte_tokenizer

LIMITS = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)
LIMITS_OF_DEMO = Limits(vocabulary=2048, context=256, pool_tokens=4096, sequences=8)
PLACEHOLDER, TOKENS = 7, 2
FILE = encoded(picture(8, 8))


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer) -> Preparer:
    return Preparer("m", tokenizer, ModelDefaults())


@pytest.fixture(scope="module")
def seeing(preparer: Preparer) -> Preparer:
    tile = np.zeros((1, 3, 8, 8), np.uint8)
    images = ImageInputs(lambda pixels: ProcessedImage(tile, (1, TOKENS)), Repeated("<image>"), PLACEHOLDER)
    return replace(preparer, images=images, image_limits=ImageLimits(images=2))


def refusal(preparer: Preparer, spec: Spec, limits: Limits = LIMITS) -> RequestFailed:
    with pytest.raises(RequestFailed) as refused:
        preparer.prepare(spec, limits)
    return refused.value


@pytest.mark.parametrize(
    ("prompt", "public"),
    [((1, 2, 3, 4), 3), ((1, 2, 9), 2), ((9, 8, 7, 6, 5), 5), ((9, 8), 2), ((5, 1, 2), 0), ((1, 2, 3), 3)],
)
def test_the_longest_public_prefix_counts(preparer: Preparer, prompt: tuple[int, ...], public: int) -> None:
    several = replace(preparer, public=((1, 2, 3), (1,), (9, 8, 7, 6, 5, 4)))
    assert several.prepare(Spec(prompt), LIMITS).scope.public == public


def test_a_bad_word_is_banned_in_the_middle_of_words_and_at_their_beginning(
    preparer: Preparer, tokenizer: Tokenizer
) -> None:
    ways = tuple(tuple(tokenizer.encode(text, False)) for text in ("cat", " cat"))
    assert ways[0] != ways[1]
    for word in ("cat", " cat", "  cat"):
        request = preparer.prepare(Spec("x", sampling=Sampling(bad_words=(word,))), LIMITS)
        assert request.controls.logits_params.banned == ways


def test_bad_words_are_bounded_before_they_are_tokenized(preparer: Preparer) -> None:
    limits = replace(LIMITS, request=replace(LIMITS.request, bad_words=1))
    failure = refusal(preparer, Spec("x", sampling=Sampling(bad_words=("a", "b"))), limits)
    assert (failure.field, str(failure)) == ("sampling.bad_words", "sampling.bad_words is '2 words': at most 1")


@pytest.mark.parametrize(("added", "first"), [(True, [0]), (False, [])])
def test_special_tokens_are_added_unless_they_are_not_wanted(
    preparer: Preparer, tokenizer: Tokenizer, added: bool, first: list[int]
) -> None:
    library = byte_tokenizer()
    library.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    starting = replace(preparer, tokenizer=Tokenizer(library))
    request = starting.prepare(Spec("cat", add_special_tokens=added), LIMITS)
    assert request.prompt.tolist() == [*first, *tokenizer.encode("cat", False)]


@pytest.mark.parametrize(("written", "sees", "starts"), [("", True, 1), ("<|end|>", True, 1), ("", False, 0)])
def test_a_conversation_starts_once(
    preparer: Preparer, seeing: Preparer, written: str, sees: bool, starts: int
) -> None:
    """With images the tokenizer adds the start unless the template wrote it; without them the template alone does."""
    library = byte_tokenizer()
    library.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    chat = SimpleNamespace(beginning="<|end|>", render=lambda *_, **__: f"{written}cat")
    made = replace(seeing if sees else preparer, tokenizer=Tokenizer(library), chat=chat)
    request = made.prepare(Spec(Chat((ChatMessage("user", "cat"),))), LIMITS)
    assert request.prompt.tolist().count(0) == starts


def test_public_prefixes_start_as_prompts_do(tmp_path: Path) -> None:
    """With the special tokens of a text, without the newline at the end of a file."""
    model = Path(shutil.copytree(demo_directory(), tmp_path / "model"))
    library = Library.from_file(str(model / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    library.save(str(model / "tokenizer.json"))
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.txt").write_text("First Citizen:\n")
    loaded = load_preparer(ModelSettings(str(model)), str(tmp_path / "public"))
    prefix = loaded.tokenizer.encode("First Citizen:", True)
    assert prefix[0] == 0
    request = loaded.prepare(Spec("First Citizen: Speak"), LIMITS_OF_DEMO)
    assert request.scope.public == len(prefix)


def test_as_many_images_as_are_allowed(seeing: Preparer) -> None:
    for count in (1, 2):
        request = seeing.prepare(Spec((PLACEHOLDER,) * (TOKENS * count), images=(FILE,) * count), LIMITS)
        assert len(request.images) == count
    failure = refusal(seeing, Spec((PLACEHOLDER,) * (TOKENS * 3), images=(FILE,) * 3))
    assert failure.field == "images[2]"
    assert "at most 2 in a request" in str(failure)


def test_images_leave_a_token_for_the_output(seeing: Preparer) -> None:
    spec = Spec((PLACEHOLDER,) * (2 * TOKENS), images=(FILE,) * 2)
    seeing.prepare(spec, replace(LIMITS, context=2 * TOKENS + 1))
    failure = refusal(seeing, spec, replace(LIMITS, context=2 * TOKENS))
    assert failure.field == "images[1]"
    assert "must fit in 4 tokens" in str(failure)


@pytest.mark.parametrize("placeholders", [TOKENS - 1, TOKENS + 1])
def test_token_ids_have_a_placeholder_for_each_token_of_an_image(seeing: Preparer, placeholders: int) -> None:
    failure = refusal(seeing, Spec((1, *[PLACEHOLDER] * placeholders), images=(FILE,)))
    assert failure.field == "token_ids"
