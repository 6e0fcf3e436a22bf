"""The tokenizer and the template of simulated models: what is drawn is text, and conversations can be written."""

import numpy as np
import pytest

from model.config import read_config
from model.generation_config import read_defaults
from model.inputs.chat import find_chat_template
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from model.simulated.config import ARCHITECTURE, simulated_config
from model.simulated.distribution import CANDIDATES, END, FIRST_WORD, VOCABULARY, WORDS, candidates
from model.simulated.naming import checkpoint_directory, is_simulated, profile_of, simulated_name

DIRECTORY = checkpoint_directory()


def test_every_word_is_text_by_itself() -> None:
    tokenizer = load_tokenizer(DIRECTORY)
    for token in range(FIRST_WORD, FIRST_WORD + WORDS):
        text = tokenizer.decode([token], skip_special_tokens=True)
        assert text
        assert "\ufffd" not in text
    assert tokenizer.text_of(END) == "<|im_end|>"
    assert [tokenizer.text_of(i) for i in (VOCABULARY - 1, VOCABULARY)] == ["<|im_end|>", None]


def test_candidates_are_different_words() -> None:
    ids = candidates(np.arange(WORDS)[:, None], np.arange(CANDIDATES))
    assert (ids.min(), ids.max()) == (FIRST_WORD, FIRST_WORD + WORDS - 1)
    assert all(len(set(row)) == CANDIDATES for row in ids.tolist())


def test_the_checkpoint_is_one_that_quire_would_serve() -> None:
    try_tokenizer(DIRECTORY)
    config = read_config(DIRECTORY)
    assert config.vocabulary == VOCABULARY
    assert END in read_defaults(DIRECTORY, config).eos_token_ids
    assert find_chat_template(DIRECTORY) is not None


def test_the_config_is_the_profiles() -> None:
    config = simulated_config("sim:llama-3.1-8b-h100")
    assert (config.architecture, config.context) == (ARCHITECTURE, profile_of("sim:llama-3.1-8b-h100").context)


@pytest.mark.parametrize(
    ("model", "name"),
    [("sim:llama-3.1-8b-h100", "sim:llama-3.1-8b-h100"), ("sim:./dir/my.one.json", "sim:my.one"), ("sim:x", "sim:x")],
)
def test_names_say_that_they_are_simulated(model: str, name: str) -> None:
    assert is_simulated(model)
    assert simulated_name(model) == name


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is neither a file nor one of the profiles .*llama"):
        profile_of("sim:nowhere")
