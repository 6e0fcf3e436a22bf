"""Settings that cannot work are refused with the flag, the value and what is allowed."""

import math

import pytest

from scheduler.settings import QueueLimits, SchedulerSettings


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SchedulerSettings, {"max_sequences": 0}, "--max-sequences is 0, must be in .1, 65536."),
        (
            SchedulerSettings,
            {"max_sequences": 9, "max_batched_tokens": 8},
            "--max-batched-tokens is 8.*--max-sequences .9",
        ),
        (SchedulerSettings, {"prefill_chunk": 0}, "--prefill-chunk is 0, must be at least 1"),
        (SchedulerSettings, {"draft_tokens": -1}, "--speculative-tokens is -1, must be in .0, 64."),
        (SchedulerSettings, {"draft_tokens": 65}, "--speculative-tokens is 65, must be in .0, 64."),
        (SchedulerSettings, {"steps_in_flight": 0}, "--steps-in-flight is 0, must be 1 or 2"),
        (SchedulerSettings, {"steps_in_flight": 3}, "--steps-in-flight is 3, must be 1 or 2"),
        (QueueLimits, {"requests": 0}, "--max-queue is 0, must be at least 1"),
        (QueueLimits, {"wait": 0.0}, "--max-queue-time is 0.0, must be above 0"),
        (QueueLimits, {"wait": math.nan}, "--max-queue-time is nan, must be above 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_the_smallest_settings_are_accepted():
    smallest = SchedulerSettings(max_batched_tokens=1, max_sequences=1, prefill_chunk=1, steps_in_flight=1)
    assert (smallest.chunk, smallest.depth, smallest.ahead) == (1, 1, 1)
    assert QueueLimits(requests=1, wait=0.001).wait == 0.001
