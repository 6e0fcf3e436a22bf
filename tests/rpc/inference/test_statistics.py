"""The time of requests is divided without a rest, and the last request is told by its arrival."""

import time

import pytest

from rpc.services.inference.statistics import Passage, Statistics


def test_the_time_of_a_request_is_divided_without_a_rest() -> None:
    statistics = Statistics()
    # Served in between, never, before it was tokenized, and after its end: what two clocks may say.
    for served in (7_000, None, 1_000, 20_000):
        with statistics.counted() as passage:
            passage.came -= 20_000
            passage.opened, passage.ended = passage.came + 3_000, passage.came + 11_000
            passage.served = None if served is None else passage.came + served
    told = statistics.message("m").inference_stats
    parts = (told.queue, told.compute_input, told.compute_infer, told.compute_output)
    assert {part.count for part in parts} == {told.success.count} == {4}
    assert sum(part.ns for part in parts) == told.success.ns
    assert [part.ns for part in parts[:3]] == [4_000 + 8_000, 4 * 3_000, 4_000 + 2 * 8_000]


def test_a_passage_takes_the_moments_as_they_come() -> None:
    passage, now = Passage(), time.monotonic()
    passage.open()
    passage.end(now)
    assert passage.came <= passage.opened <= passage.ended
    assert passage.served == round(now * 1e9)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_is_raised_fails_the_request(error: type[BaseException]) -> None:
    statistics, before = Statistics(), time.time_ns() // 10**6
    with pytest.raises(error), statistics.counted():
        raise error
    assert statistics.message("m").last_inference == 0
    with statistics.counted() as passage:
        passage.open()
        passage.end(0.0)
    told = statistics.message("m")
    assert (told.inference_count, told.inference_stats.fail.count) == (1, 1)
    assert before <= told.last_inference <= time.time_ns() // 10**6
