"""The error of an actor whose engine does not start on its node."""

import threading
from types import SimpleNamespace

import pytest
import ray

from rpc.cluster import actor
from rpc.distribution import own_version
from rpc.settings import EngineConfig


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors are in this process, which outlives them."""
    monkeypatch.setattr(actor, "die_with_parent", lambda: None)
    monkeypatch.setattr(actor, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(actor, "time", SimpleNamespace(sleep=lambda _: threading.Event().wait()))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


@pytest.mark.usefixtures("here")
def test_another_version_is_named_with_the_node() -> None:
    engine = actor.EngineActor()
    assert engine.start("0.0.7", '{"what it says": "nobody here knows"}', "", "token", None, (), apart=False) == ""
    why = engine.wait()
    assert why.startswith("on node 127.0.0.1: Quire ")
    assert why.endswith("and the server's is 0.0.7: all nodes need the same")


@pytest.mark.usefixtures("here")
def test_a_model_that_a_node_lacks_is_named_with_the_node() -> None:
    config = EngineConfig().to_json().replace('"model": "demo"', '"model": "/models/of-another-machine"')
    engine = actor.EngineActor()
    assert engine.start(own_version(), config, "", "token", None, (), apart=False).startswith("127.0.0.1:")
    assert engine.wait() == "on node 127.0.0.1: --model /models/of-another-machine: no such directory"


@pytest.mark.usefixtures("here")
def test_a_follower_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor.threading.Timer, "start", lambda self: None)
    why = actor.FollowerActor().run("0.0.7", EngineConfig().to_json(), 1, 2, "127.0.0.1:1", b"token")
    assert "the server's is 0.0.7" in why
