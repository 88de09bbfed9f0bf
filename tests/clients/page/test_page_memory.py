"""Memory of a page that stays open under load, in the browser and in the gateway."""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.clients.page.browser import Browser
from tests.clients.page.load import streams
from tests.end_to_end.running_lockstep import running_lockstep

pytestmark = [pytest.mark.proof, pytest.mark.timeout(8_000)]

OPEN_S = float(os.environ.get("LOCKSTEP_PAGE_SECONDS", "30"))
"""Time for which the page is open. Its charts are full after 900 s, its steps much earlier."""
SAMPLES = 10
MIB = 2**20


def test_page_that_stays_open_under_load_keeps_its_memory(browser: Browser, tmp_path: Path) -> None:
    """Browser and gateway need no more at the end than once charts and steps were full."""
    with running_lockstep(tmp_path, 1) as running, streams(running, 3, max_tokens=500) as ends:
        gateway = psutil.Process(running.children()["gateway"])
        browser.open(f"http://127.0.0.1:{running.port}/")
        browser.wait_for_count("#timeline .step", 10)
        heap, resident = [], []
        for _ in range(SAMPLES):
            time.sleep(OPEN_S / SAMPLES)
            heap.append(browser.heap_bytes() / MIB)
            resident.append(gateway.memory_info().rss / MIB)
        print("\nMiB of the page", [round(one, 1) for one in heap])
        print("MiB of the gateway", [round(one, 1) for one in resident])
        assert "connected" in browser.text("header")
        assert browser.script("return document.getElementsByTagName('*').length") < 5_000
    assert len(ends) > 0
    # The first samples of a short run are from before its charts are full: 900 points of 12 lines.
    assert heap[-1] < heap[SAMPLES // 3] + 3.0
    assert resident[-1] < resident[SAMPLES // 3] + 8.0
