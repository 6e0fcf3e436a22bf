"""Requests and tokens by tenant: whose they are, and how many label values there can be."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from model.inputs.tokenizer import Tokenizer
from rpc.access.tokens import TENANT, AccessTokens
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.observe.metrics import Metrics
from rpc.observe.tenants import MOST_TENANTS, OTHERS
from scheduler.events import EndReason
from scheduler.limits import ModelDefaults
from scheduler.spec import Spec
from tests.support.frontends import make_frontend, outputs
from tests.support.secrets import write


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"quire_tenant_{name}_total", {"model_name": "m", **labels})


def tokens(metrics: Metrics, tenant: str) -> list[float | None]:
    names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
    return [value(metrics, name, tenant=tenant) for name in names]


async def test_what_a_request_took_counts_for_its_tenant_when_it_ends(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    prompt = tuple(range(1, 41))
    async with frontend.open(Spec(prompt, tenant="ann"), "a", None) as ann:
        (first,) = engine.submitted()
        async with frontend.open(Spec(prompt[:30], tenant="bob"), "a", None):
            second = engine.submitted()[-1]
            engine.deliver(outputs([(first, 0, 70), (second, 0, 70)], starts=[first, second], cached=16))
            engine.deliver(outputs([(first, 1, 71)], [(first, EndReason.LENGTH)]))
            await ann.wait()
            assert tokens(metrics, "ann") == [None] * 3, "it has not ended"
    assert tokens(metrics, "ann") == [40, 16, 2]
    assert tokens(metrics, "bob") == [30, 16, 1]
    assert value(metrics, "requests", tenant="ann", outcome="length") == 1
    assert value(metrics, "requests", tenant="bob", outcome="cancelled") == 1


async def test_a_prompt_that_never_left_the_queue_is_not_billed(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec("cat", tenant="ann"), "a", None) as live:
        (attempt,) = engine.submitted()
        engine.deliver(outputs(ends=[(attempt, EndReason.QUEUE_FULL)]))
        await live.wait()
    assert tokens(metrics, "ann") == [0, 0, 0]
    assert value(metrics, "requests", tenant="ann", outcome="queue_full") == 1


async def test_refusals_count_for_who_was_refused(tokenizer: Tokenizer) -> None:
    frontend, _, metrics = make_frontend(tokenizer)
    async with frontend.open(Spec("cat", tenant="ann"), "twice", None):
        with pytest.raises(RequestFailed):
            async with frontend.open(Spec("cat", tenant="ann"), "twice", None):
                raise AssertionError("opened")
    with pytest.raises(RequestFailed):
        async with frontend.open(Spec("", tenant="bob"), "a", None):
            raise AssertionError("opened")
    frontend.accounting.turned_away(RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "no"), "b", "cat")
    with pytest.raises(asyncio.CancelledError), frontend.accounting.counting_cancel("dan"):
        raise asyncio.CancelledError
    ended = (("ann", "request_id_live"), ("ann", "cancelled"))
    counted = (*ended, ("bob", "invalid_field"), ("cat", "invalid_field"), ("dan", "cancelled"))
    for tenant, outcome in counted:
        assert value(metrics, "requests", tenant=tenant, outcome=outcome) == 1, tenant
        total = {"model_name": "m", "outcome": outcome}
        every = sum(one == outcome for _, one in counted)
        assert metrics.registry.get_sample_value("quire_requests_total", total) == every


async def test_a_refusal_before_the_first_engine_counts_for_its_tenant(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    frontend = Frontend(Preparer("m", tokenizer, ModelDefaults()), FrontendSettings(), metrics)
    with pytest.raises(RequestFailed):
        frontend.limits("ann")
    assert value(metrics, "requests", tenant="ann", outcome="starting") == 1


def test_an_outcome_that_is_none_counts_as_internal() -> None:
    metrics = Metrics("m")
    metrics.request_ended("what", "ann")
    assert value(metrics, "requests", tenant="ann", outcome="internal") == 1
    assert value(metrics, "requests", tenant="ann", outcome="what") is None


def test_tenants_of_the_file_are_shown_before_they_ask(tmp_path: Path) -> None:
    lines = "ann aaaaaaaaaaaaaaaaaaaa\nann bbbbbbbbbbbbbbbbbbbb\nops cccccccccccccccccccc operator\n"
    metrics, found = Metrics("m"), AccessTokens(Path(write(tmp_path / "tokens", lines.encode())))
    assert found.tenants == {"ann", "ops"}
    metrics.tenants.expect(found.tenants)
    for tenant in ("ann", "ops"):
        assert tokens(metrics, tenant) == [0, 0, 0]
        assert value(metrics, "requests", tenant=tenant, outcome="stop") == 0


def test_label_values_have_a_bound_however_often_the_file_changes() -> None:
    metrics = Metrics("m")
    for number in range(MOST_TENANTS + 5):
        metrics.request_ended("stop", f"tenant-{number}")
        metrics.tenants.tokens(f"tenant-{number}", 3, 2, 1)
    metrics.request_ended("stop", "tenant-0")
    assert tokens(metrics, OTHERS) == [15, 10, 5]
    assert value(metrics, "requests", tenant=OTHERS, outcome="stop") == 5
    assert value(metrics, "requests", tenant="tenant-0", outcome="stop") == 2
    page = generate_latest(metrics.registry).decode()
    assert page.count("quire_tenant_generation_tokens_total{") == MOST_TENANTS + 1
    assert not TENANT.fullmatch(OTHERS), "a tenant could have this name"
