"""Sends hostile constraints to the checker of a frontend, and what it accepts to an engine's side.

    python -m tests.chaos.hostile_grammars --count 200000 --seed 0

Each is answered, and refused in bounded time with a reason; what is accepted is served, or ends its own request alone.
Prints what happened as it goes, and at the end one line of JSON. Ends with code 1 where a law was broken.

`--seed N --count 1` repeats the constraint of a seed.
"""

import argparse
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from unittest.mock import patch

from model.inputs import grammar_checker
from model.inputs.grammar_checker import Checked, GrammarChecker
from model.inputs.grammars import GrammarRefused
from model.inputs.line_process import LineProcess
from scheduler.invalid import InvalidRequest
from scheduler.structured import FIELD, Structured
from tests.support.grammar_engine import Died, GrammarEngine
from tests.support.hostile_grammars import Hostile, draw

VOCABULARY = 128_000  # tokens of the engine
MOST_REASON = 300  # characters of a refusal, which quotes no more
GOOD_EVERY = 20  # constraints, after which the checker has to accept a good one
SLOW_STEP = 50.0  # milliseconds
SHOWN = 40  # reasons and ended requests that are printed


class CountedProcess(LineProcess):
    """The checker's process, counted."""

    started = 0
    ended: ClassVar[Counter[int]] = Counter()

    def __init__(self, module: str) -> None:
        super().__init__(module)
        CountedProcess.started += 1

    def end(self) -> int:
        code = super().end()
        CountedProcess.ended[code] += 1
        return code


@dataclass
class Campaign:
    """Counts of a campaign.

    Attributes:
        outcomes: Count by kind of constraint and outcome.
        reasons: Count by class of a refusal's reason.
        faults: Count by class of a request's fault in the engine.
        answers: Milliseconds of each answer of the checker.
        compiles: Milliseconds of processor time of each compilation in the engine.
        late: Most milliseconds in which a step's thread did not run during each of them, of any cause.
        steps: Most milliseconds of processor time that each constraint took of a step's thread.
        ended: Constraints that ended their requests in the engine.
        slow: Constraints that took more than `SLOW_STEP` of a step.
        wrong: Broken laws, each with the constraint that shows it.
    """

    checker: GrammarChecker
    engine: GrammarEngine
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    answers: list[float] = field(default_factory=list)
    compiles: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def send(self, hostile: Hostile) -> None:
        """Sends one constraint, and now and then a good one after it."""
        self.outcomes[hostile.kind, self._outcome(hostile)] += 1
        if hostile.seed % GOOD_EVERY == 0:
            good = f"good {hostile.seed}"
            try:
                if good not in self.checker.grammar(Structured.regex(good), "t").grammar:
                    self.wrong.append(f"{hostile}: another answer to a good pattern after it")
            except Exception as error:  # any is a violation
                self.wrong.append(f"{hostile}: a good pattern after it: {error!r:.200}")

    def _outcome(self, hostile: Hostile) -> str:
        try:
            structured = hostile.structured()
        except InvalidRequest as invalid:
            self._look_at(hostile, invalid.reason)
            if not invalid.field.startswith(FIELD):
                self.wrong.append(f"{hostile}: the field is called {invalid.field!r}")
            return "invalid"
        except Exception as error:  # any is a violation
            self.wrong.append(f"{hostile}: before the checker: {error!r:.200}")
            return "raised"
        began = time.perf_counter()
        try:
            checked = self.checker.grammar(structured, "t")
        except GrammarRefused as refused:
            self._look_at(hostile, str(refused))
            return "refused"
        except Exception as error:  # any is a violation
            self.wrong.append(f"{hostile}: {error!r:.200}")
            return "raised"
        finally:
            self.answers.append(1000 * (time.perf_counter() - began))
        return self._run(hostile, checked)

    def _look_at(self, hostile: Hostile, reason: str) -> None:
        if not reason.strip():
            self.wrong.append(f"{hostile}: it is refused without a reason")
        if len(reason) > MOST_REASON:
            self.wrong.append(f"{hostile}: the reason has {len(reason)} characters")
        self.reasons[class_of(reason)] += 1

    def _run(self, hostile: Hostile, checked: Checked) -> str:
        try:
            run = self.engine.serve(checked.grammar, None if checked.short is None else len(checked.short.encode()))
        except Died as died:
            self.wrong.append(f"{hostile}: the engine died: {died}")
            return "engine died"
        self.compiles.append(run.compile_ms)
        self.late.append(run.late_ms)
        self.steps.append(run.step_ms)
        if run.step_ms > SLOW_STEP:
            self.slow.append(f"{hostile}: {run.step_ms:.0f} ms of a step")
        if run.fault:
            self.faults[class_of(run.fault)] += 1
            if len(self.ended) < SHOWN:
                self.ended.append(f"{hostile}: after {run.tokens} tokens: {run.fault:.200}")
            return "ended in the engine" if run.tokens else "refused by the engine"
        return "served"

    def summary(self, seconds: float) -> dict[str, object]:
        kinds: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.outcomes.items()):
            kinds.setdefault(kind, {})[outcome] = count
        return {
            "constraints": sum(self.outcomes.values()),
            "outcomes": kinds,
            "reasons": dict(self.reasons.most_common(SHOWN)),
            "faults_in_the_engine": dict(self.faults.most_common(SHOWN)),
            "checkers_started": CountedProcess.started,
            "checkers_ended_by_code": dict(CountedProcess.ended),
            "engines_started": self.engine.starts,
            "answer_wall_ms": quantiles(self.answers),
            "engine_compile_cpu_ms": quantiles(self.compiles),
            "engine_late_wall_ms": quantiles(self.late),
            "engine_step_cpu_ms": quantiles(self.steps),
            "slow_steps": len(self.slow),
            "wrong": len(self.wrong),
            "seconds": round(seconds),
        }


def quantiles(values: list[float]) -> dict[str, float]:
    """Returns a few order statistics."""
    ordered = sorted(values) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2) for name, part in places.items()}


def class_of(reason: str) -> str:
    """Returns a reason without what it quotes."""
    text = re.sub(r"^/.*?(/[$\w-]*: )", r"...\1", reason, flags=re.DOTALL)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\"\S*|/\S*/", "...", text)
    return re.sub(r"\d+", "N", re.sub(r"[^\x20-\x7e]+", "?", text))[:80]


@contextmanager
def campaign(vocabulary: int = VOCABULARY) -> Iterator[Campaign]:
    """Makes one. Its processes are ended behind it."""
    with patch.object(grammar_checker, "LineProcess", CountedProcess):
        made = Campaign(GrammarChecker(), GrammarEngine(vocabulary))
        try:
            yield made
        finally:
            made.checker.close()
            made.engine.close()


def main(count: int, seed: int, vocabulary: int, minutes: float) -> int:
    """Returns the exit code."""
    logging.basicConfig(level=logging.WARNING)
    began = told = time.monotonic()
    with campaign(vocabulary) as made:
        for number in range(seed, seed + count):
            known = len(made.slow), len(made.wrong)
            made.send(draw(number))
            for line in (*made.slow[known[0] :], *made.wrong[known[1] :]):
                print(ascii(line), flush=True)
            now = time.monotonic()
            if now - told > 30:
                told = now
                rate = (number + 1 - seed) / (now - began)
                print(
                    f"{number + 1 - seed} constraints, {rate:.0f}/s, {len(made.slow)} slow, {len(made.wrong)} wrong",
                    flush=True,
                )
            if now - began > 60 * minutes:
                break
        for line in made.ended:
            print(ascii(line), flush=True)
        print(json.dumps(made.summary(time.monotonic() - began)), flush=True)
        return int(bool(made.wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="Of the first constraint.")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="Tokens of the engine.")
    parser.add_argument("--minutes", type=float, default=1e9, help="It ends after these.")
    sys.exit(main(**vars(parser.parse_args())))
