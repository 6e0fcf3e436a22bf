"""Law: images of any resolution, on several rotary axes and at several depths, change no bit under any schedule.

A made-up family (`made_up.py`) is compared with a plain statement of a whole sequence. Qwen's are compared with
transformers in `test_engine.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire.engine.v1 import engine_service_pb2 as pb
from torch import Tensor

from model import rotary_rows
from model.attention.backend import StepShape
from model.config import read_config
from model.decoder import Decoder
from model.forward import EncoderInput, ForwardBatch
from model.images import ImagePart
from model.input_batch import InputBatch
from model.reference.attention_backend import ReferenceAttention
from model.settings import ModelSettings
from rpc.frontend.prepare import Preparer, load_preparer
from rpc.link import codec
from scheduler.events import EndReason, Submit
from scheduler.limits import Limits
from scheduler.parameters import Sampling, Stopping
from scheduler.request import PromptImage, Request
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.spec import Spec
from tests.model.vision import made_up
from tests.model.vision.cases import IMAGE
from tests.model.vision.conftest import load_decoder
from tests.model.vision.made_up import DEEPSTACK, SQUARE
from tests.model.vision.pictures import encoded, picture
from tests.support.engines import Rig, key_of, make_rig
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)

Plant = Callable[[pytest.MonkeyPatch], None]
Bits = list[dict[int, bytes]]

NEW, PAGE = 6, 16
PICTURES = (picture(24, 56, 1), picture(40, 17, 2), picture(8, 8, 3), picture(16, 48, 4))
"""Grids of 3 x 7, 5 x 2, 1 x 1 and 2 x 6."""
PROMPTS = (
    ("the cat <image>sat on<image> the mat", (0, 1)),
    ("<image><image> rat", (3, 2)),
    ("that hat was <image>", (1,)),
    ("the cat sat on the mat", ()),
    ("<image>", (0,)),
)
STEPS = SchedulerSettings(max_batched_tokens=128, max_sequences=16)


def plain_positions(ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> Tensor:
    """[1 + axes, ids]: the place in the sequence, then time, row and column. Any other token is ahead of all before it
    by one on each axis.
    """
    left, images = 0, iter(grids)
    shown: list[tuple[int, int, int]] = []  # of the image at hand, what is left
    made, ahead = [], 0
    for place, token in enumerate(ids):
        if token == IMAGE and left == 0:
            rows, columns = next(images)
            left, base = rows * columns, ahead
            shown = [(base, base + row, base + column) for row in range(rows) for column in range(columns)]
            ahead = base + max(rows, columns)
        if token == IMAGE:
            made.append((place, *shown[-left]))
            left -= 1
        else:
            made.append((place, ahead, ahead, ahead))
            ahead += 1
    return torch.tensor(made).T.contiguous()


@dataclass
class Plainly:
    """A whole sequence in one step, one layer after the other."""

    decoder: Decoder
    directory: Path

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], prompt: int, images: Sequence[np.ndarray]) -> Tensor:
        """[vocabulary] of the last token; prompt: length of the part in which placeholders are features."""
        config, n = read_config(self.directory), len(ids)
        layout = config.kv_layout(PAGE, "float32")
        attention = ReferenceAttention(
            layout, -(-n // PAGE), config.heads, "float32", torch.device("cpu"), config.scale, config.soft_cap
        )
        table, places = np.arange(-(-n // PAGE), dtype=np.int32)[None, None], np.arange(n)
        shape = StepShape(np.array([[0, 0, n]], np.int32), places, places[None], table, np.zeros(1, np.int64))
        grids = [made_up.squares(*image.shape[:2]) for image in images]
        axes = plain_positions([*ids[:prompt], *[0] * (n - prompt)], grids)
        last = torch.tensor([n - 1])
        batch = ForwardBatch(torch.tensor(ids), axes, last, attention, attention.plan(shape))
        here = (torch.tensor(ids[:prompt]) == IMAGE).nonzero()[:, 0]
        x, features = self.decoder.embedding.tokens.look_up(torch.tensor(ids)), self._features(images, grids)
        x[here] = features[0]
        for number, layer in enumerate(self.decoder.layers):
            x = layer(x, batch)
            if number in DEEPSTACK:
                x[here] += features[1 + DEEPSTACK.index(number)]
        return self.decoder.head(self.decoder.norm(x[last]))[0]

    def _features(self, images: Sequence[np.ndarray], grids: Sequence[tuple[int, int]]) -> Tensor:
        if not images:
            return torch.zeros(1 + len(DEEPSTACK), 0, 64)
        assert self.decoder.vision is not None
        made = []
        for image, (rows, columns) in zip(images, grids, strict=True):
            pixels = torch.from_numpy(made_up.process(image).pixels)
            assert pixels.shape == (1, 3, rows * SQUARE, columns * SQUARE)
            made += self.decoder.vision([EncoderInput(pixels, (1, rows, columns))])
        return torch.cat(made, 1)


class Shown:
    """The prompts, and what the plain statement makes of each."""

    def __init__(self, directory: Path) -> None:
        self.directory = made_up.write(directory)
        self.preparer: Preparer = load_preparer(ModelSettings(model=str(self.directory)))
        self.plain = Plainly(load_decoder(self.directory), self.directory)
        self.tokens, self.logits = [], []
        for i, (_, which) in enumerate(PROMPTS):
            ids = self.request(Limits(420, 1024, 4096, 16), i).prompt.tolist()
            prompt, steps = len(ids), []
            for _ in range(NEW):
                steps.append(self.plain.logits(ids, prompt, [PICTURES[image] for image in which]))
                ids.append(int(steps[-1].argmax()))
            self.tokens.append(ids[prompt:])
            self.logits.append({position: step.numpy().tobytes() for position, step in enumerate(steps)})

    def request(self, limits: Limits, i: int, **sampling: Any) -> Request:
        """As an engine gets it: prepared by a frontend, and brought over the link."""
        text, which = PROMPTS[i]
        spec = Spec(
            text,
            tuple(encoded(PICTURES[image]) for image in which),
            sampling=Sampling(**({"temperature": 0.0} | sampling)),
            stopping=Stopping(max_tokens=NEW, ignore_eos=True),
        )
        sent = codec.encode_events([Submit(1, self.preparer.prepare(spec, limits))]).SerializeToString()
        (event,) = codec.decode_events(pb.ConnectRequest.FromString(sent))
        assert isinstance(event, Submit)
        return event.request

    def rig(self, **kind: Any) -> Rig:
        usual = {"settings": STEPS, "pool_tokens": 1024, "backend": "reference"}
        return make_rig(self.directory, record_logits=True, **(usual | kind))

    def run(self, rig: Rig) -> Rig:
        rig.run({i: self.request(rig.loaded.limits, i) for i in range(len(PROMPTS))})
        return rig

    def agrees(self, rig: Rig) -> bool:
        every = range(len(PROMPTS))
        tokens = [rig.results[i].tokens for i in every] == self.tokens
        return tokens and [rig.logits_of(i) for i in every] == self.logits


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with pytest.MonkeyPatch.context() as patch:
        made_up.register(patch)
        made = Shown(tmp_path_factory.mktemp("made up"))
        yield made
        made.preparer.close()


SCHEDULES: dict[str, dict[str, Any]] = {
    "one mixed batch": {},
    "page of 1": {"page_size": 1},
    "page of 7": {"page_size": 7},
    "few rows": {"settings": replace(STEPS, max_sequences=2)},
    "chunks that end in images": {"settings": replace(STEPS, prefill_chunk=4)},
    "pipelined": {"settings": replace(STEPS, steps_in_flight=2, prefill_chunk=8)},
    "no prefix cache": {"prefix_cache": False},
    "recompute": {"settings": replace(STEPS, recompute=True)},
    "draws on the device": {"ahead": True, "settings": replace(STEPS, steps_in_flight=2)},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_bits_of_the_plain_statement(name: str, shown: Shown) -> None:
    rig = shown.run(shown.rig(**SCHEDULES[name]))
    assert shown.agrees(rig)
    assert rig.scheduler.stats().images_encoded == len(PICTURES)


def test_preempted_sequences_go_on_as_they_would_have(shown: Shown) -> None:
    """Prompt and output are computed again, in chunks: output stands behind the images by the same offset."""
    settings = replace(STEPS, prefill_chunk=16)
    rig = shown.rig(
        page_size=1, pool_tokens=70, prefix_cache=False, settings=settings, queue=QueueLimits(pools_of_tokens=9)
    )
    assert shown.agrees(shown.run(rig))
    assert rig.preemptions


def test_output_of_an_earlier_attempt_stands_where_it_stood(shown: Shown) -> None:
    rig = shown.rig()
    known = tuple(shown.tokens[0][:3])
    rig.play({0: [Submit(0, shown.request(rig.loaded.limits, 0), (known,))]})
    assert rig.results[0].tokens == shown.tokens[0]
    assert rig.logits_of(0) == {place: shown.logits[0][place] for place in range(3, NEW)}


def test_pages_with_images_are_shared(shown: Shown) -> None:
    rig = shown.rig(page_size=4)
    for attempt in (0, 100):
        rig.run({attempt: shown.request(rig.loaded.limits, 0)})
        assert rig.logits_of(attempt) == shown.logits[0]
    assert rig.started[100] == (len(shown.request(rig.loaded.limits, 0).prompt) - 1) // 4 * 4
    assert rig.scheduler.stats().images_encoded == 2


def test_several_sequences_go_on_from_one_prompt(shown: Shown) -> None:
    rig = shown.rig(page_size=4)
    rig.run({1: shown.request(rig.loaded.limits, 0, temperature=1.0, seed=5, sequence_count=3)})
    ids = shown.request(rig.loaded.limits, 0).prompt.tolist()
    for index in range(3):
        tokens = rig.results[key_of(1, index)].tokens
        last = shown.plain.logits([*ids, *tokens[:-1]], len(ids), [PICTURES[image] for image in PROMPTS[0][1]])
        assert rig.logits_of(key_of(1, index))[NEW - 1] == last.numpy().tobytes()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_ranks_get_axes_and_depths(backend: str, shown: Shown) -> None:
    """Two ranks round otherwise than one, so their tokens are compared alone."""
    rig = make_rig(shown.directory, settings=STEPS, pool_tokens=1024, ranks=2, backend=backend)
    shown.run(rig)
    assert [rig.results[i].tokens for i in range(len(PROMPTS))] == shown.tokens


@pytest.fixture(scope="module")
def compiled(shown: Shown) -> Bits:
    """By sequence and output position, the logits of the CPU's kernels for each prompt alone, in one step."""
    rig = shown.rig(backend="cpu", prefix_cache=False)
    for i in range(len(PROMPTS)):
        rig.run({i: shown.request(rig.loaded.limits, i)})
    return [rig.logits_of(i) for i in range(len(PROMPTS))]


def test_the_cpus_kernels_are_near_the_plain_statement(compiled: Bits, shown: Shown) -> None:
    for ours, theirs in zip(compiled, shown.logits, strict=True):
        for position in range(NEW):
            a, b = (np.frombuffer(logits[position], np.float32) for logits in (ours, theirs))
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_bits_of_a_prompt_alone(name: str, compiled: Bits, shown: Shown) -> None:
    """On the CPU's kernels. Text is computed beside images here, and after steps of other lengths."""
    rig = shown.run(shown.rig(backend="cpu", **SCHEDULES[name]))
    assert [rig.results[i].tokens for i in range(len(PROMPTS))] == shown.tokens
    assert [rig.logits_of(i) for i in range(len(PROMPTS))] == compiled


def test_the_plain_positions_are_what_the_engine_packs(shown: Shown) -> None:
    """Beside the logits, as angles of far positions may differ little."""
    for i, (_, which) in enumerate(PROMPTS):
        rig, seen = shown.rig(settings=replace(STEPS, prefill_chunk=5), page_size=4), list[Tensor]()

        class Noting:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def forward(self, batch: ForwardBatch) -> Any:
                seen.append(batch.positions)  # noqa: B023
                return self.inner.forward(batch)

        rig.wrap_model(Noting)
        request = shown.request(rig.loaded.limits, i)
        rig.run({1: request})
        grids = [made_up.squares(*PICTURES[image].shape[:2]) for image in which]
        expected = plain_positions([*request.prompt.tolist(), *[0] * (NEW - 1)], grids)
        assert torch.equal(torch.cat(seen, 1), expected)


def with_positions(change: Callable[[rotary_rows.Positions, int], tuple[rotary_rows.Positions, int]]) -> Plant:
    """Positions of prompts, and the offset after them, are others."""
    right = rotary_rows.prompt_positions

    def wrong(count: int, images: Sequence[PromptImage], axes: int) -> tuple[rotary_rows.Positions, int]:
        return change(*right(count, images, axes))

    return lambda patch: patch.setattr(rotary_rows, "prompt_positions", wrong)


def with_images(change: Callable[[tuple[PromptImage, ...]], tuple[PromptImage, ...]]) -> Plant:
    """Positions of prompts are those of other images."""
    right = rotary_rows.prompt_positions
    return lambda patch: patch.setattr(
        rotary_rows, "prompt_positions", lambda count, images, axes: right(count, change(tuple(images)), axes)
    )


def with_stand_in(of: object, name: str, stand_in: Callable[[Any], object]) -> Plant:
    """Plants what `stand_in` returns for the right function."""
    return lambda patch: plant(patch, of, name, stand_in)


def with_other(of: object, name: str, other: object) -> Plant:
    return with_stand_in(of, name, lambda _: other)


def turned_around(images: tuple[PromptImage, ...]) -> tuple[PromptImage, ...]:
    """Rows and columns of the second image are swapped."""
    return tuple(
        replace(image, positions=image.positions[[0, 2, 1]]) if i == 1 and image.positions is not None else image
        for i, image in enumerate(images)
    )


def longer_by_one(images: tuple[PromptImage, ...]) -> tuple[PromptImage, ...]:
    """The text behind the first image begins one position too late: the last feature says so."""
    first, *others = images
    assert first.positions is not None
    positions = first.positions.copy()
    positions[0, -1] = positions.max() + 1
    return replace(first, positions=positions), *others


def from_the_chunk(image_parts: Callable[..., list[ImagePart]]) -> Callable[..., list[ImagePart]]:
    """Each chunk begins with an image's first feature."""

    def changed(*given: Any) -> list[ImagePart]:
        return [replace(part, features=part.features - part.features[0]) for part in image_parts(*given)]

    return changed


def chunk_by_chunk(self: rotary_rows.RotaryRows, slices: Any, positions: Any, row_of: Any, first: Any) -> Any:
    """Each chunk has the positions of the prompt's beginning."""
    return PACK(self, slices * np.array([1, 0, 1], np.int32), positions, row_of, first)


PACK = rotary_rows.RotaryRows.pack
CHUNKS = {"settings": replace(STEPS, prefill_chunk=4)}
FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "rows and columns of the second image swapped": (with_images(turned_around), {}),
    "the second image one position too late": (with_images(longer_by_one), {}),
    "images stand like text": (with_images(lambda images: ()), {}),
    "output forgets the images": (with_positions(lambda made, _: (made, 0)), {}),
    "output one position too late": (with_positions(lambda made, delta: (made, delta + 1)), {}),
    "time and rows swapped": (with_positions(lambda made, delta: (made[[1, 0, 2]], delta)), {}),
    "added one layer too late": (with_other(made_up, "DEEPSTACK", (1, 2)), {}),
    "depths in the wrong order": (with_other(made_up, "DEEPSTACK", (2, 0)), {}),
    "features from a chunk's beginning": (with_stand_in(InputBatch, "_image_parts", from_the_chunk), CHUNKS),
    "positions from a chunk's beginning": (with_other(rotary_rows.RotaryRows, "pack", chunk_by_chunk), CHUNKS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind = FAULTS[name]
    plant(monkeypatch)
    assert not shown.agrees(shown.run(shown.rig(**kind)))


@pytest.mark.parametrize("grid", [(1, 4, 7), (1, 3, 6), (7, 2)])
def test_a_grid_of_another_count_is_refused_and_ends_its_request_alone(grid: tuple[int, ...], shown: Shown) -> None:
    rig = shown.rig()
    right = shown.request(rig.loaded.limits, 0)
    first, *others = right.images
    wrong = replace(right, images=(replace(first, grid=grid), *others))
    with pytest.raises(codec.LinkError, match="21 places"):
        codec.decode_events(codec.encode_events([Submit(1, wrong)]))
    rig.run({0: shown.request(rig.loaded.limits, 3), 1: wrong, 2: shown.request(rig.loaded.limits, 2)})
    assert [rig.results[i].tokens for i in (0, 2)] == [shown.tokens[3], shown.tokens[2]]
    assert rig.results[1].end is not None
    assert rig.results[1].end.reason is EndReason.FAULT
