"""tritonclient.grpc.aio: python triton_aio.py ADDRESS MODEL"""

import asyncio
import json
import sys

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

SAMPLING = {"temperature": "0.75", "seed": "7", "max_tokens": "12", "ignore_eos": "true"}


def request(model, number, **sampling):
    """As the sample client of Triton's vLLM back end makes it: the parameters in a tensor and beside it."""
    text, stream = triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("stream", [1], "BOOL")
    given = triton.InferInput("sampling_parameters", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"ROMEO:"], object))
    stream.set_data_from_numpy(np.array([True], bool))
    given.set_data_from_numpy(np.array([json.dumps(SAMPLING | sampling).encode()], object))
    return {
        "model_name": model,
        "inputs": [text, stream, given],
        "outputs": [triton.InferRequestedOutput("text_output")],
        "request_id": str(number),
        "parameters": SAMPLING | sampling,
    }


async def texts(client, model):
    async def requests():
        for number in range(6):
            yield request(model, number, seed=str(number))

    came = {str(number): "" for number in range(6)}
    async for result, error in client.stream_infer(requests()):
        assert error is None, error
        came[result.get_response().id] += result.as_numpy("text_output")[0].decode()
    return came


async def cancelled(client, model):
    async def requests():
        for number in range(3):
            yield request(model, number, max_tokens="900")
        await asyncio.sleep(60)

    answers, answered = client.stream_infer(requests()), set()
    while len(answered) < 3:
        result, error = await anext(answers)
        assert error is None, error
        answered.add(result.get_response().id)
    return answers.cancel()


async def main(address, model):
    async with triton.InferenceServerClient(address) as client:
        try:
            await client.infer(model, request(model, 0, min_p="2")["inputs"])
            refused = None
        except InferenceServerException as error:
            refused = [error.status(), error.message()]
        print(json.dumps({
            "live": [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(model)],
            "whole": (await client.infer(model, request(model, 0)["inputs"])).as_numpy("text_output")[0].decode(),
            "streams": await texts(client, model),
            "cancelled": await cancelled(client, model),
            "refused": refused,
        }))  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
