"""The prefix cache from outside: what clients are told, what the metrics page says, what a new engine knows."""

from collections.abc import Iterator

import grpc
import pytest
from quire.v1 import generation_service_pb2 as pb

from tests.support.processes import find
from tests.support.server import RunningServer, running_server, stream_request

PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 3
PAGE = 16


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running_server("--engine", request.param, "--poison-freed-pages", "--kv-cache-memory", "128MiB") as running:
        yield running


class Client:
    """Adds up what it is told."""

    def __init__(self, server: RunningServer, channel: grpc.Channel) -> None:
        self._stub = server.stub(channel)
        self.prompt_tokens = self.cached = 0

    def generate(self, prompt: str | list[int], salt: str = "", streaming: bool = False) -> tuple[list[int], pb.Usage]:
        """Output tokens and usage of a greedy request."""
        spec = stream_request(prompt, 40, temperature=0).spec
        spec.cache_salt = salt
        ids, usage, info = (self._stream if streaming else self._unary)(spec)
        assert info.cached_token_count == usage.cached_prompt_tokens
        assert info.token_count == usage.prompt_tokens
        self.prompt_tokens += usage.prompt_tokens
        self.cached += usage.cached_prompt_tokens
        return ids, usage

    def _unary(self, spec: pb.GenerationSpec) -> tuple[list[int], pb.Usage, pb.PromptInfo]:
        answer = self._stub.Generate(pb.GenerateRequest(spec=spec))
        return list(answer.sequences[0].token_ids), answer.usage, answer.prompt_info

    def _stream(self, spec: pb.GenerationSpec) -> tuple[list[int], pb.Usage, pb.PromptInfo]:
        messages = list(self._stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)))
        ids = [i for message in messages for delta in message.deltas for i in delta.token_ids]
        return ids, messages[-1].usage, messages[0].prompt_info


def test_evicted_pages_come_back_from_the_host() -> None:
    """A pool for one prompt, three prompts in turn, twice: the second time they are copied back, not computed.

    On the slow back end, since pages are copied back only while that is quicker than to compute them: with kernels the
    demo model is computed so fast that a moment's load decides it.
    """
    flags = ("--kv-cache-memory", "720KiB", "--host-cache-memory", "8MiB", "--poison-freed-pages")
    flags += ("--backend", "reference")
    with running_server(*flags) as server, grpc.insecure_channel(server.address) as channel:
        client = Client(server, channel)
        prompts = [f"{name}:\n{PROMPT}" for name in ("MENENIUS", "BRUTUS", "VOLUMNIA")]
        first = [client.generate(prompt)[0] for prompt in prompts]
        computed = server.metrics()["quire_computed_tokens_total"]
        again = [client.generate(prompt) for prompt in prompts]
        metrics = server.metrics()
    assert [ids for ids, _ in again] == first
    assert metrics["quire_kv_pages_swapped_in_total"] > 10
    assert metrics["quire_kv_pages_swapped_out_total"] >= metrics["quire_kv_host_pages_used"] > 10
    assert metrics["quire_kv_pages_swap_lost_total"] == 0
    assert metrics["quire_computed_tokens_total"] - computed < computed / 2


def whole_pages(tokens: int) -> int:
    """Returns the full pages of a sequence that came before; the last token is always computed."""
    return (tokens - 1) // PAGE * PAGE


def test_what_came_before_is_not_computed_again_and_says_so(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        client = Client(server, channel)
        before = server.metrics()
        first, usage = client.generate(PROMPT)
        length = usage.prompt_tokens
        assert (usage.cached_prompt_tokens, length > 5 * PAGE) == (0, True)
        for streaming in (False, True):
            again, usage = client.generate(PROMPT, streaming=streaming)
            assert (again, usage.cached_prompt_tokens) == (first, whole_pages(length))
        for salt, found in (("pepper", 0), ("pepper", whole_pages(length)), ("salt", 0), ("", whole_pages(length))):
            again, usage = client.generate(PROMPT, salt)
            assert (again, usage.cached_prompt_tokens) == (first, found)
        after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["quire_prefix_cache_queries_total"] == grown["quire_prompt_tokens_total"] == client.prompt_tokens
    assert grown["quire_prefix_cache_hits_total"] == grown["quire_prompt_tokens_cached_total"] == client.cached
    assert grown["quire_computed_tokens_total"] == client.prompt_tokens - client.cached + 7 * 39
    assert after["quire_kv_pages_cached"] >= 3 * (length // PAGE)
    assert after["quire_kv_ledger_imbalances_total"] == 0


def test_a_conversation_goes_on_from_its_output(server: RunningServer) -> None:
    prompt = list(range(100, 150))
    with grpc.insecure_channel(server.address) as channel:
        client = Client(server, channel)
        said, _ = client.generate(prompt)
        _, usage = client.generate([*prompt, *said, 7, 8, 9])
    assert usage.cached_prompt_tokens == whole_pages(50 + 40)


def test_a_new_engine_has_an_empty_cache_and_gives_the_same_tokens() -> None:
    with running_server("--engine", "process") as server, grpc.insecure_channel(server.address) as channel:
        client = Client(server, channel)
        first, usage = client.generate(PROMPT)
        found = whole_pages(usage.prompt_tokens)
        assert client.generate(PROMPT)[1].cached_prompt_tokens == found
        find(server.process.pid, "rpc.engines.engine_process").kill()
        server.wait_for_metric("quire_engine_starts_total", 2, 60)
        assert server.metrics()["quire_kv_pages_cached"] == 0
        again, usage = client.generate(PROMPT)
        assert (again, usage.cached_prompt_tokens) == (first, 0)
        again, usage = client.generate(PROMPT)
        assert (again, usage.cached_prompt_tokens) == (first, found)
        metrics = server.metrics()
        assert metrics["quire_prefix_cache_queries_total"] == client.prompt_tokens
        assert metrics["quire_prefix_cache_hits_total"] == client.cached == 2 * found
