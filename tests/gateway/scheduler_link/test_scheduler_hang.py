"""A scheduler that hangs for a while: new requests are refused, open requests continue."""

import json
import time
from pathlib import Path

import pytest

from tests.gateway import raw_client
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scheduler_link.concurrent_requests import MESSAGES, start_requests
from tests.support.waiting import wait_until


@pytest.mark.proof
def test_gateway_is_unready_while_scheduler_hangs(model_folder: Path, tmp_path: Path) -> None:
    """F15: within 5 s /readyz and new requests are 503; open requests continue afterwards."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        requests = start_requests(gateway)
        time.sleep(0.3)
        with gateway.scheduler.paused():
            wait_until(lambda: gateway.get("/readyz")[0] == 503, 5.0)
            reason = json.loads(gateway.get("/readyz")[1])["reason"]
            assert reason == "the scheduler does not report"
            body = {"model": "tiny", "messages": MESSAGES}
            status_code, _, headers = gateway.post(raw_client.CHAT, body)
            assert (status_code, headers["retry-after"]) == (503, "5")
            assert gateway.get("/livez")[0] == 200
        gateway.wait_ready()
        requests.check()
        assert len(gateway.scheduler.submitted) == 4


@pytest.mark.proof
def test_open_requests_resume_when_hung_scheduler_continues_after_session_timeout(
    model_folder: Path, tmp_path: Path
) -> None:
    """After PEER_SILENCE_S the session ends; the new session resumes all open requests."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        requests = start_requests(gateway)
        time.sleep(0.3)
        with gateway.scheduler.paused():
            time.sleep(15.0)
        requests.check()
        assert len(gateway.scheduler.submitted) == 8
