"""A model directory with tokenizer.model and no tokenizer.json, from the frontend to its tokens."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from quire import LLM, Sampling, Stopping

from model.inputs.detokenizer import Detokenizer
from model.settings import ModelSettings
from rpc.frontend.completeness import Completeness
from rpc.frontend.errors import RequestFailed
from rpc.frontend.output import Finish, FinishReason, SequenceOutput, StepTokens
from rpc.frontend.prepare import Preparer, load_preparer
from scheduler.limits import Limits
from scheduler.prompts import Chat, ChatMessage
from scheduler.spec import Spec
from scheduler.structured import Structured
from tests.support.checkpoints import greedy_ids, write_llama
from tests.support.frontends import outputs
from tests.support.sentence_pieces import library, trained

LIMITS = Limits(vocabulary=700, context=256, pool_tokens=4096, sequences=8)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = trained("mistral 3")
    directory = write_llama(tmp_path_factory.mktemp("pieces"), vocab_size=700, bos_token_id=1, eos_token_id=2)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(data)
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<pad>"}))
    return directory


@pytest.fixture(scope="module")
def preparer(directory: Path) -> Iterator[Preparer]:
    made = load_preparer(ModelSettings(model=str(directory)))
    yield made
    made.close()


def test_conversations_become_ids(preparer: Preparer) -> None:
    ids = preparer.prepare(Spec(Chat((ChatMessage("user", "hear me"),))), LIMITS).prompt.tolist()
    assert ids[:2] == [1, 3]
    assert ids[-1] == 4
    assert preparer.tokenizer.decode(ids, True) == "hear me "


def test_a_token_beyond_the_models_vocabulary_is_refused_as_that_of_any_tokenizer(preparer: Preparer) -> None:
    assert preparer.prepare(Spec("the"), LIMITS).prompt[0] == 1
    with pytest.raises(RequestFailed, match=r"token ids must be in \[0, 700\)"):
        preparer.prepare(Spec("<pad>the"), LIMITS)


def test_a_prompt_of_text_gives_the_text_of_the_models_tokens(directory: Path, preparer: Preparer) -> None:
    tokenizer = preparer.tokenizer
    prompt = tokenizer.encode("First Citizen: 日本 🐈", True)
    expected = greedy_ids(directory, [prompt], 24)[0]
    with LLM(str(directory), dtype="float32", kv_cache_memory=2**24) as llm:
        (completion,) = llm.generate(
            ["First Citizen: 日本 🐈"], Sampling(temperature=0.0), Stopping(max_tokens=24, ignore_eos=True)
        )
    assert list(completion.token_ids) == expected
    detokenizer = Detokenizer(tokenizer, True, behind=True)
    assert completion.text == "".join([*map(detokenizer.push, expected), detokenizer.flush()])
    assert tokenizer.decode(prompt, True) + completion.text == tokenizer.decode(prompt + expected, True)


def test_a_bad_word_is_banned_in_the_middle_of_a_word_too(preparer: Preparer) -> None:
    """These tokenizers put a space in front of a text, so the word alone is tokenized as it stands behind a space."""
    request = preparer.prepare(Spec("x", sampling=Sampling(bad_words=("the",))), LIMITS)
    processor = library("mistral 3")
    banned = {tuple(processor.id_to_piece(list(ids))) for ids in request.controls.logits_params.banned}
    assert {"".join(pieces) for pieces in banned} == {"the", "▁the", "▁▁the"}
    limits = replace(LIMITS, request=replace(LIMITS.request, bad_word_tokens=sum(map(len, banned))))
    preparer.prepare(Spec("x", sampling=Sampling(bad_words=("the",))), limits)


def test_a_question_is_about_the_text_that_the_client_has(preparer: Preparer) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError

    constraint = Structured("regex", " the")
    asked = Completeness(constraint, constraint, {}, (), None, preparer.tokenizer, never, never)
    question = asked.of_end(preparer.tokenizer.encode("the", False), None)
    assert question is not None
    assert question.text == " the"


SPACE = "▁the"  # a token whose text begins with a space


@pytest.mark.parametrize(
    ("prompt", "structured", "expected"),
    [
        ("First Citizen:", None, " the"),
        ((5, 6, 7), None, " the"),
        ("", None, "the"),
        (Chat((ChatMessage("user", "hear me"),)), None, "the"),
        (
            Chat((ChatMessage("user", "hear"),), add_generation_prompt=False, continue_final_message=True),
            None,
            " the",
        ),
        (Chat((ChatMessage("user", "hear me"),)), Structured("regex", " the( the)*"), " the"),
        ("", Structured("regex", " the( the)*"), " the"),
        ((5, 6, 7, *[1] * 100), None, " the"),
        ("🐈", None, " the"),
    ],
    ids=[
        *("text", "ids", "no text", "conversation", "continued message", "constraint", "constraint alone"),
        *("special tokens", "bytes"),
    ],
)
def test_the_space_in_front_of_an_output(
    prompt: str | tuple[int, ...] | Chat, structured: Structured | None, expected: str, preparer: Preparer
) -> None:
    """A text that goes on from its prompt keeps it; so does one whose constraint has it."""
    token = preparer.tokenizer.encode("the", False)[0]
    assert preparer.tokenizer.text_of(token) == SPACE
    request = preparer.prepare(Spec(prompt), LIMITS)
    output = SequenceOutput(0, Spec(prompt, structured=structured), request, preparer.tokenizer, ())
    output.accept(StepTokens.from_outputs(outputs([(0, 0, token)])), 0)
    output.close(Finish(FinishReason.LENGTH))
    assert output.take().text == expected
