"""Who is let in: places and bytes are counted, refused past the bound, and always given back."""

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.http import admission
from services.gateway.http.admission import AdmissionControl, AdmittedRequest
from services.gateway.http.connection_limits import DESCRIPTORS_RESERVED, connections_max
from services.gateway.http.errors import ApiError
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from shared.clock import ManualClock


def _admission(requests_max: int = 2) -> tuple[AdmissionControl, StatusBoard]:
    status = StatusBoard(ManualClock())
    return AdmissionControl(requests_max, status), status


def test_places_are_counted_from_the_headers_on() -> None:
    """The third of two is a 429; one that left makes room; who was not let in leaves nothing."""
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


def test_bodies_together_are_bounded() -> None:
    """A body counts as soon as it is announced, more when it is longer, and not once encoded."""
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


def test_what_was_read_is_unanswered_until_it_leaves() -> None:
    """A drain waits for whole requests, not for those that are still on their way."""
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


def test_who_is_read_and_not_encoded_is_about_to_follow() -> None:
    """One that arrives within some turns of the loop counts; one whose body is not control, not."""

    async def arrive(one: AdmittedRequest) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        one.mark_read()

    async def look(arriving: list[AdmittedRequest]) -> bool:
        tasks = [asyncio.create_task(arrive(one)) for one in arriving]
        follow = await control.more_requests_expected()
        await asyncio.gather(*tasks)
        return follow

    control, _ = _admission(10)
    requests = [make_mocked_request("POST", "/") for _ in range(3)]
    admitted = [control.admit(one) for one in requests]
    assert not asyncio.run(look([]))
    assert asyncio.run(look(admitted[:2]))
    admitted[0].release_body()
    assert asyncio.run(look([]))
    control.remove(requests[1])
    control.remove(requests[0])
    assert (control.encoding, asyncio.run(look([]))) == (0, False)


@pytest.mark.parametrize("descriptors", [64, 256, 1_024, 8_192, 2**20])
def test_some_descriptors_are_spared(descriptors: int) -> None:
    """Enough for this process's own files, however many or few there are."""
    most = connections_max(descriptors)
    assert most >= 1
    assert descriptors < 256 or descriptors - most >= DESCRIPTORS_RESERVED
