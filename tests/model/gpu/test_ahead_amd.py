"""Kernels compiled for AMD's GPUs, which none of them has run on: products are of matrix cores, and a program's memory
is there. Tile sizes are those of an unknown device of NVIDIA's; where they spill is not judged yet.
"""

import pytest

from model.gpu import formats
from model.gpu.expert_weights import TILES
from model.gpu.group_product import INTEGERS
from model.gpu.tuning import tuning_for
from tests.model.gpu import test_ahead as kernels
from tests.model.gpu import test_ahead_cutoff as cutoff
from tests.model.gpu import test_ahead_mixtures as mixtures
from tests.model.gpu import test_ahead_recurrence as recurrence
from tests.model.gpu.ahead import Compiled

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("device", ["gfx942", "gfx950"])]


def check(made: Compiled, device: str, multiplies: bool = False) -> None:
    assert made.shared <= kernels.SHARED[device]
    assert ("v_mfma" in made.assembly) == multiplies


@pytest.mark.parametrize(("dim", "elements"), [(64, "half"), (128, "float32"), (128, "half"), (128, "eight")])
def test_attention(device: str, dim: int, elements: str) -> None:
    tuning = tuning_for("an unknown device", (8, 0), dim, elements)
    for sizes, divided, looped in ((tuning.few, True, True), (tuning.many, False, False), (tuning.shared, True, True)):
        made = kernels.attention(device, elements, dim, sizes, divided, looped)
        check(made, device, multiplies=True)
        assert made.spilled <= kernels.SPILLED
        assert made.spilled_in_loops <= (4 if (device, elements) == ("gfx950", "eight") else 0)


@pytest.mark.parametrize("elements", ["float32", "half"])
def test_latent_attention(device: str, elements: str) -> None:
    """DeepSeek's."""
    few = tuning_for("an unknown device", (8, 0), 512, elements).few
    check(kernels.attention(device, elements, 512, few, True, True, 16, rest=64), device, multiplies=True)


def test_wide_heads_do_not_fit_everywhere(device: str) -> None:
    """Heads of 512 elements with values of their own need 66,560 bytes in float32; gfx942 has 65,536."""
    few = tuning_for("an unknown device", (8, 0), 512, "float32").few
    made = kernels.attention(device, "float32", 512, few, True, True)
    assert (made.shared <= kernels.SHARED[device]) == (device == "gfx950")


def test_rows_and_pages(device: str) -> None:
    check(kernels.joining(device, 128), device)
    check(kernels.norms(device, 4096), device)
    check(kernels.rotation(device, 40, 64, True, 0), device)
    check(kernels.gates(device), device)
    for format_ in (formats.PLAIN, formats.INT8, kernels.float8(device)):
        check(kernels.writing(device, 8, 128, format_), device)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_groups(device: str, bits: int) -> None:
    check(kernels.groups(device, INTEGERS, 32, bits), device, multiplies=True)
    check(mixtures.product_with_groups(device, 64, INTEGERS, bits), device, multiplies=True)


def test_products_with_groups_of_fp8(device: str) -> None:
    check(kernels.groups(device, kernels.float8(device), 128, bits=8), device, multiplies=True)


def test_mixtures(device: str) -> None:
    for sizes in TILES:
        check(mixtures.product(device, sizes), device, multiplies=True)
    for made in (mixtures.choice(device, "deepseek-v3"), *mixtures.orders_and_sums(device)):
        check(made, device)


def test_sampler(device: str) -> None:
    for made in (*kernels.summaries(device), *kernels.draws(device), *cutoff.kernels(device)):
        check(made, device)


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_recurrence(device: str, name: str) -> None:
    check(recurrence.recurrence(device, *recurrence.SIZES[name]), device)
    check(recurrence.convolution(device, 8192, 4, False, True), device)
    check(recurrence.windows(device, 8192, 4), device)
