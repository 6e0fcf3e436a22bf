"""A step may want more logits than it has tokens: buffers before the output layer have room for them."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.architectures.registry import load_model
from model.config import read_config
from model.cpu.attention_backend import CpuAttention
from model.cpu.backend import CpuBackend
from model.cpu.decoder_calls import DecoderCalls
from model.cpu.kernels.program import Call
from model.weights import Checkpoint
from tests.model.families.cases import BY_NAME
from tests.model.families.checkpoints import write
from tests.model.weight_formats.compressed import compress
from tests.model.weight_formats.recipes import INT8
from tests.model.weight_formats.test_groups import linears
from tests.support.kernels import the_machine

CPU = torch.device("cpu")
MANY = 64


def test_rows_of_the_output_layer_are_rounded_into_as_many(tmp_path: Path) -> None:
    """W8A8, the output layer too."""
    source = write(BY_NAME["llama-biases"], tmp_path)
    stored, plain = (Path(shutil.copytree(source, tmp_path / name)) for name in ("stored", "plain"))
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    compress(stored, plain, [*linears(source), "lm_head.weight"], [replace(INT8, inputs=inputs)], ignore=[])
    config, kernels = read_config(stored), the_machine()
    maker = CpuBackend(kernels, "float32", "float32").maker
    decoder = load_model(config, Checkpoint(stored), torch.float32, CPU, maker=maker)
    layout = config.kv_layout(16, "float32")
    attention = CpuAttention(kernels, layout, 4, config.heads, "float32", config.scale, config.soft_cap, None)
    calls = DecoderCalls(decoder, attention, tokens=1, wanted=MANY).written().rest
    rounded = [call for call in calls if isinstance(call, Call) and call.name.startswith("rounded_rows")]
    assert len(rounded) == 4 * config.layers + 1
    given, made = [one for one in rounded[-1].arguments if isinstance(one, Tensor)]
    assert len(given) == MANY <= len(made)
