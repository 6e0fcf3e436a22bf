"""A nanoVLM directory through LLM and through servers: tokens are those of a statement of its published source."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from quire import LLM, Sampling, Stopping
from quire.v1 import generation_service_pb2 as pb
from safetensors.torch import load_file

from model.inputs.tokenizer_files import load_tokenizer
from tests.e2e.test_images import asked
from tests.model.vision import nano
from tests.model.vision.pictures import encoded, picture
from tests.model.vision.seen import NEW
from tests.support.server import running_server

SIZES = ((50, 90), (32, 32))
COUNTS = {"plain": (1, 0), "square": (2, 1, 0), "overview": (2, 1, 0)}
TEXT = "the cat sat on the mat"
MEMORY = 16 * 2**20


@dataclass
class Version:
    """expected: by number of images."""

    directory: Path
    marker: str
    images: list[bytes]
    expected: dict[int, list[int]]


@pytest.fixture(scope="module", params=COUNTS)
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    config = nano.VERSIONS[request.param]
    directory = nano.write(tmp_path_factory.mktemp("nano") / request.param, config, seed=3)
    reference = nano.Reference(config, load_file(directory / "model.safetensors"))
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    made = [nano.tiles(config, image) for image in pictures]
    return Version(
        directory,
        config.get("vlm_extra_tokens", {}).get("image_token", ""),
        [encoded(image) for image in pictures],
        {
            count: greedy(
                reference, directory, [tiles for tiles, _ in made[:count]], [grid for _, grid in made[:count]]
            )
            for count in COUNTS[request.param]
        },
    )


@torch.inference_mode()
def greedy(
    reference: nano.Reference, directory: Path, tiles: list[torch.Tensor], grids: list[tuple[int, int]]
) -> list[int]:
    """Images, then the text, one token after the other without a cache."""
    config, tokenizer = reference.c, load_tokenizer(directory)
    features = (
        torch.cat([reference.features(one) for one in tiles]) if tiles else torch.empty(0, config["lm_hidden_dim"])
    )
    if "vlm_extra_tokens" not in config:
        x = torch.cat([features, reference.embedded(tokenizer.encode(TEXT, True))])
    else:
        tiled = "max_img_size" in config
        string = nano.image_string(config, grids) if tiled else "<|image|>" * 16 * len(grids)
        ids = tokenizer.encode(string + TEXT, True)
        x = reference.embedded(ids)
        x[torch.tensor(ids) == config["lm_base_vocab_size"]] = features
    tokens: list[int] = []
    for _ in range(NEW):
        tokens.append(int(reference.logits(x)[-1].argmax()))
        x = torch.cat([x, reference.embedded(tokens[-1:])])
    return tokens


def test_through_llm(version: Version) -> None:
    with LLM(str(version.directory), kv_cache_memory=MEMORY) as llm:
        prompts = [version.marker * count + TEXT for count in version.expected]
        images = [version.images[:count] for count in version.expected]
        stopping = Stopping(max_tokens=NEW, ignore_eos=True)
        done = llm.generate(prompts, Sampling(temperature=0), stopping, images=images)
    assert [completion.token_ids for completion in done] == list(version.expected.values())


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.slow
def test_through_a_server(engine: str, version: Version) -> None:
    flags = ("--model", str(version.directory), "--kv-cache-memory", "16MiB", "--engine", engine)
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        stub = server.stub(channel)
        for count, expected in version.expected.items():
            spec = asked(version.marker * count + TEXT, *version.images[:count])
            first, second = (stub.Generate(pb.GenerateRequest(spec=spec)) for _ in range(2))
            assert list(first.sequences[0].token_ids) == list(second.sequences[0].token_ids) == expected
            assert (first.prompt_info.image_token_count > 0) == (count > 0)
            assert (second.prompt_info.cached_token_count > 0) == (count > 0), "the text alone fills no page"
        assert server.metrics()["quire_images_encoded_total"] == max(version.expected)
