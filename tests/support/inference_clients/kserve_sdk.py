"""kserve's InferenceGRPCClient: python kserve_sdk.py ADDRESS MODEL"""

import asyncio
import json
import logging
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

SAMPLING = {"temperature": "0.75", "seed": "7", "max_tokens": "12", "ignore_eos": "true"}


def request(model, raw, **sampling):
    """raw: its elements are in raw_input_contents, and those of the answer shall be."""
    text = InferInput("text_input", [1], "BYTES", None if raw else [b"ROMEO:"])
    count = InferInput("return_num_output_tokens", [1], "BOOL", None if raw else [True])
    if raw:
        text.set_data_from_numpy(np.array([b"ROMEO:"], object))
        count.set_data_from_numpy(np.array([True], bool))
    return InferRequest(model, [text, count], parameters=SAMPLING | sampling, request_id="mine")


async def main(address, model):
    logging.disable()
    async with InferenceGRPCClient(address) as client:
        answers = {}
        for kind in ("raw", "typed"):
            answer = await client.infer(request(model, kind == "raw"))
            text, count = answer.get_output_by_name("text_output"), answer.get_output_by_name("num_output_tokens")
            answers[kind] = [answer.id, text.as_numpy().tolist()[0], count.as_numpy().tolist()]
        try:
            await client.infer(request(model, raw=True, top_p="0"))
        except grpc.RpcError as error:
            answers["refused"] = [error.code().name, error.details()]
        answers["live"] = [await client.is_server_live(), await client.is_server_ready()]
        answers["ready"] = [await client.is_model_ready(model), await client.is_model_ready("nobody")]
        print(json.dumps(answers, default=bytes.decode))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
