"""Who is let in: places and bytes are counted, refused past the bound, and always given back."""

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.http import admission
from services.gateway.http.admission import AdmissionControl, AdmittedRequest
from services.gateway.http.connection_limits import DESCRIPTORS_SPARED, connections_max
from services.gateway.http.errors import ApiError
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from shared.clock import ManualClock


def _door(requests_max: int = 2) -> tuple[AdmissionControl, StatusBoard]:
    status = StatusBoard(ManualClock())
    return AdmissionControl(requests_max, status), status


def test_places_are_counted_from_the_headers_on() -> None:
    """The third of two is a 429; one that left makes room; who was not let in leaves nothing."""
    here, _ = _door()
    requests = [make_mocked_request("POST", "/") for _ in range(3)]
    here.enter(requests[0])
    here.enter(requests[1])
    with pytest.raises(ApiError) as refused:
        here.enter(requests[2])
    assert (refused.value.status, refused.value.retry_after_s) == (429, admission.FULL_RETRY_S)
    here.leave(requests[2])
    here.leave(requests[0])
    here.enter(make_mocked_request("POST", "/"))


def test_bodies_together_are_bounded() -> None:
    """A body counts as soon as it is announced, more when it is longer, and not once encoded."""
    here, _ = _door(100)
    first, second = make_mocked_request("POST", "/"), make_mocked_request("POST", "/")
    visit = here.enter(first)
    visit.hold(admission.BODIES_BYTES_MAX - 10)
    other = here.enter(second)
    other.hold(10)
    with pytest.raises(ApiError) as refused:
        other.hold(11)
    assert (refused.value.status, refused.value.retry_after_s) == (429, admission.BODIES_RETRY_S)
    visit.release()
    visit.release()
    other.hold(11)
    here.leave(first)
    here.leave(second)
    here.enter(make_mocked_request("POST", "/")).hold(admission.BODIES_BYTES_MAX)


def test_what_was_read_is_unanswered_until_it_leaves() -> None:
    """A drain waits for whole requests, not for those that are still on their way."""
    here, status = _door()
    half, whole = make_mocked_request("POST", "/"), make_mocked_request("POST", "/")
    here.enter(half)
    here.enter(whole).note_read()
    assert here.unanswered == 1
    status.is_draining = True
    with pytest.raises(ApiError) as refused:
        here.enter(make_mocked_request("POST", "/"))
    assert (refused.value.status, refused.value.close) == (503, True)
    here.leave(half)
    assert here.unanswered == 1
    here.leave(whole)
    assert here.unanswered == 0


def test_who_is_read_and_not_encoded_is_about_to_follow() -> None:
    """One that arrives within some turns of the loop counts; one whose body is not here, not."""

    async def arrive(one: AdmittedRequest) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        one.note_read()

    async def look(arriving: list[AdmittedRequest]) -> bool:
        tasks = [asyncio.create_task(arrive(one)) for one in arriving]
        follow = await here.others_follow()
        await asyncio.gather(*tasks)
        return follow

    here, _ = _door(10)
    requests = [make_mocked_request("POST", "/") for _ in range(3)]
    visits = [here.enter(one) for one in requests]
    assert not asyncio.run(look([]))
    assert asyncio.run(look(visits[:2]))
    visits[0].release()
    assert asyncio.run(look([]))
    here.leave(requests[1])
    here.leave(requests[0])
    assert (here.encoding, asyncio.run(look([]))) == (0, False)


@pytest.mark.parametrize("descriptors", [64, 256, 1_024, 8_192, 2**20])
def test_some_descriptors_are_spared(descriptors: int) -> None:
    """Enough for this process's own files, however many or few there are."""
    most = connections_max(descriptors)
    assert most >= 1
    assert descriptors < 256 or descriptors - most >= DESCRIPTORS_SPARED
