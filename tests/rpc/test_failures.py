"""Failures of requests, from an engine's end to the status that a client reads."""

import pytest
from google.rpc import error_details_pb2
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.runners import failure_of
from rpc.frontend.errors import RequestFailed, failed_end
from rpc.services.errors import as_failure
from rpc.status import LONGEST, LONGEST_NAME, status_of
from scheduler.events import End, EndReason


def details(failure: RequestFailed, within: str = "spec.") -> dict[str, object]:
    """Returns the details of its status, by kind."""
    found: dict[str, object] = {}
    for packed in status_of(failure, within).details:
        kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])()
        assert packed.Unpack(kind)
        found[kind.DESCRIPTOR.name] = kind
    return found


@pytest.mark.parametrize("reason", [EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT])
def test_who_found_no_room_is_told_when_to_come_back(reason: EndReason) -> None:
    failure = failed_end(End(0, reason, message="full", retry_after=2.345))
    assert failure is not None
    assert (failure.code, failure.reason, failure.message) == ("RESOURCE_EXHAUSTED", reason.name, "full")
    retry = details(failure)["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 2345


@pytest.mark.parametrize(
    ("reason", "code", "told", "again"),
    [
        (EndReason.STUCK, "INVALID_ARGUMENT", "NO_TOKEN_LEFT", False),
        (EndReason.FAULT, "INTERNAL", "REQUEST_FAULT", False),
        (EndReason.ENGINE_FAILED, "UNAVAILABLE", "ENGINE_FAILED", True),
    ],
)
def test_ends_that_are_no_results_say_what_they_mean(reason: EndReason, code: str, told: str, again: bool) -> None:
    failure = failed_end(End(0, reason, message="why"))
    assert failure is not None
    assert (failure.code, failure.reason) == (code, told)
    assert (failure.retry_after is not None) == again == ("RetryInfo" in details(failure))
    assert ("why" in failure.message) == (reason in (EndReason.FAULT, EndReason.STUCK))


@pytest.mark.parametrize("seconds", [0.25, 1.0, 7.5, 0.0])
def test_an_entry_of_a_batch_tells_when_to_come_back_to_the_millisecond(seconds: float) -> None:
    status = status_of(RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", "full", retry_after=seconds))
    entry = pb.EntryError(code=status.code, message=status.message, details=status.details)
    failure = failure_of(entry)
    assert (failure.code, failure.reason, failure.message) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "full")
    assert failure.retry_after == seconds


def test_a_field_is_a_path_from_the_request() -> None:
    def field(name: str, within: str = "spec.") -> str:
        bad = details(RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "no", field=name), within)["BadRequest"]
        assert isinstance(bad, error_details_pb2.BadRequest)
        return bad.field_violations[0].field

    assert field("sampling.top_p") == "spec.sampling.top_p"
    assert field("interval", "") == "interval"
    for outside in ("request_id", "requests", "stream_options.max_delay"):
        assert field(outside) == outside


def test_a_long_message_is_cut_and_fits_the_metadata() -> None:
    status = status_of(RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "x" * 10_000, field="text"))
    assert status.message == "x" * (LONGEST - 3) + "..."
    assert status.ByteSize() < 4 * LONGEST
    whole = "x" * LONGEST
    assert status_of(RequestFailed("INTERNAL", "REQUEST_FAULT", whole)).message == whole


def test_the_text_of_what_nobody_foresaw_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failure = as_failure(KeyError("/etc/secret"))
    assert (failure.code, failure.reason) == ("INTERNAL", "INTERNAL")
    assert "secret" not in failure.message
    assert "secret" in caplog.text
    foreseen = RequestFailed("INTERNAL", "REQUEST_FAULT", "no")
    assert as_failure(foreseen) is foreseen


def test_a_model_that_is_not_served_is_the_resource() -> None:
    found = details(RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", "no", field="gpt-5" + 5000 * "x"))
    resource = found["ResourceInfo"]
    assert isinstance(resource, error_details_pb2.ResourceInfo)
    assert resource.resource_type == "model"
    assert len(resource.resource_name) == LONGEST_NAME
    assert found.keys() == {"ErrorInfo", "ResourceInfo"}
