"""Admission control: places and body bytes are counted, bounded and returned."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from services.gateway.http import admission
from services.gateway.http.admission import AdmissionControl, AdmittedRequest
from services.gateway.http.connection_limits import DESCRIPTORS_RESERVED, connections_max
from services.gateway.http.errors import ApiError
from services.gateway.links.scheduler_status import StatusBoard
from shared.clock import ManualClock


def _admission(requests_max: int = 2, share: float = 1.0) -> tuple[AdmissionControl, StatusBoard]:
    status = StatusBoard(ManualClock())
    return AdmissionControl(requests_max, share, status), status


def _request(address: str) -> web.Request:
    return make_mocked_request("POST", "/").clone(remote=address)


def test_gateway_answers_429_over_request_limit_until_one_request_ends() -> None:
    """The third request of two gets a 429; a removed request frees its place."""
    control, _ = _admission()
    requests = [make_mocked_request("POST", "/") for _ in range(3)]
    control.admit(requests[0])
    control.admit(requests[1])
    with pytest.raises(ApiError) as refused:
        control.admit(requests[2])
    assert (refused.value.status, refused.value.retry_after_s) == (429, admission.REQUESTS_RETRY_S)
    control.remove(requests[2])
    control.remove(requests[0])
    control.admit(make_mocked_request("POST", "/"))


def test_gateway_refuses_request_when_body_bytes_of_all_requests_exceed_limit() -> None:
    """A body counts as far as it has arrived, and not after it is encoded."""
    control, _ = _admission(100)
    first, second = make_mocked_request("POST", "/"), make_mocked_request("POST", "/")
    large = control.admit(first)
    large.reserve_body(admission.BODIES_BYTES_MAX - 10)
    small = control.admit(second)
    small.reserve_body(10)
    with pytest.raises(ApiError) as refused:
        small.reserve_body(11)
    assert (refused.value.status, refused.value.retry_after_s) == (429, admission.BODIES_RETRY_S)
    large.release_body()
    large.release_body()
    small.reserve_body(11)
    control.remove(first)
    control.remove(second)
    control.admit(make_mocked_request("POST", "/")).reserve_body(admission.BODIES_BYTES_MAX)


def test_what_a_large_request_keeps_until_its_end_stays_reserved() -> None:
    """Items to store and tools live as long as the answer, so they count as long."""
    control, _ = _admission(100)
    first, second = make_mocked_request("POST", "/"), make_mocked_request("POST", "/")
    large, other = control.admit(first), control.admit(second)
    large.reserve_body(admission.BODIES_BYTES_MAX)
    large.release_body(100)
    with pytest.raises(ApiError):
        other.reserve_body(admission.BODIES_BYTES_MAX - 99)
    other.reserve_body(admission.BODIES_BYTES_MAX - 100)
    large.release_body(1_000)
    assert large.reserved_bytes == 100
    control.remove(first)
    other.reserve_body(admission.BODIES_BYTES_MAX)


def test_tenant_that_uses_up_its_share_is_refused_and_another_is_admitted() -> None:
    """Three of four places are one tenant's share; the sentence says whose limit is reached."""
    control, _ = _admission(4, share=0.75)
    for _ in range(3):
        control.admit(_request("192.0.2.1"))
    with pytest.raises(ApiError, match="your share") as refused:
        control.admit(_request("192.0.2.1"))
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    control.admit(_request("192.0.2.2"))
    with pytest.raises(ApiError, match="The server is full"):
        control.admit(_request("192.0.2.3"))


def test_bodies_of_one_tenant_leave_memory_for_bodies_of_another() -> None:
    """A tenant's bodies take at most its share of the memory, and the rest is for others."""
    control, _ = _admission(100, share=0.75)
    body_bytes = admission.BODIES_BYTES_MAX // 16
    for _ in range(12):
        control.admit(_request("192.0.2.1")).reserve_body(body_bytes)
    refused = control.admit(_request("192.0.2.1"))
    with pytest.raises(ApiError, match="your share"):
        refused.reserve_body(body_bytes)
    control.admit(_request("192.0.2.2")).reserve_body(body_bytes)


def test_completions_of_one_tenant_leave_places_for_those_of_another() -> None:
    """Completions count until their request is removed, each tenant's up to its share."""
    control, _ = _admission(8, share=0.75)
    first, second = _request("192.0.2.1"), _request("192.0.2.1")
    control.admit(first)
    control.admit(second)
    control.reserve_choices(first, 5)
    with pytest.raises(ApiError, match="your share"):
        control.reserve_choices(second, 2)
    other = _request("192.0.2.2")
    control.admit(other)
    control.reserve_choices(other, 2)
    control.remove(first)
    control.reserve_choices(second, 2)


def test_drain_waits_for_completely_read_requests_and_refuses_new_ones() -> None:
    """A drain waits for complete requests only, and refuses new ones with a 503."""
    control, status = _admission()
    half, whole = make_mocked_request("POST", "/"), make_mocked_request("POST", "/")
    control.admit(half)
    control.admit(whole).mark_read()
    assert control.unanswered == 1
    status.is_draining = True
    with pytest.raises(ApiError) as refused:
        control.admit(make_mocked_request("POST", "/"))
    assert (refused.value.status, refused.value.close) == (503, True)
    control.remove(half)
    assert control.unanswered == 1
    control.remove(whole)
    assert control.unanswered == 0


def test_more_requests_expected_is_true_only_while_read_requests_are_not_encoded() -> None:
    """Requests read completely but not encoded are expected; others are not."""

    async def mark_read_later(one: AdmittedRequest) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        one.mark_read()

    async def expects_more(pending: list[AdmittedRequest]) -> bool:
        tasks = [asyncio.create_task(mark_read_later(one)) for one in pending]
        expected = await control.more_requests_expected()
        await asyncio.gather(*tasks)
        return expected

    control, _ = _admission(10)
    requests = [make_mocked_request("POST", "/") for _ in range(3)]
    admitted = [control.admit(one) for one in requests]
    assert not asyncio.run(expects_more([]))
    assert asyncio.run(expects_more(admitted[:2]))
    admitted[0].release_body()
    assert asyncio.run(expects_more([]))
    control.remove(requests[1])
    control.remove(requests[0])
    assert (control.encoding, asyncio.run(expects_more([]))) == (0, False)


@pytest.mark.parametrize("descriptors", [64, 256, 1_024, 8_192, 2**20])
def test_connection_limit_leaves_descriptors_for_files_of_gateway(descriptors: int) -> None:
    """The bound on connections leaves descriptors for the process's own files."""
    most = connections_max(descriptors)
    assert most >= 1
    assert descriptors < 256 or descriptors - most >= DESCRIPTORS_RESERVED
