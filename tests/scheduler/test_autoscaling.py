"""The number of replicas: enough soon, no more than allowed, and no back and forth."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.autoscaling import Autoscaler, Decision, EngineLoad
from scheduler.scaling_settings import ScalingSettings
from tests.support.examples import examples

SETTINGS = ScalingSettings(replicas=8, queue=2.0, use=0.9, up=5.0, down=60.0)


class World:
    """Replicas that take `boot` seconds to come; `load` returns the load at a time with a number of serving ones."""

    def __init__(
        self,
        load: Callable[[float, int], EngineLoad],
        settings: ScalingSettings = SETTINGS,
        least: int = 1,
        boot: int = 10,
    ) -> None:
        self.autoscaler, self._load, self._boot = Autoscaler(settings, least), load, boot
        self.serving, self.coming = least, list[int]()
        self.served = list[int]()
        self.history = list[int]()
        """Replicas that serve or come, second by second."""

    def run(self, seconds: int) -> list[int]:
        for now in range(len(self.history), len(self.history) + seconds):
            self.serving += sum(at <= now for at in self.coming)
            self.coming = [at for at in self.coming if at > now]
            self.served.append(self.serving)
            load = self._load(now, self.serving)
            seen = EngineLoad(float(now), self.serving, len(self.coming), load.backlog, load.use, load.late)
            wanted = self.autoscaler.decide(seen).replicas
            there = self.serving + len(self.coming)
            self.coming += [now + self._boot] * (wanted - there)
            for _ in range(there - wanted):
                if self.coming:
                    self.coming.pop()
                else:
                    self.serving -= 1
            self.history.append(self.serving + len(self.coming))
        return self.history


def work(replicas: float) -> Callable[[float, int], EngineLoad]:
    """As much as fills the pages of this number of replicas to the target."""
    return lambda now, serving: EngineLoad(now, serving, use=min(1.0, 0.9 * replicas / serving))


def test_without_work_nothing_changes() -> None:
    assert set(World(work(0), least=2).run(1000)) == {2}


def test_there_are_as_many_as_the_work_needs_and_then_no_other() -> None:
    world = World(work(4.5))
    history = world.run(400)
    assert history[-1] == 5
    assert history == sorted(history), "none was ended meanwhile"
    assert history[5] == 2, "after five seconds of need"
    assert set(history[200:]) == {5}


def test_a_peak_that_passes_starts_none() -> None:
    peak = World(lambda now, serving: EngineLoad(now, serving, backlog=50.0 if now % 7 < 4 else 0.0))
    assert set(peak.run(500)) == {1}


def test_they_are_ended_one_by_one_when_fewer_suffice_for_long() -> None:
    world = World(lambda now, serving: work(6 if now < 200 else 1.5)(now, serving))
    history = world.run(700)
    assert max(history) == 6
    changes = [(now, history[now] - history[now - 1]) for now in range(200, 700) if history[now] != history[now - 1]]
    assert [change for _, change in changes] == [-1] * 4
    times = [now for now, _ in changes]
    assert times[0] >= 260
    assert all(after - before >= 60 for before, after in itertools.pairwise(times))
    assert history[-1] == 2


def test_work_that_comes_back_within_the_delay_keeps_them() -> None:
    history = World(lambda now, serving: work(4 if now % 50 < 25 else 0)(now, serving)).run(1000)
    assert set(history[100:]) == {4}


def test_looks_may_be_late() -> None:
    autoscaler, there = Autoscaler(ScalingSettings(replicas=2, up=2.0, down=3.0), 1), [1]
    for look in range(12):
        busy = 0.95 if look < 4 else 0.1
        there.append(autoscaler.decide(EngineLoad(1.003 * look, there[-1], use=busy)).replicas)
    assert there == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]


def test_what_is_on_its_way_is_not_started_again() -> None:
    world = World(lambda now, serving: EngineLoad(now, serving, backlog=4.0 * serving), boot=100)
    assert set(world.run(100)[6:]) == {2}, "twice as many are wanted, and have been asked for"


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (EngineLoad(0.0, 2, backlog=12.0), "6.0 s of work wait for each"),
        (EngineLoad(0.0, 2, use=0.95), "95% of pages or rows are in use"),
        (EngineLoad(0.0, 2, late=0.25), "25% of answers are late"),
    ],
)
def test_each_goal_counts_and_says_so(load: EngineLoad, why: str) -> None:
    autoscaler = Autoscaler(ScalingSettings(replicas=8, up=0.0), 1)
    decision = autoscaler.decide(load)
    assert decision.replicas > 2
    assert decision.why == why
    assert Autoscaler(ScalingSettings(), 2).decide(load) == Decision(2), "without --max-replicas"


def decided(load: EngineLoad, **goals: float) -> int:
    """Replicas that the first look at this asks for."""
    return Autoscaler(ScalingSettings(replicas=8, up=0.0, **goals), 1).decide(load).replicas  # type: ignore[arg-type]


def test_a_load_that_meets_its_goal_starts_none_though_floats_are_rounded() -> None:
    each = 0.1
    backlog = each + each + each
    assert backlog / 3 / each > 1, "by one unit in the last place"
    assert decided(EngineLoad(0.0, 3, backlog=backlog), queue=each) == 3
    assert decided(EngineLoad(0.0, 3, backlog=1.01 * backlog), queue=each) == 4


def test_however_much_there_is_to_do_one_look_doubles_them_at_most() -> None:
    for serving in (1, 2, 3):
        assert decided(EngineLoad(0.0, serving, backlog=1e6)) == 2 * serving


def test_none_that_serves_counts_as_one() -> None:
    """The first one is on its way: what waits for it is no reason for two."""
    assert decided(EngineLoad(0.0, 0, starting=1, late=0.09)) == 1
    assert decided(EngineLoad(0.0, 0, starting=1, late=0.5)) == 2


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=150),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 20),
)
def test_limits_and_times_hold_whatever_comes(
    loads: list[tuple[float, float, float]], least: int, up: int, boot: int
) -> None:
    chosen = ScalingSettings(replicas=5, up=float(up), down=20.0)
    world = World(lambda now, serving: EngineLoad(now, serving, 0, *loads[int(now)]), chosen, least, boot)
    history = world.run(len(loads))
    assert all(least <= n <= 5 for n in history)
    downs = [now for now in range(1, len(history)) if history[now] < history[now - 1]]
    assert all(history[now] == history[now - 1] - 1 for now in downs)
    assert all(after - before >= 20 for before, after in itertools.pairwise(downs))
    for now in range(1, len(history)):
        if history[now] > history[now - 1]:
            span = range(now - up, now + 1)
            assert span.start >= 0, "it has looked for long enough"
            pressed = [max(loads[t][0] / world.served[t] / 2, loads[t][1] / 0.9, loads[t][2] / 0.1) for t in span]
            assert min(pressed) > 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use": 1.5}, "--scale-use is 1.5"),
        ({"queue": 0.0}, "--scale-queue is 0.0"),
        ({"ttft": -1.0}, "--scale-ttft is -1.0"),
        ({"down": -1.0}, "--scale-down-delay is -1.0"),
    ],
)
def test_values_that_are_none(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingSettings(**values)  # type: ignore[arg-type]
