"""Flight recorder: what goes into a scheduler, and fingerprints of its plans, as lines of JSON.

`Scheduler.schedule` and `commit` are pure. So their arguments, in order, are all that a replay needs
(`scheduler.replaying`). A recording has parts, of which the last two are kept. The first line of a part is a header
with the scheduler's blueprint. Each further line is one call:

    {"schedule": now, "events": [...], "plan": {...}}
    {"commit": now, "step": 7, "drawn": 64, "tokens": [[3, 2]], ...}

Fields that are empty are left out. A recording is complete at each line, so it needs no end: it survives the death of
its engine, whatever the reason. The last line is {"ended": why} where the recorder has stopped before its engine.

In each part but the first, one line has a snapshot of the scheduler as the part began. It comes late, since a replay of
the part before makes it:

    {"live": [5, 9], "snapshot": [...]}

Texts are never recorded: neither grammars and arguments of logits processors, nor tenants and salts, which get numbers.
`scheduler.stand_ins` says what stands for tokens.
"""

import hashlib
import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import DEFAULT_TENANT, BlockHasher, Scope
from cache_manager.manager import CacheManager
from scheduler.blueprint import Blueprint
from scheduler.controls import NO_LOGITS_PARAMS
from scheduler.events import Abort, AdminQuery, Event, Ready, StepOutputs, Submit
from scheduler.rows import Rows, sequences_of
from scheduler.scheduler import Scheduler
from scheduler.settings import RecordSettings
from scheduler.snapshot import snapshot
from scheduler.stand_ins import StandIns, StepDraws
from scheduler.step import Join, StepPlan, StepResult

TIMES = ("queue_timeout", "deadline")  # of a request, of which 0 is not none
SNAPSHOT = '{"live":'  # the beginning of a line with a snapshot
FORMAT, VERSION = "quire-recording", 3
MOST_PARTS = 2  # times --record-steps that a part has at most
SHOWN = 24  # numbers of an array that a fingerprint shows; of larger ones it has a checksum
TOKEN_COLUMNS = {"forced": 1, "drafts": 1, "jumps": 2}  # columns of a plan's arrays that have tokens
PLAN_ARRAYS = tuple(one.name for one in fields(StepPlan) if one.name not in ("step", "joins"))

log = logging.getLogger("quire.scheduler")

encode = json.JSONEncoder(separators=(",", ":")).encode


def fingerprint(plan: StepPlan) -> dict[str, Any]:
    """Returns what a recording has of a plan: its arrays by name, without tokens and without empty ones.

    Small arrays are shown; large ones are "rows:checksum".
    """
    found: dict[str, Any] = {"step": plan.step}
    if plan.joins:
        found["joins"] = _shown(np.array([_join(join) for join in plan.joins], np.int64))
    for name in PLAN_ARRAYS:
        array = getattr(plan, name)
        if len(array):
            found[name] = _shown(np.delete(array, TOKEN_COLUMNS[name], 1) if name in TOKEN_COLUMNS else array)
    return found


def _join(join: Join) -> list[int]:
    transferred = () if join.transfer is None else join.transfer.pages.tolist()
    pages = zlib.crc32(repr(transferred).encode()) if transferred else 0
    return [join.row, len(join.tokens), join.prompt_count, join.index, join.bidirectional, len(transferred), pages]


def _shown(array: NDArray) -> Any:
    return array.tolist() if array.size <= SHOWN else f"{len(array)}:{zlib.crc32(array.tobytes()):08x}"


def tenant_alias(number: int) -> str:
    """Returns the name that a replay gives a tenant."""
    return f"tenant-{number}" if number else DEFAULT_TENANT


def snapshot_line(scheduler: Scheduler) -> str:
    """Returns the line, without its line break, with the state of a scheduler. Raises SnapshotError."""
    return f'{SNAPSHOT}{encode(scheduler.live_attempts())},"snapshot":{encode(snapshot(scheduler))}}}'


def part_header(name: str, part: int, tokens: bool, blueprint: Blueprint) -> str:
    """Returns the first line of a part, without its line break.

    Args:
        name: Name that the parts of one recording have in common.
        part: Number of the part, from 0.
        tokens: Whether it has token ids.
        blueprint: Of the scheduler, without names of tenants.
    """
    return encode(
        {
            "format": FORMAT,
            "version": VERSION,
            "recording": name,
            "tokens": tokens,
            "blueprint": blueprint.to_json(),
            "part": part,
        }
    )


class Numbers:
    """Numbers in place of names, in order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str | bytes, int] = {}

    def of(self, name: str | bytes) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1)


class RecordingEnd(Exception):
    """No further part can begin; the message says why."""


class RecordingParts(Protocol):
    """Files of one recording."""

    def write(self, line: str) -> None:
        """Adds a line, given without its line break, to the current part."""

    def begin_part(self, header: str) -> bool:
        """Begins a part with this line, and drops the part before the one that was current.

        Returns False, and does nothing, while the current part has no snapshot yet. Raises RecordingEnd where it will
        never have one.
        """


class Recorder:
    """Writes the calls of one scheduler. A part has `settings.steps` calls of `schedule`, or up to twice as many.

    Attributes:
        ended: Why nothing more is recorded; "" while it records.
    """

    def __init__(self, blueprint: Blueprint, settings: RecordSettings, key: bytes, parts: RecordingParts) -> None:
        """Begins a recording.

        Args:
            blueprint: Of the scheduler.
            settings: Length of a part, and whether tokens are kept.
            key: Secret of the stand-ins, at least 16 random bytes that are used once.
            parts: Takes the lines.
        """
        self._parts, self._write, self.ended = parts, parts.write, ""
        self._steps = 0  # of the current part
        self._part_steps, self._part = settings.steps, 0
        cached = blueprint.prefix_cache
        self._stand_ins = None if settings.tokens else StandIns(key, blueprint.layout.page_size, cached)
        self._tenants, self._salts, self._images = Numbers(), Numbers(), Numbers()
        self._launched: deque[StepDraws] = deque()
        self._collected: StepDraws | None = None
        chosen = replace(blueprint.settings, tenant_weights=self._weights(blueprint.settings.weights))
        self._blueprint, self._tokens = replace(blueprint, settings=chosen), settings.tokens
        self._name = hashlib.blake2b(key=key, digest_size=8).hexdigest()
        self._write(self._part_header(0))

    def scheduled(
        self, now: float, events: Sequence[Event], plan: StepPlan | None, rows: Rows, hasher: BlockHasher | None,
        raised: str = "",
    ) -> None:  # fmt: skip
        """Records a call of `schedule`.

        Args:
            now: As in the call.
            events: As in the call.
            plan: What it returned.
            rows: The rows after it.
            hasher: The scheduler's own.
            raised: Name of the exception that it raised; "" for none.
        """
        if self._steps >= self._part_steps:
            self._begin_part()
        if self.ended:
            return
        if self._stand_ins is not None and any(isinstance(one, Submit) and one.request.beam for one in events):
            self._end("a beam search ranks tokens by their ids, which only --record-tokens keeps")
        if self.ended:
            return
        self._steps += 1
        line: dict[str, Any] = {"schedule": now}
        if events:
            line["events"] = [self._event(event, hasher) for event in events]
        if raised:
            line["raised"] = raised
        if plan is not None:
            line["plan"] = fingerprint(plan)
            if self._stand_ins is not None:
                last = self._launched[-1] if self._launched else self._collected
                same = last is not None and last.logits is plan.logits
                self._launched.append(last if same and last is not None else StepDraws.of(rows, plan.logits))
        self._write(encode(line))

    def committed(
        self, now: float, result: StepResult | None, outputs: StepOutputs | None, rows: Rows, raised: str = ""
    ) -> None:
        """Records a call of `commit`; outputs None where it raised an exception. Else as `scheduled`."""
        line: dict[str, Any] = {"commit": now}
        if result is not None:
            line |= self._result(result, outputs, rows)
        if outputs is not None and outputs.ends and self._stand_ins is not None:
            self._stand_ins.forget(outputs.over)
        if raised:
            line["raised"] = raised
        self._write(encode(line))

    def _part_header(self, part: int) -> str:
        return part_header(self._name, part, self._tokens, self._blueprint)

    def _begin_part(self) -> None:
        """Begins the next part, or ends the recording where the current one got no snapshot in all of its time."""
        try:
            if self._parts.begin_part(self._part_header(self._part + 1)):
                self._part, self._steps = self._part + 1, 0
            elif self._steps >= MOST_PARTS * self._part_steps:
                self._end("a replay of its last part takes longer than the part")
        except RecordingEnd as error:
            self._end(str(error))
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can start
            self._end(f"no further part can begin: {error}")

    def _weights(self, weights: Mapping[str, float]) -> str | None:
        """Returns weights of tenants as in the settings, by the names that a replay gives tenants."""
        named = [f"{tenant_alias(self._tenant(tenant))}={weight!r}" for tenant, weight in weights.items()]
        return ",".join(named) or None

    def _tenant(self, tenant: str) -> int:
        return 0 if tenant == DEFAULT_TENANT else self._tenants.of(tenant)

    def _end(self, why: str) -> None:
        self.ended = why
        self._write(encode({"ended": why}))

    def _result(self, result: StepResult, outputs: StepOutputs | None, rows: Rows) -> dict[str, Any]:
        values: dict[str, Any] = {"step": result.step, "drawn": len(result.tokens)}
        if self._stand_ins is None:
            values["tokens"], values["jumps"] = result.tokens.tolist(), result.jumps.tolist()
            values["offers"] = [
                [i, result.logprobs.top_ids[i].tolist(), result.logprobs.top[i].tolist()]
                for i in np.flatnonzero((result.logprobs.top_ids >= 0).any(axis=1)).tolist()
            ]
        elif outputs is not None:
            drawing = self._collected = self._launched.popleft()
            values["tokens"] = self._stand_ins.drawn(drawing, result, outputs, rows)
            if len(result.jumps):
                values["jumps"] = self._stand_ins.jumps(drawing, result.jumps, outputs, rows)
        values["faults"] = [row for row, _ in result.faults]
        values["lost"] = list(result.lost_pages)
        values["swapping"], values["images"] = result.swap_seconds, result.images_encoded
        return {name: value for name, value in values.items() if value or name in ("step", "drawn")}

    def _event(self, event: Event, hasher: BlockHasher | None) -> dict[str, Any]:
        if isinstance(event, Submit):
            return {"submit": event.attempt, **self._submit(event, hasher)}
        if isinstance(event, Abort):
            return {"abort": event.attempt} | ({} if event.index is None else {"index": event.index})
        if isinstance(event, Ready):
            return {"ready": event.attempt} | ({"fault": True} if event.fault else {})
        return self._question(event)

    @staticmethod
    def _question(event: AdminQuery) -> dict[str, Any]:
        return {"ask": event.ticket, "question": event.question.value}

    def _submit(self, event: Submit, hasher: BlockHasher | None) -> dict[str, Any]:
        request = event.request
        params, beam = request.controls.logits_params, request.beam
        values: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "queue_timeout": request.queue_timeout,
            "scope": self._scope(request.scope),
            "count": request.count if request.count != 1 else 0,
            "beam": None if beam is None else [beam.width, beam.length_penalty, request.controls.top_logprobs],
            "priority": request.priority,
            "deadline": request.deadline,
            "processed": params != NO_LOGITS_PARAMS,
            "grammar": bool(params.grammar),
            "closes": bool(params.grammar_tokens),
            "prompt_logprobs": request.controls.prompt_logprobs,
            "again": event.again,
            "isolated_steps": event.isolated_steps,
            "transferred": [] if hasher is None or not event.transferred else _transferred(event, hasher),
        }
        values = {name: value for name, value in values.items() if value or (name in TIMES and value == 0)}
        if self._stand_ins is not None:
            return values | self._stand_ins.submit(event)
        emitted = [None if tokens is None else list(tokens) for tokens in event.emitted]
        stops = list(request.stop_ids)
        return values | {"prompt": request.prompt.tolist(), "emitted": emitted, "stops": stops}

    def _scope(self, scope: Scope) -> dict[str, Any]:
        values = {
            "tenant": self._tenant(scope.tenant),
            "salt": self._salts.of(scope.salt) if scope.salt else 0,
            "public": scope.public,
            "images": [[one.start, one.end, self._images.of(one.digest)] for one in scope.images],
            "bidirectional": scope.bidirectional,
        }
        return {name: value for name, value in values.items() if value}


def _transferred(event: Submit, hasher: BlockHasher) -> list[list[Any]]:
    """Returns sequence, index of the page in it, and tables, of each page that came with a request."""
    found = {}
    for number, sequence in enumerate(sequences_of(event, 0.0, 0)):
        chain = hasher.chain(event.request.scope)
        chain.extend(sequence.tokens())
        for i, block_hash in enumerate(chain.hashes):
            if block_hash in event.transferred:
                found[block_hash] = [number, i, event.transferred[block_hash].tables.tolist()]
    return list(found.values())


class RecordedScheduler(Scheduler):
    """A scheduler that hands each of its calls to a recorder, until this ends."""

    def __init__(
        self, blueprint: Blueprint, cache: CacheManager, hasher: BlockHasher | None, recorder: Recorder
    ) -> None:
        """Makes the scheduler of a blueprint. cache, hasher: as in `Blueprint.scheduler`."""
        super().__init__(blueprint.settings, blueprint.queue, cache, hasher, blueprint.drafter(), holds=blueprint.holds)
        self._recorder, self._own_hasher = recorder, hasher

    def schedule(self, now: float, events: Sequence[Event]) -> StepPlan | None:
        plan, raised = None, ""
        try:
            plan = super().schedule(now, events)
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            self._record(lambda to: to.scheduled(now, events, plan, self.rows, self._own_hasher, raised))
        return plan

    def commit(self, result: StepResult | None, now: float) -> StepOutputs:
        outputs, raised = None, ""
        try:
            outputs = super().commit(result, now)
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            self._record(lambda to: to.committed(now, result, outputs, self.rows, raised))
        return outputs

    def _record(self, call: Callable[[Recorder], None]) -> None:
        if self._recorder.ended:
            return
        try:
            call(self._recorder)
        except Exception as error:  # no fault of the disk or of the recorder may end an engine
            self._recorder.ended = f"{type(error).__name__}: {error}"
        if self._recorder.ended:
            log.warning("the recording has ended: %s", self._recorder.ended)
