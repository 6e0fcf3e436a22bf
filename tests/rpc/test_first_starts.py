"""The first starts of engines: those that serve do not wait for others, and a failure of all is reported."""

import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.engines import supervisor as module
from rpc.engines.process import EngineStartError
from rpc.engines.supervisor import Supervisor
from tests.rpc.test_supervisor import FAILURES, Rig
from tests.support.hosts import FakeHost
from tests.support.links import eventually


@pytest.mark.parametrize("failure", FAILURES[:3])
async def test_the_first_engine_that_does_not_start_is_the_callers_to_hear(
    tokenizer: Tokenizer, failure: Exception
) -> None:
    rig = Rig(tokenizer, [failure])
    with pytest.raises(type(failure), match=str(failure)):
        await rig.supervisor.start()
    await rig.end()
    assert (rig.host.launches, rig.host.stops) == (1, 1)
    assert rig.value("quire_engine_starts_total") == 0
    assert not rig.frontend.health()


async def test_a_start_that_fails_leaves_no_launch_under_way(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    failing, slow = FakeHost([ValueError("no such model")]), FakeHost()
    slow.gate.clear()
    supervisor = Supervisor([failing, slow], rig.frontend)
    with pytest.raises(ValueError, match="no such model"):
        await supervisor.start()
    assert slow.cancelled == 1
    await supervisor.stop()


async def test_engines_serve_beside_one_that_does_not_start_and_is_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 0.0)
    rig = Rig(tokenizer)
    lost = [EngineStartError("GPU 0 is lost"), TimeoutError("its process does not end"), OSError("no fork")]
    broken, fine = FakeHost(lost), FakeHost()
    supervisor = Supervisor([broken, fine], rig.frontend)
    await supervisor.start()
    assert rig.frontend.health()
    assert supervisor.count == 2, "one of them waits for its start"
    await eventually(lambda: len(broken.engines) == 1)
    await eventually(lambda: sum(replica.usable for replica in rig.frontend.replicas) == 2)
    assert (broken.launches, fine.launches) == (4, 1)
    broken.engines[0].die("RuntimeError: device lost")
    await eventually(lambda: len(broken.engines) == 2)
    await supervisor.stop()
    assert broken.trouble == fine.trouble == []


@pytest.mark.parametrize("comes", [True, False])
async def test_engines_serve_beside_one_that_hangs_as_it_starts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(module, "LEAST_GRACE", 0.0)
    rig = Rig(tokenizer)
    hanging, fine = FakeHost(), FakeHost()
    hanging.gate.clear()
    supervisor = Supervisor([hanging, fine], rig.frontend)
    await supervisor.start()
    assert rig.frontend.health()
    assert supervisor.count == 2, "one of them is still started"
    if comes:
        hanging.gate.set()
        await eventually(lambda: sum(replica.usable for replica in rig.frontend.replicas) == 2)
        hanging.engines[0].die("RuntimeError: device lost")
        await eventually(lambda: len(hanging.engines) == 2)
    await supervisor.stop()
    assert hanging.cancelled == (not comes)
    assert hanging.trouble == fine.trouble == []


async def test_where_no_engine_starts_the_first_ones_reason_is_told(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    hosts = [FakeHost([EngineStartError(f"no memory {number}")]) for number in range(3)]
    supervisor = Supervisor(hosts, rig.frontend)
    with pytest.raises(EngineStartError, match="no memory 0"):
        await supervisor.start()
    assert not supervisor.keeping
    await supervisor.stop()
