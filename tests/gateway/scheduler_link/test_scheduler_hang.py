"""A scheduler that hangs and wakes again: requests are refused meanwhile, and none is lost."""

import json
import time
from pathlib import Path

import pytest

from tests.gateway import raw_client
from tests.gateway.concurrent_requests import MESSAGES, TOKENS, Asking, until
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import say


@pytest.mark.proof
def test_a_scheduler_that_hangs_makes_us_unready(model_folder: Path, tmp_path: Path) -> None:
    """F15: within 5 s /readyz is false and new requests a 503; all goes on when it goes on."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.1)
        asking = Asking(gateway)
        until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        with gateway.scheduler.stopped():
            until(lambda: gateway.get("/readyz")[0] == 503, 5.0)
            reason = json.loads(gateway.get("/readyz")[1])["reason"]
            assert reason == "the scheduler does not report"
            body = {"model": "tiny", "messages": MESSAGES}
            got, _, headers = gateway.post(raw_client.CHAT, body)
            assert (got, headers["retry-after"]) == (503, "5")
            assert gateway.get("/livez")[0] == 200
        gateway.wait_ready()
        asking.check()
        assert len(gateway.scheduler.orders) == 4


@pytest.mark.proof
def test_a_scheduler_that_hangs_for_longer_than_a_session(
    model_folder: Path, tmp_path: Path
) -> None:
    """After PEER_SILENCE_S the session is given up; when it wakes, a new one has all requests."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.1)
        asking = Asking(gateway)
        until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        with gateway.scheduler.stopped():
            time.sleep(15.0)
        asking.check()
        assert len(gateway.scheduler.orders) == 8
