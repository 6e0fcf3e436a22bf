"""tritonclient.grpc: python triton_sync.py ADDRESS MODEL"""

import json
import queue
import re
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

SAMPLING = {"temperature": "0.75", "seed": "7", "max_tokens": "12", "ignore_eos": "true"}


def tensor(name, value):
    kind = "BOOL" if isinstance(value, bool) else "BYTES"
    values = np.array([value if isinstance(value, bool) else value.encode()], bool if kind == "BOOL" else object)
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(values)
    return made


def prompt(text, sampling=SAMPLING, **flags):
    inputs = [tensor("text_input", text), tensor("sampling_parameters", json.dumps(sampling))]
    return inputs + [tensor(name, value) for name, value in flags.items()]


def shown(result):
    """Returns the elements of each output."""
    rows = {output.name: result.as_numpy(output.name).tolist() for output in result.get_response().outputs}
    return {name: [one.decode() if isinstance(one, bytes) else one for one in row] for name, row in rows.items()}


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return None


def streams(client, model):
    """Four requests at once on one stream, one of them bad: by id, what came."""
    told, came = queue.Queue(), {"one": [], "two": [], "three": [], "": [], "final": []}
    client.start_stream(lambda result, error: told.put((result, error)))
    flags = {"stream": True, "return_finish_reason": True, "return_num_output_tokens": True}
    client.async_stream_infer(model, prompt("ROMEO:", **flags), request_id="one", enable_empty_final_response=True)
    client.async_stream_infer(model, prompt("KING:", SAMPLING | {"n": 2}, **flags), request_id="two")
    client.async_stream_infer(model, prompt("ROMEO:", {"top_k": -2}, **flags), request_id="bad")
    whole = [tensor("text_input", "ROMEO:")]
    client.async_stream_infer(model, whole, request_id="three", parameters={"temperature": 0.0, "max_tokens": 4})
    while len(came["final"]) + len(came[""]) < 4:
        result, error = told.get(timeout=60)
        if error is not None:
            came[""].append(error.message())
            continue
        response = result.get_response()
        came[response.id].append(shown(result))
        if response.parameters["triton_final_response"].bool_param:
            came["final"].append(response.id)
    client.stop_stream()
    return came


def cancelled(client, model):
    """Whether a stream that was cancelled once each of its requests had an answer says so."""
    told = queue.Queue()
    client.start_stream(lambda result, error: told.put((result, error)))
    for i in range(3):
        client.async_stream_infer(
            model, prompt("KING:", SAMPLING | {"max_tokens": 900}, stream=True), request_id=str(i)
        )
    answered = set()
    while len(answered) < 3:
        result, error = told.get(timeout=60)
        assert error is None
        answered.add(result.get_response().id)
    client.stop_stream(cancel_requests=True)
    while True:
        _, error = told.get(timeout=60)
        if error is not None:
            return error.status()


def structured(client, model):
    """Checks texts under constraints, in the tensor and in the request's parameters, whole and streamed.

    Returns:
        The refusal of a constraint that is none.
    """
    pattern = {"structured_outputs": {"regex": "[a-c]{9}"}, "max_tokens": 40}
    choices = {"structured_outputs": json.dumps({"choice": ["yes", "no"]}), "max_tokens": 8, "n": 2}
    properties = {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "glad": {"type": "boolean"}}
    closed = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    parameters = {"structured_outputs": json.dumps({"json": closed}), "max_tokens": 400}
    short = {"exclude_input_in_output": True}
    alone = [tensor("text_input", "KING:"), tensor("exclude_input_in_output", True)]
    told, parts = queue.Queue(), []
    client.start_stream(lambda result, error: told.put((result, error)))
    client.async_stream_infer(model, prompt("KING:", pattern, stream=True), enable_empty_final_response=True)
    while True:
        result, error = told.get(timeout=60)
        assert error is None, error
        parts += shown(result)["text_output"]
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    texts = shown(client.infer(model, prompt("KING:", pattern, **short)))["text_output"]
    for text in (*texts, "".join(parts)):
        assert re.fullmatch("[a-c]{9}", text), text
    texts = shown(client.infer(model, prompt("KING:", choices, **short)))["text_output"]
    assert [text in ("yes", "no") for text in texts] == [True, True], texts
    (text,) = shown(client.infer(model, alone, parameters=parameters))["text_output"]
    answer = json.loads(text)
    assert [*answer] == [*properties], text
    assert 0 <= answer["age"] <= 150
    return refusal(lambda: client.infer(model, prompt("KING:", {"structured_outputs": {"regex": "(a"}})))


def main(address, model):
    with triton.InferenceServerClient(address) as client:
        config = client.get_model_config(model, as_json=True)["config"]
        flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
        asked = prompt("ROMEO:", SAMPLING | {"logprobs": 2}, **{f"return_{name}": True for name in flags})
        print(json.dumps({
            "live": [client.is_server_live(), client.is_server_ready()],
            "ready": [client.is_model_ready(model), client.is_model_ready(model, "1"), client.is_model_ready("nobody")],
            "metadata": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(model, as_json=True),
            "config": config,
            "whole": shown(client.infer(model, asked, request_id="mine")),
            "two": shown(client.infer(model, prompt("KING:", SAMPLING | {"n": "2"}, exclude_input_in_output=True))),
            "named": shown(client.infer(model, asked, outputs=[triton.InferRequestedOutput("num_output_tokens")])),
            "streams": streams(client, model),
            "cancelled": cancelled(client, model),
            "refused": [
                refusal(lambda: client.infer(model, prompt("ROMEO:", {"temperature": "hot"}))),
                refusal(lambda: client.infer("nobody", prompt("ROMEO:"))),
                refusal(lambda: client.infer(model, [])),
                refusal(client.get_model_repository_index),
                refusal(client.get_system_shared_memory_status),
            ],
            "statistics": client.get_inference_statistics(model, as_json=True)["model_stats"],
            "structured": structured(client, model),
        }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
