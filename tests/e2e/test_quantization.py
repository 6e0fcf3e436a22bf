"""`--quantization int8` reaches the engine wherever it runs: servers, a batch job and `LLM` give the same logprobs."""

import json
from pathlib import Path

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.offline import LLM
from scheduler.parameters import Output, Sampling, Stopping
from tests.support.server import quire, running_server

PROMPT = "First Citizen:\nBefore we proceed"
TOKENS = 12


@pytest.fixture(scope="module")
def offline() -> dict[str | None, list[float]]:
    """Logprobs of the greedy tokens, without and with."""
    found: dict[str | None, list[float]] = {}
    for kind in (None, "int8"):
        with LLM("demo", quantization=kind, kv_cache_memory=2**24) as llm:
            stopping = Stopping(max_tokens=TOKENS, ignore_eos=True)
            (done,) = llm.generate([PROMPT], Sampling(0.0), stopping, Output(logprobs=True))
        found[kind] = [chosen.logprob for chosen, *_ in done.logprobs]
    assert found[None] != found["int8"]
    return found


@pytest.mark.parametrize(
    "place", [["--engine", "thread"], ["--engine", "process"], pytest.param(["--ray"], marks=pytest.mark.slow)]
)
@pytest.mark.sample(2)
def test_serve(place: list[str], offline: dict[str | None, list[float]]) -> None:
    with running_server("--quantization", "int8", *place) as server, grpc.insecure_channel(server.address) as channel:
        spec = pb.GenerationSpec(
            text=PROMPT,
            sampling=pb.SamplingParameters(temperature=0.0),
            stopping=pb.StoppingCriteria(max_tokens=TOKENS, ignore_eos=True),
            output=pb.OutputOptions(logprobs=True),
        )
        answer = server.stub(channel).Generate(pb.GenerateRequest(spec=spec), timeout=60)
        assert [position.tokens[0].logprob for position in answer.sequences[0].logprobs] == offline["int8"]
        generated = quire("generate", PROMPT, "--server", server.address, "--temperature", "0", "--max-tokens", "12")
        assert generated.returncode == 0, generated.stderr


def test_batch(tmp_path: Path, offline: dict[str | None, list[float]]) -> None:
    line = {
        "prompt": PROMPT,
        "sampling": {"temperature": 0.0},
        "stopping": {"max_tokens": TOKENS, "ignore_eos": True},
        "output": {"logprobs": True},
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    flags = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    done = quire("batch", *flags, QUIRE_QUANTIZATION="int8")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert [position[0]["logprob"] for position in result["logprobs"]] == offline["int8"]


def test_a_kind_that_there_is_not() -> None:
    refused = quire("serve", "--quantization", "awq")
    assert refused.returncode == 1
    assert "--quantization is 'awq', must be int8 or int4, or unset" in refused.stderr
    assert "--quantization is 'awq'" in quire("estimate", "--quantization", "awq").stderr
