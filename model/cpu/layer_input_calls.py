"""Writes inputs of each layer's own as calls of kernels for the CPU, see `model.layer_inputs`."""

from model.cpu.call_list import CallList
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.layer_inputs import write_input_gates, write_layer_inputs
from model.cpu.kernels.linear import activation_of
from model.cpu.known_parts import activation_name, kernel_of
from model.layer_inputs import InputGate, LayerInputs


def layer_inputs_calls(inputs: LayerInputs, to: CallList, stream: Buffer, made: Buffer) -> None:
    """Writes the calls that make the inputs of all layers.

    Args:
        inputs: What makes them.
        to: Gets the calls.
        stream: The first embeddings.
        made: The second embeddings, then the result, [tokens, layers x width] float32.
    """
    width, rounded = inputs.tokens.width, to.buffer("rounded", to.hidden)
    projected = to.buffer("projected embeddings", kernel_of(inputs.projection).columns, FLOAT)
    to.rounded(stream, rounded, to.hidden)
    to.linear(inputs.projection, rounded, projected)
    to.call(
        "layer_inputs", write_layer_inputs,
        to.cells.at("rows"), projected.tensor, projected.stride, made.tensor, made.stride, width // inputs.width,
        inputs.width, inputs.norm.weight.float(), inputs.projection_scale, inputs.norm.eps, inputs.factor,
    )  # fmt: skip


def input_gate_calls(gate: InputGate, to: CallList, stream: Buffer, inputs: Buffer) -> None:
    """Writes the calls that add to the stream what a layer makes of its own input.

    Args:
        gate: What makes it.
        to: Gets the calls.
        stream: The residual stream.
        inputs: The inputs of all layers.

    Raises:
        NotCompiled: There is no kernel for its activation.
    """
    rounded, width = to.buffer("rounded", to.hidden), kernel_of(gate.gate).outputs
    gates, gated = to.buffer("gates of inputs", kernel_of(gate.gate).columns, FLOAT), to.buffer("gated inputs", width)
    made, activation = to.buffer("made", to.hidden, FLOAT), activation_name(gate.activation)
    to.rounded(stream, rounded, to.hidden)
    to.linear(gate.gate, rounded, gates)
    to.call(
        f"input_gates_{activation}_{gated.element.name}", write_input_gates(activation_of(activation), gated.element),
        to.cells.at("rows"), gates.tensor, gates.stride, inputs.tensor[:, gate.layer * width :], inputs.stride,
        gated.tensor, gated.stride, width,
    )  # fmt: skip
    to.linear(gate.projection, gated, made)
    to.norm(gate.norm, made, stream, add=True)
