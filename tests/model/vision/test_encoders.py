"""Law: features and logits are those of transformers, and an image's features do not depend on other images."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from model.architectures.registry import load_model
from model.attention.backend import AttentionBackend
from model.blocks import PreNorm
from model.config import read_config
from model.forward import EncoderInput, ForwardBatch
from model.rope import Rope
from model.weights import Checkpoint
from tests.model.vision import forward, reference
from tests.model.vision.cases import BY_NAME, CASES, CAUSAL, Case
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import picture

pytestmark = pytest.mark.sample(3)

SIZES = ((32, 32), (70, 110), (110, 60), (20, 90))
NEAR = 1e-5  # of the largest value

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def near(ours: torch.Tensor, theirs: torch.Tensor, off: float = NEAR) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= off * theirs.abs().max())


@each_case
@pytest.mark.sample(3)
def test_features_are_those_of_transformers(case: Case, shelf: Shelf) -> None:
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        ours = forward.features_of(shelf.decoder(case), [shelf.inputs(case).process(image)])
        values = reference.inputs(shelf.processor(case), "<image>", [image])
        assert near(ours, reference.features(shelf.reference(case), values))


PAGED = ("qwen3.5-vl", "qwen3.5-vl-moe")
"""States of text models are tested with an engine, which has their pages."""
PROMPTS = ("<image>the cat sat", "that <image>sat <image>\non the <image> rat", "the cat sat on <image>")


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_logits_of_causal_models_are_those_of_transformers(case: Case, shelf: Shelf) -> None:
    """And so are the tokens that are likeliest at every place."""
    config = read_config(shelf.checkpoint(case))
    for prompt in PROMPTS:
        images = [picture(*SIZES[i], i) for i in range(prompt.count("<image>"))]
        tiles = [shelf.inputs(case).process(image) for image in images]
        ids = shelf.inputs(case).encode(prompt, tiles, shelf.tokenizer(case))
        theirs = reference.logits(shelf.reference(case), case, reference.inputs(shelf.processor(case), prompt, images))
        ours = forward.logits(shelf.decoder(case), config, ids, tiles)
        assert near(ours, theirs, 1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
def test_logits_of_paligemma_are_those_of_transformers(name: str, shelf: Shelf) -> None:
    """With attention in both directions over the whole prompt, by a back end of this suite."""
    case = BY_NAME[name]
    config = read_config(shelf.checkpoint(case))
    assert config.vision is not None
    assert (config.vision.prefix_lm, config.first_position) == (True, 1)
    for prompt in PROMPTS:
        images = [picture(*SIZES[i], i) for i in range(prompt.count("<image>"))]
        tiles = [shelf.inputs(case).process(image) for image in images]
        ids = shelf.inputs(case).encode(prompt, tiles, shelf.tokenizer(case))
        values = reference.inputs(shelf.processor(case), prompt, images)
        theirs = reference.logits(shelf.reference(case), case, values)
        decoder = shelf.decoder(case)
        assert near(forward.logits_both_ways(decoder, config, ids, tiles), theirs, 1e-4)
        assert not near(forward.logits(decoder, config, ids, tiles), theirs, 1e-2)  # causal attention is another


@pytest.mark.parametrize("case", [case for case in CAUSAL if case.name not in PAGED], ids=str)
def test_chunks_change_no_bit(case: Case, shelf: Shelf) -> None:
    """Wherever they end, in an image too."""
    config, decoder = read_config(shelf.checkpoint(case)), shelf.decoder(case)
    tiles = [shelf.inputs(case).process(picture(*size)) for size in SIZES[:2]]
    ids = shelf.inputs(case).encode(PROMPTS[0] + "<image>", tiles, shelf.tokenizer(case))
    whole = forward.logits(decoder, config, ids, tiles)
    for chunk in (7, 16, 33):
        assert torch.equal(forward.logits(decoder, config, ids, tiles, chunk), whole)


@each_case
def test_text_alone_is_that_of_transformers(case: Case, shelf: Shelf) -> None:
    ids = [5, 7, 9, 200, 31, 64, 2]
    config, model = read_config(shelf.checkpoint(case)), shelf.reference(case)
    if config.vision is not None and config.vision.prefix_lm:
        theirs = model(input_ids=torch.tensor([ids]), token_type_ids=torch.zeros(1, len(ids), dtype=torch.long))
        ours = forward.logits_both_ways(shelf.decoder(case), config, ids, [])
    else:
        theirs = model(input_ids=torch.tensor([ids]))
        ours = forward.logits(shelf.decoder(case), config, ids)
    assert near(ours, theirs.logits[0], 1e-4)


@each_case
def test_features_do_not_depend_on_other_images(case: Case, shelf: Shelf) -> None:
    vision = shelf.decoder(case).vision
    assert vision is not None
    tiles = [shelf.inputs(case).process(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    first = [forward.encode(vision, t) for t in tiles]
    inputs = [EncoderInput(torch.from_numpy(t.pixels), t.grid) for t in reversed(tiles)]
    again = vision(inputs)[::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_case
def test_features_have_the_dtype_of_the_model(case: Case, dtype: torch.dtype, shelf: Shelf) -> None:
    directory = shelf.checkpoint(case)
    model = load_model(read_config(directory), Checkpoint(directory), dtype, torch.device("cpu"))
    tiles = shelf.inputs(case).process(picture(50, 70))
    assert model.vision is not None
    features, exact = forward.encode(model.vision, tiles), shelf.decoder(case).vision
    assert exact is not None
    assert features.dtype == dtype
    assert near(features.float(), forward.encode(exact, tiles), 0.05)


def test_placeholders_may_be_past_the_vocabulary(shelf: Shelf) -> None:
    """As of checkpoints whose placeholder has no row in the embedding."""
    case = BY_NAME["llava-clip"]
    config, decoder = read_config(shelf.checkpoint(case)), shelf.decoder(case)
    tiles = [shelf.inputs(case).process(picture(40, 40))]
    ids = shelf.inputs(case).encode("the <image> cat", tiles, shelf.tokenizer(case))
    images = forward.placed(decoder, config, ids, tiles)
    assert images is not None
    positions, tokens = torch.arange(len(ids)), torch.tensor(ids)
    batch = ForwardBatch(tokens, positions[None], positions, cast(AttentionBackend, None), None, images)
    there = decoder.embedding(batch)
    past = tokens.masked_fill(tokens == config.vision.image_token_id, 2**40)  # type: ignore[union-attr]
    assert torch.equal(decoder.embedding(replace(batch, tokens=past)), there)
    assert torch.equal(there[images.places], images.features[0])


def test_positions_of_paligemma_begin_at_one(shelf: Shelf) -> None:
    """Attention does not see it, as rope is relative; keys in the cache do."""
    case = BY_NAME["paligemma"]
    layer = shelf.decoder(case).layers[0]
    assert isinstance(layer, PreNorm)
    rope = layer.attention.rope
    assert isinstance(rope, Rope)
    plain = Rope(1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16), 1025, torch.float32, torch.device("cpu"))
    context = torch.arange(1024)
    for ours, theirs in zip(rope.at(context[None]), plain.at(context[None] + 1), strict=True):
        assert torch.equal(ours, theirs)
