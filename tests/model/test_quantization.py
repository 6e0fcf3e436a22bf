"""Law: weights in 8 bits are the stated ones, and what is computed with them is what transformers computes with their
values; no schedule changes a bit of it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.architectures.registry import build_model
from model.config import read_config
from model.cpu import weight_formats
from model.errors import CheckpointError
from model.footprint import weight_bytes
from model.layers import Linear
from model.settings import ModelSettings
from model.tensors import Tensors
from model.weight_formats import int8 as int8_format
from model.weight_formats.int8 import Int8Format, Int8Linear, quantize, quantized_blocks
from model.weight_formats.registry import open_weight_format
from model.weight_formats.scratch import Scratch
from model.weights import Checkpoint
from scheduler.parameters import Sampling, Stopping
from scheduler.settings import SchedulerSettings
from tests.model.families import reference
from tests.model.families.cases import BY_NAME, CASES, Case
from tests.model.families.conftest import Shelf
from tests.model.families.parity import Mismatch, ask, compare
from tests.model.families.prompts import FEW, PROMPTS
from tests.model.families.styles import edit_tensors, fused_experts
from tests.model.test_layers import COUNTS, ROWS, WIDTHS, check_rows, close, each_dtype, random
from tests.model.test_parity import ENDLESS
from tests.model.test_weights import DOWN, edit, load_it
from tests.support.checkpoints import write_llama
from tests.support.engines import Rig, make_request, make_rig
from tests.support.marks import few
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")
Floats = NDArray[np.float32]


# The numbers.


def stated(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """The definition, in numpy. weight: [out, in]."""
    largest = np.abs(weight).max(1)
    scale = np.where(largest / np.float32(127) == 0, np.float32(1), largest / np.float32(127))
    return np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8), scale


def dequantized(weight: Tensor) -> Tensor:
    values, scale = stated(weight.float().numpy())
    return torch.from_numpy(values * scale[:, None])


floats = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1e-45, -3e-44, 1e-38])


@given(st.integers(1, 9).flatmap(lambda width: st.lists(st.lists(floats, min_size=width, max_size=width), min_size=1)))
def test_the_numbers_are_the_stated_ones(rows: list[list[float]]) -> None:
    weight = np.array(rows, np.float32)
    values, scale = quantize(torch.from_numpy(weight))
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    expected = stated(weight)
    np.testing.assert_array_equal(values.numpy(), expected[0])
    np.testing.assert_array_equal(scale.numpy(), expected[1])


def test_examples() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0, 0.0], [127.0, 0.5, 1.5, -2.5], [-12.7, 0.26, -0.34, 0.04], [1e-45, 0, 0, 0]])
    values, scale = quantize(rows)
    assert values.tolist() == [[0, 0, 0, 0], [127, 0, 2, -2], [-127, 3, -3, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 1.0, pytest.approx(0.1), 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_become_one_that_is(bad: float) -> None:
    layer = int8(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    y = layer(torch.ones(5, 2))
    assert not y[:, 0].isfinite().any()
    assert torch.allclose(y[:, 1], torch.tensor(3.0), rtol=1e-2)


# The product.


def int8(*weights: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Int8Linear:
    return Int8Linear(weights, bias, Scratch(dtype or weights[0].dtype, CPU), CPU)


@pytest.fixture(params=[2**21, 999], ids=["whole", "in blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(int8_format, "BLOCK", request.param)
    return int(request.param)


@each_dtype
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 50])
def test_values(dtype: torch.dtype, bias: bool, rows: int) -> None:
    parts = [random(out, 100, dtype=dtype, seed=out) for out in (33, 7, 1)]
    x, b = random(rows, 100, dtype=dtype, seed=1), random(41, dtype=dtype, seed=2) if bias else None
    weight = torch.cat([dequantized(part) for part in parts])
    expected = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    y = int8(*parts, bias=b)(x)
    assert y.shape == (rows, 41)
    if rows:
        close(y, expected.numpy(), dtype)


@each_dtype
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.slow
def test_rows(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    inputs, outputs = widths
    bias = random(outputs, dtype=dtype, seed=1) if inputs % 2 else None
    counts = COUNTS if inputs * outputs < 100_000 else [1, 2, 5, 16, 129]
    layer = int8(random(outputs, inputs, dtype=dtype), bias=bias)
    check_rows(layer, random(ROWS if len(counts) > 5 else 150, inputs, dtype=dtype, seed=2), counts)


@each_dtype
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("widths", [(100, 64), (576, 1536), (256, 2048)], ids=str)
def test_rows_with_two_threads(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    layer = int8(random(widths[1], widths[0], dtype=dtype))
    check_rows(layer, random(ROWS, widths[0], dtype=dtype, seed=2), [1, 2, 5, 16, 129])


def test_large_sums_do_not_overflow_float16() -> None:
    weight, x = torch.full((3, 1000), 0.01, dtype=torch.float16), torch.full((4, 1000), 100.0, dtype=torch.float16)
    assert torch.allclose(int8(weight)(x), torch.tensor(1000.0, dtype=torch.float16), rtol=2e-3)


@each_dtype
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("bias", [False, True])
def test_values_of_the_way_that_a_gpu_goes(dtype: torch.dtype, bias: bool) -> None:
    """On the CPU, since it is the same code on any device."""
    weight, x = random(33, 100, dtype=dtype), random(50, 100, dtype=dtype, seed=1)
    b = random(33, dtype=dtype, seed=2) if bias else None
    layer = int8(weight, bias=b)
    layer._on_cpu, layer._scratch._room = False, torch.empty(33 * 100, dtype=dtype)
    expected = x.double() @ dequantized(weight).double().T + (b.double() if b is not None else 0)
    close(layer(x), expected.numpy(), dtype)


def test_layers_share_their_scratch() -> None:
    scratch = Scratch(torch.float32, CPU)
    wide, narrow = (Int8Linear([random(8, n, dtype=torch.float32)], None, scratch, CPU) for n in (500, 20))
    x, y = random(5, 500, dtype=torch.float32), random(5, 20, dtype=torch.float32)
    first = wide(x), narrow(y)
    assert torch.equal(wide(x), first[0])
    assert torch.equal(narrow(y), first[1])
    assert scratch.shaped(torch.Size([4000])).numel() == 4000


# The models.

NOT_LINEAR = re.compile(r"embed(?!_out)|wte|wpe|norm|ln_|block_sparse_moe\.gate\.|mlp\.gate\.weight")


def dequantize_all(case: Case) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        linear = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not NOT_LINEAR.search(name)]
        lying = {name for name in linear if case.family == "GPT-2" and "lm_head" not in name}  # Conv1D: [in, out]
        assert len(linear) >= 4
        return tensors | {
            name: dequantized(tensors[name].T).T if name in lying else dequantized(tensors[name]) for name in linear
        }

    return change


NAMES = (
    *("llama", "llama-biases", "llama-tied", "gemma2", "gpt2", "gpt2-inner", "mixtral", "qwen3-moe", "falcon"),
    *("falcon-new", "falcon-sequential", "gpt-neox", "opt-post-norm", "phi", "phi3"),
)
PLACES = tuple(FEW[i] for i in (0, 3, 5, 7))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def expected(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], reference.Reference]:
    """Results of transformers with a case whose linear weights are the numbers that their 8 bits stand for."""
    known: dict[str, reference.Reference] = {}

    def of(name: str) -> reference.Reference:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            shutil.copytree(shelf.checkpoint(BY_NAME[name]), directory, dirs_exist_ok=True)
            edit_tensors(directory, dequantize_all(BY_NAME[name]))
            known[name] = reference.read(directory, PROMPTS, PLACES)
        return known[name]

    return of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.sample(2)
def test_tokens_are_those_of_transformers_with_these_weights(
    name: str, backend: str, shelf: Shelf, expected: Callable[[str], reference.Reference]
) -> None:
    compare(ask(shelf.checkpoint(BY_NAME[name]), PLACES, "int8", backend), expected(name))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_the_comparison_sees_that_weights_are_quantized(
    name: str, shelf: Shelf, expected: Callable[[str], reference.Reference]
) -> None:
    with pytest.raises(Mismatch):
        compare(ask(shelf.checkpoint(BY_NAME[name]), PLACES), expected(name))


def test_experts_that_are_one_tensor(
    shelf: Shelf, expected: Callable[[str], reference.Reference], tmp_path: Path
) -> None:
    shutil.copytree(shelf.checkpoint(BY_NAME["mixtral"]), tmp_path, dirs_exist_ok=True)
    edit_tensors(tmp_path, fused_experts)
    compare(ask(tmp_path, PLACES, "int8"), expected("mixtral"))


def scales_of_columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = rows.abs().amax(0).mean().expand(len(rows)) / 127
    return (rows / largest[:, None]).round().clamp(-127, 127).to(torch.int8), largest


def truncated(rows: Tensor) -> tuple[Tensor, Tensor]:
    _, scale = quantize(rows)
    return (rows / scale[:, None]).trunc().to(torch.int8), scale


def scaled_bias(self: Int8Linear, x: Tensor, part: slice) -> Tensor:
    bias = torch.zeros(()) if self._bias is None else self._bias[part]
    return (x @ self._values[part].to(x.dtype).T + bias) * self._scale[part]


def no_scale(self: Int8Linear, x: Tensor, part: slice) -> Tensor:
    return x @ self._values[part].to(x.dtype).T / 127 + (0 if self._bias is None else self._bias[part])


def scales_of_neighbours(weights: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    values, scales = quantized_blocks(weights, device)
    return values, scales.roll(1)


def neighbours_scale(self: Int8Linear, x: Tensor, part: slice) -> Tensor:
    y = x @ self._values[part].to(x.dtype).T * self._scale[part].roll(1)
    return y if self._bias is None else y + self._bias[part]


FAULTS = {
    "scales of columns": (int8_format, "quantize", scales_of_columns, "auto"),
    "truncation in place of rounding": (int8_format, "quantize", truncated, "auto"),
    "the scale of another row": (weight_formats, "quantized_blocks", scales_of_neighbours, "auto"),
    "the bias scaled too": (Int8Linear, "_product", scaled_bias, "reference"),
    "no scale": (Int8Linear, "_product", no_scale, "reference"),
    "the scale of another row, in torch": (Int8Linear, "_product", neighbours_scale, "reference"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(
    fault: str, shelf: Shelf, expected: Callable[[str], reference.Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong, backend = FAULTS[fault]
    plant(monkeypatch, owner, name, lambda _: wrong)
    with pytest.raises(Mismatch):
        compare(ask(shelf.checkpoint(BY_NAME["llama-biases"]), PLACES, "int8", backend), expected("llama-biases"))


DTYPES = ("float32", "bfloat16", "float16")


def bits(directory: Path, dtype: str, settings: SchedulerSettings, page_size: int, at_once: bool) -> list[object]:
    rig: Rig = make_rig(
        directory, page_size, 2048, settings, True, dtype=dtype, queue=ENDLESS, prefix_cache=False, quantization="int8"
    )
    requests = {place: make_request(rig, PROMPTS[place], 12) for place in FEW}
    for batch in [requests] if at_once else [{place: request} for place, request in reversed(requests.items())]:
        rig.run(batch)
    return [(rig.results[place].tokens, rig.logits_of(place)) for place in FEW]


NARROW = SchedulerSettings(max_sequences=8, max_batched_tokens=27, prefill_chunk=13, steps_in_flight=2)


NAMED = ("llama-biases", "gemma2", "gpt2", "mixtral", "falcon")
PAIRS = [(name, dtype) for name in NAMED for dtype in DTYPES]
QUICK = {(name, DTYPES[i % 3]) for i, name in enumerate(NAMED)}


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS]
)
def test_no_schedule_changes_a_bit(name: str, dtype: str, shelf: Shelf) -> None:
    directory = shelf.checkpoint(BY_NAME[name])
    together = bits(directory, dtype, SchedulerSettings(), 16, True)
    assert bits(directory, dtype, NARROW, 7, True) == together
    assert bits(directory, dtype, SchedulerSettings(), 1, False) == together


# Memory.


def held(directory: Path, dtype: str, quantization: str | None) -> int:
    config = read_config(directory)
    weights = open_weight_format(config, quantization)
    tensors = Tensors(Checkpoint(directory), getattr(torch, dtype), CPU, weights)
    build_model(config, tensors)
    return tensors.held.bytes


@pytest.mark.parametrize("dtype", DTYPES)
@few("case", CASES, [*NAMED, "llama-tied", "qwen3.5", "deepseek-v3", "gemma4", "mamba2", "gpt-oss", "phimoe"])
def test_the_estimate_is_what_is_held(case: Case, dtype: str, shelf: Shelf) -> None:
    directory = shelf.checkpoint(case)
    for quantization in (None, "int8"):
        assert held(directory, dtype, quantization) == weight_bytes(read_config(directory), dtype, quantization)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.25), ("bfloat16", 0.5)])
def test_weights_take_a_half_or_a_quarter(dtype: str, share: float, tmp_path: Path) -> None:
    directory = write_llama(tmp_path, hidden_size=256, intermediate_size=704)
    config = read_config(directory)
    embedding = config.vocabulary * config.hidden * (4 if dtype == "float32" else 2)
    before, after = (weight_bytes(config, dtype, kind) - embedding for kind in (None, "int8"))
    assert share < after / before < share * 1.05


PEAK = """
import sys, threading, time
from pathlib import Path
import torch
import model
from model.architectures.registry import load_model
from model.config import read_config
from model.weights import Checkpoint

torch.set_num_threads(1)
directory, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None

def private():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

def load():
    return load_model(read_config(directory), Checkpoint(directory), torch.bfloat16, torch.device("cpu"), kind)

before, peak, done = private(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, private())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
with torch.inference_mode():
    held = load()
done.set()
watcher.join()
print(peak - before, private() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.slow
def test_loading_takes_little_more_than_what_stays(tmp_path: Path) -> None:
    """Memory beside the file itself, which is mapped, is measured. A block of values has 8 MiB in float32.

    Freed memory goes back at once, so that the measurement does not include memory that malloc keeps.
    """
    write_llama(tmp_path, hidden_size=768, intermediate_size=2304, num_hidden_layers=8, dtype="bfloat16")
    peaks = {}
    for kind in ([], ["int8"]):
        command = [sys.executable, "-c", PEAK, str(tmp_path), *kind]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
        peaks[bool(kind)] = [int(number) for number in done.stdout.split()]
    size = weight_bytes(read_config(tmp_path), "bfloat16", "int8")
    assert peaks[True][0] < size + 4 * 2**23
    assert peaks[True][0] < peaks[False][0]


# Around it.


def test_a_kind_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="--quantization is 'int3', must be int8 or int4, or unset"):
        ModelSettings(quantization="int3")


def test_values_of_the_checkpoint_are_still_verified(tiny: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny, tmp_path / "single"))
    edit(directory, lambda tensors: tensors[DOWN].view(-1)[:3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"{re.escape(DOWN)} in .* has 3 of 6144 values"):
        load_it(directory, verify_weights=True, quantization="int8")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_of_the_files_values_whatever_the_model_computes_in(
    dtype: torch.dtype, tiny: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "other")) / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    at = Tensors(Checkpoint(path.parent), torch.bfloat16, CPU, Int8Format())
    layer = at.linear(DOWN.removesuffix(".weight"), 96, 64)
    assert isinstance(layer, Int8Linear)
    values, scale = stated(tensors[DOWN].float().numpy())
    np.testing.assert_array_equal(layer.weights[0].numpy(), values)
    np.testing.assert_array_equal(layer.weights[1].numpy(), scale)


def test_what_is_asked_for_plainly_is_not_quantized(tiny: Path) -> None:
    at = Tensors(Checkpoint(tiny), torch.float32, CPU, Int8Format()).plain().under("model.layers.1.")
    assert isinstance(at.linear("mlp.down_proj", 96, 64), Linear)


def test_an_engine_in_this_process() -> None:
    from rpc.offline import LLM

    with LLM("demo", quantization="int8", kv_cache_memory=2**24) as llm:
        first, again = (
            llm.generate(["First Citizen:"], Sampling(0.0), Stopping(max_tokens=12))[0].token_ids for _ in range(2)
        )
    assert first == again
    assert len(first) == 12
