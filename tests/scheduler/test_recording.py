"""A recording replays to the same plans, and has neither tokens nor texts."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import ImageSpan, Scope
from cache_manager.layout import KVLayout, KVShape, LayerGroup
from cache_manager.states import RecurrentLayer
from scheduler.blueprint import Blueprint
from scheduler.controls import LogitsParams
from scheduler.events import KVSource, Logprobs, Ready, Submit
from scheduler.parameters import Beam
from scheduler.recording import VERSION, RecordedScheduler, Recorder, RecordingEnd
from scheduler.replaying import PlanDifference, Recording, RecordingError, Replay
from scheduler.request import Request
from scheduler.settings import SCHEDULING_POLICIES, RecordSettings, SchedulerSettings
from scheduler.stand_ins import FIRST_PAGE, StandIns
from scheduler.step import StepResult
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.recorded import (
    KEY,
    Lines,
    RecordedDriver,
    blueprint_of,
    changed,
    driven,
    played,
    recorder_of,
    with_drafts,
)
from tests.scheduler.workloads import PATIENT, Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.swaps import always_swap

few = settings(max_examples=examples(60), deadline=None)


def check_replays(lines: list[str]) -> Replay:
    replay = Replay(Recording.parse(lines))
    assert replay.run() is None
    assert replay.steps == sum('"plan"' in line for line in lines)
    return replay


@few
@given(workloads(cancels=True, queue_timeout=True, faults=True, resets=True))
def test_a_recording_replays(workload: Workload) -> None:
    lines = driven(workload)
    replay = check_replays(lines)
    assert replay.requests == len(workload.arrivals)
    assert not replay.scheduler.has_work


@few
@given(workloads(cancels=True, resumed=True, alike=True))
def test_so_does_one_of_prompts_that_start_alike_and_go_on_elsewhere(workload: Workload) -> None:
    check_replays(driven(workload))


@few
@given(workloads(resumed=True), st.integers(1, 40), st.sampled_from([0.0, 0.5]))
def test_so_does_one_with_a_host_tier(workload: Workload, slots: int, spoils: float) -> None:
    lines = played(workload, slots=slots, spoils=spoils)
    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        check_replays(lines)


@few
@given(workloads(several=True, cancels=True, resumed=True, faults=True), st.booleans())
def test_so_does_one_of_several_sequences_and_with_tokens_of_searches(workload: Workload, tokens: bool) -> None:
    lines = driven(workload, tokens)
    check_replays(lines)
    searches = any(arrival.request.beam is not None for arrival in workload.arrivals)
    assert bool(Recording.parse(lines).ended) == (searches and not tokens)


@few
@given(workloads(cancels=True, resumed=True), st.sampled_from(SCHEDULING_POLICIES))
def test_so_does_one_of_several_tenants_under_each_policy(workload: Workload, policy: str) -> None:
    come = tuple(map(of_a_tenant, workload.arrivals))
    chosen = replace(workload.settings, policy=policy, tenant_weights="acme=3,default=0.5", priority_ageing=2.0)
    lines = played(replace(workload, arrivals=come, settings=chosen))
    check_replays(lines)
    assert "acme" not in "".join(lines)


def of_a_tenant(arrival: Arrival) -> Arrival:
    """Returns an arrival of one of three tenants, with one of five priorities."""
    request, number = arrival.request, arrival.attempt
    scope = replace(request.scope, tenant=("acme", "default", "other")[number % 3])
    return replace(arrival, request=replace(request, scope=scope, priority=number % 5 - 2))


@few
@given(workloads(cancels=True, resumed=True), st.floats(0.001, 3.0))
def test_so_does_one_whose_budget_is_learned_from_its_times(workload: Workload, target: float) -> None:
    check_replays(played(replace(workload, settings=replace(workload.settings, target_itl=target))))


@few
@given(workloads(cancels=True), st.integers(1, 5))
def test_so_does_one_with_drafts_and_tokens(workload: Workload, drafts: int) -> None:
    check_replays(played(with_drafts(workload, drafts), tokens=True))


@few
@given(workloads(several=True, cancels=True, resumed=True), st.integers(1, 6), st.booleans())
def test_so_does_one_with_jumps(workload: Workload, jumps: int, tokens: bool) -> None:
    check_replays(played(workload, tokens, jumps=jumps))


@few
@given(workloads(cancels=True, alike=True), st.integers(1, 6))
def test_so_does_one_with_jumps_of_prompts_that_start_alike(workload: Workload, jumps: int) -> None:
    check_replays(played(workload, jumps=jumps))


def conversation(prompt: int = 9) -> Workload:
    """Three requests, the later ones with the first one's prompt and output, in a pool that two of them fill."""
    first = Arrival(1, 0, make_request(1, prompt, 12))
    known = tuple(first.request.prompt.tolist()) + tuple(first.output)
    later = [Arrival(n, 20 + 3 * n, make_request(n, known[: prompt + 4 + 4 * n], 12)) for n in (2, 3)]
    layout = make_layout(4)
    rows = SchedulerSettings(max_batched_tokens=8, max_sequences=3)
    return Workload((first, *later), layout, 13, rows)


def test_pages_of_output_are_found_by_later_prompts() -> None:
    """Stand-ins of drawn tokens are those of the same pages in prompts."""
    drive = RecordedDriver(conversation()).run()
    replay = check_replays(drive.lines)
    assert replay.scheduler.stats().prefix_hits == drive.stats.prefix_hits > 9


@pytest.mark.parametrize("prompt", range(5, 13))
def test_so_are_pages_that_end_with_a_token_behind_a_draw(prompt: int) -> None:
    assert check_replays(played(conversation(prompt), jumps=5)).scheduler.stats().prefix_hits > 9


def numbers_of(value: Any) -> Iterator[int]:
    """Yields all whole numbers in an object of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers_of(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def with_large_tokens(workload: Workload, first: int) -> list[str]:
    """Records a workload whose prompts and draws have `first` added to each token. No plan depends on it."""
    lines, blueprint = list[str](), blueprint_of(workload)
    recorder = recorder_of(blueprint, lines, tokens=False)
    scheduler = RecordedScheduler(blueprint, blueprint.cache(), workload.hasher, recorder)
    in_flight = FakeExecutor(workload.layout, workload.pages, workload.settings)
    for turn in range(80):
        events = [
            replace(one, request=replace(one.request, prompt=one.request.prompt + first))
            for one in workload.events(turn)
            if isinstance(one, Submit)
        ]
        plan = scheduler.schedule(float(turn), events)
        if plan is not None:
            joins = tuple(replace(join, tokens=join.tokens - first) for join in plan.joins)
            in_flight.launch(replace(plan, joins=joins))
            result = in_flight.collect()
            scheduler.commit(replace(result, tokens=result.tokens + first), float(turn))
    assert not recorder.ended
    return lines


def test_no_token_is_in_a_recording() -> None:
    """Tokens of another size give the same lines, but for stand-ins; and none of these numbers is in them."""
    first = 1_234_567
    small, large = driven(conversation()), with_large_tokens(conversation(), first)
    check_replays(large)
    found = {number for line in large for number in numbers_of(json.loads(line))}
    assert found.isdisjoint(range(first, first + 20))
    pages = {number for number in found if number >= FIRST_PAGE}
    assert len(pages) > 5
    assert pages.isdisjoint(number for line in small for number in numbers_of(json.loads(line)))
    assert [plan_of(line) for line in small if plan_of(line)] == [plan_of(line) for line in large if plan_of(line)]


def plan_of(line: str) -> Any:
    return json.loads(line).get("plan")


def test_another_key_gives_other_stand_ins() -> None:
    chains = [StandIns(bytes([n]) * 32, 4, prefix_cache=True) for n in (1, 2)]
    one, other = (each.submit(Submit(1, make_request(1, 12)))["pages"] for each in chains)
    assert len(one) == len(other) == 3
    assert not set(one) & set(other)


SECRETS = ("acme", "pepper", "a grammar", "an argument", "a fault", "10.0.0.1", "proof")


def test_no_text_is_in_a_recording() -> None:
    params = LogitsParams(processors_args=(("p", "an argument"),), grammar="a grammar", grammar_salt="acme")
    request = make_request(1, 6, scope=Scope("acme", "pepper", images=(ImageSpan(0, 2, b"digest"),)))
    request = replace(request, controls=replace(request.controls, logits_params=params))
    workload = Workload((), make_layout(4), 8, SchedulerSettings(8, 2))
    lines, blueprint = list[str](), blueprint_of(workload)
    recorder = recorder_of(blueprint, lines, tokens=False)
    scheduler = RecordedScheduler(blueprint, blueprint.cache(), workload.hasher, recorder)
    scheduler.schedule(0.0, [Submit(1, request, source=KVSource("10.0.0.1", "proof"))])
    scheduler.schedule(1.0, [Ready(1, "a fault"), Submit(2, make_request(2))])
    none = Logprobs.none()
    scheduler.commit(StepResult(0, np.full(1, -1, np.int32), none, ((0, "a fault"),)), 2.0)
    assert len(lines) == 4
    assert not [text for text in SECRETS if text in "".join(lines)]
    check_replays(lines)


# What a recording shows


def contended() -> Workload:
    """Requests of two tenants that come at once for two rows; that of the second tenant is the longest, and last."""
    come = [
        Arrival(n, 0, make_request(n, 4 + 2 * (tenant == "b"), 4, scope=Scope(tenant)))
        for n, tenant in enumerate("aaab", 1)
    ]
    return Workload(tuple(come), make_layout(4), 16, SchedulerSettings(16, 2))


def test_another_policy_is_shown_at_its_first_decision() -> None:
    lines = played(contended())

    def change(header: dict[str, Any]) -> None:
        header["blueprint"]["settings"]["policy"] = "first-come"

    assert Replay(changed(lines, lambda header: None)).run() is None
    found = Replay(changed(lines, change)).run()
    assert found is not None
    assert (found.step, found.name) == (0, "joins")
    lengths = [[join[1] for join in joins] for joins in (found.recorded, found.replayed)]
    assert lengths == [[4, 6], [4, 4]], "the tenants share the rows, or the first two requests have them"


def test_a_request_that_is_left_out_is_shown_in_its_step() -> None:
    lines = driven(conversation())
    number = next(i for i, line in enumerate(lines) if '"submit":2' in line)
    call = json.loads(lines[number])
    step = call["plan"]["step"]
    del call["events"]
    found = Replay(Recording.parse([*lines[:number], json.dumps(call) + "\n", *lines[number + 1 :]])).run()
    assert found is not None
    assert (found.step, found.name, found.replayed) == (step, "plan", None)


def test_a_changed_number_is_shown_with_both_values() -> None:
    lines = played(contended())
    number = next(i for i, line in enumerate(lines) if '"plan"' in line)
    call = json.loads(lines[number])
    before = call["plan"]["slices"]
    call["plan"]["slices"] = [[0, 0, 3]]
    found = Replay(Recording.parse([*lines[:number], json.dumps(call) + "\n"])).run()
    assert found == PlanDifference(0, "slices", [[0, 0, 3]], before)


def test_a_recording_ends_where_a_part_gets_no_snapshot_in_twice_its_time() -> None:
    drive = RecordedDriver(conversation(), steps=5, snapshots=False)
    drive.run()
    first, second = map(Recording.parse, drive.recorded.parts)
    assert second.ended == "a replay of its last part takes longer than the part"
    counts = [sum("schedule" in call for _, call in part.calls()) for part in (first, second)]
    assert counts == [5, 10]
    assert Replay(first.joined(second)).run() is None
    with pytest.raises(RecordingError, match="it is part 2 of a recording and has no snapshot"):
        Replay(second)
    with pytest.raises(RecordingError, match="not two parts of one recording, one after the other"):
        second.joined(first)


def test_a_recording_has_one_end() -> None:
    """No part can begin, and the same call has a beam search."""

    class NoParts(Lines):
        def begin_part(self, header: str) -> bool:
            raise RecordingEnd("a reason")

    lines, workload = NoParts([]), contended()
    recorder = Recorder(blueprint_of(workload), RecordSettings("file", 1), KEY, lines)
    beam = Submit(9, replace(make_request(9, 4, 4), beam=Beam(2, 1.0)))
    rows = blueprint_of(workload).scheduler(blueprint_of(workload).cache(), None).rows
    recorder.scheduled(0.0, [], None, rows, None)
    recorder.scheduled(1.0, [beam], None, rows, None)
    assert recorder.ended == "a reason"
    assert [line for line in lines.current if "ended" in line] == ['{"ended":"a reason"}\n']


def test_a_line_that_was_cut_off_is_left_out() -> None:
    lines = played(contended())
    whole = Recording.parse(lines)
    cut = Recording.parse([*lines[:-1], lines[-1][:-1]])
    assert cut.lines == whole.lines[:-1]
    assert Replay(cut).run() is None


def test_an_exception_of_the_scheduler_is_recorded_and_raised_again() -> None:
    workload, lines = contended(), list[str]()
    blueprint = blueprint_of(workload)
    scheduler = RecordedScheduler(
        blueprint, blueprint.cache(), workload.hasher, recorder_of(blueprint, lines, tokens=False)
    )
    scheduler.schedule(0.0, workload.events(0))
    with pytest.raises(RuntimeError, match="step 5 was collected"):
        scheduler.commit(StepResult(5, np.zeros(1, np.int32), Logprobs.none()), 1.0)
    assert '"raised":"RuntimeError"' in lines[-1]
    again = Replay(Recording.parse(lines))
    assert again.run() is None
    assert "step 5 was collected" in str(again.raised)
    without = lines[-1].replace(',"raised":"RuntimeError"', "")
    other = Replay(Recording.parse([*lines[:-1], without]))
    assert other.run() == PlanDifference(1, "raised", None, "RuntimeError")
    assert other.raised is None, "it is no exception of the recording"


def test_a_recorder_that_fails_ends_and_disturbs_nobody() -> None:
    class Full(Lines):
        def write(self, line: str) -> None:
            if len(self.current) > 3:
                raise OSError("No space left on device")
            super().write(line)

    workload = contended()
    blueprint = blueprint_of(workload)
    recorder = Recorder(blueprint, RecordSettings("file"), KEY, Full([]))
    scheduler = RecordedScheduler(blueprint, blueprint.cache(), workload.hasher, recorder)
    play(workload, scheduler, FakeExecutor(workload.layout, workload.pages, workload.settings))
    assert recorder.ended == "OSError: No space left on device"


HEADER = played(contended())[0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the first line has no"),
        (["{}\n"], "the first line has no"),
        (["[1]\n"], "line 1 is no JSON object"),
        (["a text\n"], "line 1 is no JSON object"),
        ([HEADER.replace(f'"version":{VERSION}', '"version":99')], "the first line has no"),
        ([HEADER.replace('"pages"', '"sides"')], "the settings are those of another version"),
        ([HEADER.replace('"max_sequences"', '"most"')], "the settings are those of another version"),
        ([HEADER, '{"commit": 1.0}\n', '{"schedule": []}\n'], "line 3 is no call of a scheduler"),
        ([HEADER, "nothing\n", '{"commit": 1.0}\n'], "line 2 is no JSON object"),
        ([HEADER, '{"schedule": 1, "events": [{"submit": 1}]}\n'], "line 2 is no call of a scheduler"),
        ([HEADER, '{"schedule": 1, "events": [{"ask": 1, "question": "why"}]}\n'], "line 2 is no call"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        Replay(Recording.parse(lines)).run()


def test_every_field_of_a_result_is_recorded_or_needless() -> None:
    """A new one has to be recorded, and replaced by stand-ins where it has tokens, or to be added here."""
    recorded = {"step", "tokens", "faults", "lost_pages", "swap_seconds", "images_encoded", "jumps"}
    reported_alone = {"logprobs", "prompt_parts", "packing_seconds"}  # of logprobs those that searches go by are kept
    assert {one.name for one in fields(StepResult)} == recorded | reported_alone


def test_every_field_of_a_submit_is_recorded_or_needless() -> None:
    recorded = {"attempt", "request", "emitted", "again", "isolated_steps", "transferred"}
    assert {one.name for one in fields(Submit)} == recorded | {"source"}
    of_request = {"prompt", "max_tokens", "stop_ids", "controls", "queue_timeout", "scope", "count", "beam", "priority"}
    assert {one.name for one in fields(Request)} == of_request | {"deadline", "images"}
    assert {one.name for one in fields(Scope)} == {"tenant", "salt", "public", "images", "bidirectional"}


@pytest.mark.parametrize(
    "settings",
    [SchedulerSettings(), SchedulerSettings(64, 8, 16, steps_in_flight=2, policy="first-come", draft_tokens=3)],
)
def test_a_blueprint_survives_as_json(settings: SchedulerSettings) -> None:
    shape = KVShape(2, 8, 4, latent=True)
    groups = (LayerGroup((0, 2), shape), LayerGroup((1, 3), shape, 32, chunked=True))
    layout = KVLayout(groups, 2, 16, 4, (RecurrentLayer(4, (64, 128)),))
    blueprint = Blueprint(settings, PATIENT, layout, 99, "reuse", 7, False, True)
    assert Blueprint.from_json(json.loads(json.dumps(blueprint.to_json()))) == blueprint
