"""Replays a recording: runs its calls on a new scheduler, and compares the fingerprints of the plans."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from cache_manager.block_hash import BlockHash, BlockHasher, ImageSpan, Scope
from cache_manager.transfers import TransferredPage
from scheduler.blueprint import Blueprint
from scheduler.controls import Controls, LogitsParams
from scheduler.events import (
    Abort,
    AdminQuery,
    AdminQuestion,
    Event,
    Logprobs,
    Ready,
    StepOutputs,
    Submit,
)
from scheduler.parameters import Beam
from scheduler.recording import FORMAT, SNAPSHOT, VERSION, fingerprint, tenant_alias
from scheduler.request import Request
from scheduler.rows import sequences_of
from scheduler.scheduler import Scheduler
from scheduler.snapshot import Entry, SnapshotError, restored
from scheduler.stand_ins import drawn_tokens, submitted_tokens
from scheduler.step import StepPlan, StepResult

FULL = "a line is broken, as on a disk that was full"
REPLAY_SECRET = bytes(32)  # which hashes are equal does not depend on it


class RecordingError(ValueError):
    """Lines that are no recording of this version."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording that was read.

    Attributes:
        blueprint: Of its scheduler.
        tokens: Whether it has token ids.
        lines: Its lines in order, without the header: calls, and "" for each that is none. They stay text, which takes
            a fifth of the memory of their objects.
        ended: Why the recorder stopped before its engine; "" where it did not.
        name: Name that parts of one recording have in common.
        part: Its number among these.
        live: Attempts that were live as it began.
        snapshot: The scheduler as it began; None for a new one, or where the part has none yet.
    """

    blueprint: Blueprint
    tokens: bool
    lines: list[str]
    ended: str = ""
    name: str = ""
    part: int = 0
    live: tuple[int, ...] = ()
    snapshot: list[Entry] | None = None

    def calls(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the number of each line in the file, and the call. Raises RecordingError for a line that is none."""
        for number, line in enumerate(self.lines, 2):
            if line:
                yield number, _object(number, line)

    @property
    def attempts(self) -> list[int]:
        """Returns its attempts, in order. Raises RecordingError as `calls`."""
        calls = (_object(number, line) for number, line in enumerate(self.lines, 2) if '"submit"' in line)
        submitted = [event["submit"] for call in calls for event in call.get("events", ()) if "submit" in event]
        return [*self.live, *submitted]

    @property
    def replays(self) -> bool:
        """Whether it has the scheduler that it began with."""
        return not self.part or self.snapshot is not None

    def joined(self, later: "Recording") -> "Recording":
        """Returns this part and the next one as one recording. Raises RecordingError for another one."""
        if (later.name, later.part) != (self.name, self.part + 1):
            raise RecordingError("they are not two parts of one recording, one after the other")
        return replace(self, lines=self.lines + later.lines, ended=later.ended)

    def scheduler(self, hasher: BlockHasher | None) -> Scheduler:
        """Returns the scheduler that it began with, with a cache of its own. Raises RecordingError for none."""
        fresh = self.blueprint.scheduler(self.blueprint.cache(), hasher)
        if not self.part:
            return fresh
        if self.snapshot is None:
            raise RecordingError(
                f"it is part {self.part + 1} of a recording and has no snapshot of what it began with: without that it "
                "replays only where the part before it is beside it, as FILE.previous"
            )
        try:
            made = restored(self.snapshot, fresh, hasher)
            made.stats()  # a first look at what any file may have
        except SnapshotError as error:
            raise RecordingError(str(error)) from None
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise RecordingError(f"its snapshot has no scheduler at work: {error!r:.200}") from None
        return made

    @staticmethod
    def parse(lines: Iterable[str]) -> "Recording":
        """Reads the lines of a recording. Leaves out the last one where it is cut off.

        Raises:
            RecordingError: They are no recording of this version.
        """
        read = list(takewhile(lambda line: line.endswith("\n"), lines))
        header = _object(1, read[0]) if read else {}
        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise RecordingError(f'the first line has no "format": "{FORMAT}" with "version": {VERSION}')
        try:
            blueprint = Blueprint.from_json(header["blueprint"])
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"the settings are those of another version: {error}") from None
        lines, taken, ended = _sorted_out(read)
        try:
            return Recording(
                blueprint,
                bool(header.get("tokens")),
                lines[1:],
                ended,
                str(header["recording"]),
                int(header["part"]),
                tuple(map(int, taken.get("live", ()))),
                taken.get("snapshot"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"the first line or the snapshot is none of Quire: {error!r:.200}") from None


def _sorted_out(read: list[str]) -> tuple[list[str], dict[str, Any], str]:
    """Returns the lines of a part with "" in place of those that are no calls, its snapshot, and why it ended early.

    The snapshot may come behind the end. On a full disk it may be broken, or behind a call that is cut off: then calls
    are lost, so that those behind it do not follow those before it.
    """
    lines, taken = list(read), dict[str, Any]()
    found = next((number for number, line in enumerate(read) if SNAPSHOT in line), None)
    if found is not None:
        lines[found] = ""
        try:
            taken = dict(json.loads(read[found][read[found].index(SNAPSHOT) :]))
        except (ValueError, TypeError, RecursionError):
            return lines[:found], {}, FULL
        if not read[found].startswith(SNAPSHOT):
            return lines[:found], taken, FULL
    last = next(number for number in range(len(lines) - 1, -1, -1) if lines[number])
    ended = str(_object(last + 1, lines[last]).get("ended", ""))
    if ended:
        lines[last] = ""
    return lines, taken, ended


def _object(number: int, line: str) -> dict[str, Any]:
    """Returns the object of a line. Raises RecordingError."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise RecordingError(f"line {number} is no JSON object: this is no recording of Quire") from None


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The first difference between a recording and its replay.

    Attributes:
        step: Number of the step.
        name: The array of the plan; "plan" where only one side has a plan, "raised" for an exception.
        recorded: Value in the recording: the array, or "rows:checksum" of a large one; None where it is empty.
        replayed: Value in the replay.
    """

    step: int
    name: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedCall:
    """A call of the scheduler, as it was replayed.

    Attributes:
        now: Seconds on the engine's clock.
        events: Events of a call of `schedule`.
        plan: Its plan.
        outputs: Outputs of a call of `commit`; None for one of `schedule`.
    """

    now: float
    events: list[Event] = field(default_factory=list)
    plan: StepPlan | None = None
    outputs: StepOutputs | None = None


class Replay:
    """A replay. Iterate it to the end; it ends early at the first difference.

    Attributes:
        scheduler: The new scheduler.
        difference: The first difference; None without one so far.
        steps: Steps replayed.
        requests: Attempts submitted.
        seconds: Time between the first and the last call.
        raised: Exception of the last call, which the recording's had too; None without one.
    """

    def __init__(self, recording: Recording) -> None:
        """Makes the scheduler that a recording began with. Raises RecordingError for one without its beginning."""
        self.raised: Exception | None = None
        self._recording, blueprint = recording, recording.blueprint
        size = blueprint.layout.page_size
        self._hasher = BlockHasher(REPLAY_SECRET, b"", size) if blueprint.prefix_cache else None
        self.scheduler: Scheduler = recording.scheduler(self._hasher)
        self.difference: PlanDifference | None = None
        self.steps = self.requests = 0
        self.seconds = 0.0

    def __iter__(self) -> Iterator[ReplayedCall]:
        """Yields each call after it has run. Raises RecordingError for a line that is no call."""
        first = None
        for number, call in self._recording.calls():
            try:
                done = self._schedule(call) if "schedule" in call else self._commit(call)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise RecordingError(f"line {number} is no call of a scheduler: {error!r}") from None
            if done is None:
                return
            first = done.now if first is None else first
            self.seconds = done.now - first
            yield done

    def run(self) -> PlanDifference | None:
        """Replays to the end. Returns the first difference."""
        for _ in self:
            pass
        return self.difference

    def _schedule(self, call: Mapping[str, Any]) -> ReplayedCall | None:
        now, events = float(call["schedule"]), [self._event(one) for one in call.get("events", ())]
        self.requests += sum(isinstance(event, Submit) for event in events)
        plan, raised = None, None
        try:
            plan = self.scheduler.schedule(now, events)
        except Exception as error:
            raised = error
        if self._differs(call, raised, plan) or raised:
            return None
        self.steps += plan is not None
        return ReplayedCall(now, events, plan)

    def _commit(self, call: Mapping[str, Any]) -> ReplayedCall | None:
        now, result = float(call["commit"]), self._result(call) if "step" in call else None
        outputs, raised = None, None
        try:
            outputs = self.scheduler.commit(result, now)
        except Exception as error:
            raised = error
        if self._differs(call, raised, None) or outputs is None:
            return None
        return ReplayedCall(now, outputs=outputs)

    def _differs(self, call: Mapping[str, Any], raised: Exception | None, plan: StepPlan | None) -> bool:
        """Compares a call with what it did here. Keeps a difference, or the exception that it had there too."""
        before, here = call.get("plan"), None if plan is None else json.loads(json.dumps(fingerprint(plan)))
        name_raised = None if raised is None else type(raised).__name__
        if call.get("raised") != name_raised:
            self.difference = PlanDifference(self.steps, "raised", call.get("raised"), name_raised)
        elif (before is None) != (here is None):
            self.difference = PlanDifference(self.steps, "plan", before, here)
        elif before is not None and here is not None and before != here:
            names = [*here, *(name for name in before if name not in here)]
            name = next(name for name in names if before.get(name) != here.get(name))
            self.difference = PlanDifference(self.steps, name, before.get(name), here.get(name))
        if self.difference is None and raised is not None:
            self.raised = raised
        return self.difference is not None

    def _event(self, one: Mapping[str, Any]) -> Event:
        if "submit" in one:
            return self._submit(one)
        if "abort" in one:
            return Abort(one["abort"], one.get("index"))
        if "ready" in one:
            return Ready(one["ready"], "fault" if one.get("fault") else "")
        return AdminQuery(one["ask"], AdminQuestion(one["question"]))

    def _submit(self, one: Mapping[str, Any]) -> Submit:
        if self._recording.tokens:
            prompt, stops = np.array(one["prompt"], np.int32), tuple(one["stops"])
            emitted = tuple(None if tokens is None else tuple(tokens) for tokens in one["emitted"])
        else:
            prompt, emitted, stops = submitted_tokens(one, self._recording.blueprint.layout.page_size)
        width, penalty, alternatives = one.get("beam") or (0, 1.0, -1)
        params = LogitsParams(
            frequency=float(one.get("processed", False)),
            grammar="grammar" if one.get("grammar") else "",
            grammar_tokens=int(one.get("closes", False)),
        )
        controls = Controls(0.0, 1.0, 0, 0.0, 0, alternatives, params, bool(one.get("prompt_logprobs")))
        request = Request(
            prompt,
            one["max_tokens"],
            stops,
            controls,
            one.get("queue_timeout"),
            _scope(one.get("scope", {})),
            one.get("count", 1),
            Beam(width, penalty) if width else None,
            priority=one.get("priority", 0),
            deadline=one.get("deadline"),
        )
        again, isolated = bool(one.get("again")), one.get("isolated_steps", 0)
        submit = Submit(one["submit"], request, emitted, again, isolated)
        if recorded := one.get("transferred"):
            submit = replace(submit, transferred=self._transferred(submit, recorded))
        return submit

    def _transferred(self, submit: Submit, recorded: list[list[Any]]) -> dict[BlockHash, TransferredPage]:
        """Returns the pages that came with a request, of zeros: plans do not depend on their content."""
        if self._hasher is None:
            return {}
        chains = []
        for sequence in sequences_of(submit, 0.0, 0):
            chain = self._hasher.chain(submit.request.scope)
            chain.extend(sequence.tokens())
            chains.append(chain)
        pages, page_bytes = {}, self._recording.blueprint.layout.page_bytes
        for number, index, tables in recorded:
            there = np.array(tables, np.bool_)
            content = np.zeros((np.count_nonzero(there), page_bytes), np.uint8)
            pages[chains[number].hashes[index]] = TransferredPage(there, content)
        return pages

    def _result(self, call: Mapping[str, Any]) -> StepResult:
        count = call["drawn"]
        offers = call.get("offers", ())
        width = max((len(ids) for _, ids, _ in offers), default=0)
        ids, top = np.full((count, width), -1, np.int32), np.full((count, width), -np.inf, np.float32)
        for i, one, logprobs in offers:
            ids[i], top[i] = one, logprobs
        recorded = call.get("tokens", [])
        return StepResult(
            call["step"],
            np.array(recorded, np.int32) if self._recording.tokens else drawn_tokens(count, recorded),
            Logprobs(np.zeros(count, np.float32), np.ones(count, np.int32), ids, top),
            tuple((row, "fault") for row in call.get("faults", ())),
            tuple(call.get("lost", ())),
            call.get("swapping", 0.0),
            images_encoded=call.get("images", 0),
            jumps=np.array(call.get("jumps", []), np.int32).reshape(-1, 2),
        )


def _scope(one: Mapping[str, Any]) -> Scope:
    salt = one.get("salt")
    return Scope(
        tenant_alias(one.get("tenant", 0)),
        f"salt-{salt}" if salt else "",
        one.get("public", 0),
        tuple(ImageSpan(start, end, b"%d" % number) for start, end, number in one.get("images", ())),
        one.get("bidirectional", 0),
    )
