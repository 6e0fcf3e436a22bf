"""What requests took is divided without a rest, and the last one is told by when it came."""

import time

import pytest

from rpc.services.inference.statistics import Statistics


def test_the_time_of_a_request_is_divided_without_a_rest() -> None:
    statistics = Statistics()
    for waited in (0.005, 9.0):  # the second says more than there was
        with statistics.counted() as passage:
            time.sleep(0.002)
            passage.open()
            time.sleep(0.01)
            passage.end(waited)
            time.sleep(0.001)
    told = statistics.message("m").inference_stats
    parts = (told.queue, told.compute_input, told.compute_infer, told.compute_output)
    assert {part.count for part in parts} == {told.success.count} == {2}
    assert sum(part.ns for part in parts) == told.success.ns
    assert told.queue.ns >= 15 * 10**6
    assert 5 * 10**6 <= told.compute_infer.ns < told.queue.ns
    assert told.compute_input.ns >= 4 * 10**6
    assert told.compute_output.ns >= 2 * 10**6


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
