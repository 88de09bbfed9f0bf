"""The page of a running cluster of two ranks, in a real browser."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.clients.page.browser import Browser
from tests.clients.page.load import streams
from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.support.captured_process import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

SETTINGS = "[scheduler]\nprofile_every_steps = 50\n"
PICTURES = ROOT / "docs" / "images"
"""Where `LOCKSTEP_PICTURES=1 make page` saves pictures of the page."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """A cluster of two ranks with the built-in model."""
    with running_lockstep(tmp_path_factory.mktemp("run"), 2, settings=SETTINGS) as running:
        yield running


@pytest.fixture
def page(browser: Browser, cluster: RunningLockstep) -> Browser:
    """The page, connected."""
    browser.open(f"http://127.0.0.1:{cluster.port}/")
    browser.wait_for_text("connected", "header")
    browser.wait_for_text("ready", "header")
    return browser


def _save(browser: Browser, name: str, selector: str = "") -> None:
    if os.environ.get("LOCKSTEP_PICTURES"):
        browser.save_screenshot(PICTURES / name, selector)


def test_page_of_busy_cluster_shows_every_panel_and_loads_nothing_from_outside(
    page: Browser, cluster: RunningLockstep
) -> None:
    """Each panel shows figures of the running cluster; all files come from the gateway."""
    with streams(cluster, 6):
        page.wait_for_count("#timeline .step.decode", 10)
        page.wait_for_count("#streams tbody tr", 6)
        page.wait_for_text("Largest loss", "#timeline", 60.0)
        page.wait_for_count("#timeline .parts tbody tr", 2)
        cells = page.text("#cluster tbody").split("\n")
        assert [line.split("\t")[:2] for line in cells] == [["0", "ready"], ["1", "ready"]]
        assert "part 2 of 2 of every layer" in page.text("#cluster")
        assert "decode" in page.text("#streams tbody")
        page.wait_for_text("Last cache misses", "#cache")
        page.wait_for_count("#charts canvas", 4)
        page.wait_for_text("Epoch 1 is ready", "#events")
        generated = page.script("return document.querySelector('#charts .now').innerText")
        assert float(generated.split()[1]) > 10.0
        _save(page, "page.png")
    urls = page.script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(urls) > 10
    assert {url.split("/")[2] for url in urls} == {f"127.0.0.1:{cluster.port}"}
    assert page.complaints() == []


@pytest.mark.parametrize(("width", "dark"), [(1_400, False), (1_400, True), (390, False)])
def test_page_in_light_dark_and_on_phone_has_no_accessibility_violation(
    page: Browser, cluster: RunningLockstep, width: int, dark: bool
) -> None:
    """axe-core objects to nothing, and a narrow screen does not scroll sideways."""
    page.show_as(width, 900, dark=dark)
    with streams(cluster, 2):
        page.wait_for_count("#timeline .step", 5)
        page.wait_for_count("#streams tbody tr", 2)
        page.click("Options", "#playground")
        assert page.violations() == []
        assert page.script("return document.documentElement.scrollWidth") <= width
        if width < 500 or dark:
            _save(page, f"page-{'dark' if dark else 'phone'}.png")


# On a busy machine the browser is too slow to show 20 steps in time.
@pytest.mark.alone
def test_steps_are_chosen_by_keyboard_and_by_click(page: Browser, cluster: RunningLockstep) -> None:
    """The arrow keys move through the steps; the plan and times of the chosen one are shown."""
    with streams(cluster, 2):
        page.wait_for_count("#timeline .step.decode", 20)
        lanes = page.find("#timeline .lanes")
        lanes.send_keys(Keys.ARROW_LEFT)
        page.wait_for_text("Milliseconds after its plan was sent", "#timeline")
        first = lanes.get_attribute("aria-valuetext")
        lanes.send_keys(Keys.ARROW_LEFT)
        wait_until(lambda: lanes.get_attribute("aria-valuetext") != first, 10.0)
        second = lanes.get_attribute("aria-valuetext")
        assert first
        assert second
        assert int(second.split()[1]) == int(first.split()[1]) - 1
        assert second in page.text("#timeline").replace("\n", " ")
        page.click("Go on", "#timeline")
        page.wait_for_count("#timeline .step.decode .device", 5)
        page.script(
            "document.querySelector('#timeline .step.decode .device')"
            ".dispatchEvent(new MouseEvent('click', { bubbles: true }))"
        )
        page.wait_for_text("Milliseconds after its plan was sent", "#timeline")


def test_request_that_is_cancelled_on_page_ends_with_error_for_its_client(
    page: Browser, cluster: RunningLockstep
) -> None:
    """The client reads that an operator has cancelled its request, and the slot is free."""
    with streams(cluster, 1, max_tokens=3_000) as ends:
        page.wait_for_count("#streams tbody button", 1)
        page.press(page.find("#streams tbody button"))
        page.wait_for_text("is cancelled", "#streams")
        wait_until(lambda: len(ends) > 0, 30.0)
    assert ends[0] == "The request was cancelled by an operator."


# On a busy machine the browser is too slow for 150 rows: the test took 10 s alone, and 173 beside
# others.
@pytest.mark.alone
def test_page_with_200_streams_shows_50_and_all_on_demand(
    page: Browser, cluster: RunningLockstep
) -> None:
    """Waiting requests have places; the page stays responsive."""
    with streams(cluster, 200, max_tokens=400):
        page.wait_for_count("#streams tbody tr", 50)
        page.wait_for_text("waits, place 1", "#streams")
        wait_until(
            lambda: "Show all" in page.text("#streams"), 30.0, failure=lambda: page.text("#streams")
        )
        page.script(
            "[...document.querySelectorAll('#streams button')]"
            ".find((one) => one.innerText.startsWith('Show all')).click()"
        )
        page.wait_for_count("#streams tbody tr", 150)
        began = page.script("return performance.now()")
        page.wait_for_count("#streams tbody tr", 100)
        assert page.script("return performance.now()") - began < 5_000
    assert page.complaints() == []


def test_playground_answers_with_options_and_compares_speculation(
    page: Browser, cluster: RunningLockstep
) -> None:
    """An answer, log probabilities, a schema, and speculation on and off side by side."""
    page.click("Options", "#playground")
    page.script("document.querySelector('[name=max_tokens]').value = 24")
    page.type("#playground [name=prompt]", "What is Lockstep?")
    page.click("Send", "#playground")
    text = page.wait_for_text("tokens/s", "#playground .answer", 60.0)
    assert "24 generated" in text
    page.press(page.find("#playground [name=logprobs]"))
    page.press(page.find("#playground [name=compare]"))
    page.type("#playground [name=prompt]", "And why?")
    page.click("Send", "#playground")
    page.wait_for_count("#playground .answer", 2, 60.0)
    page.wait_for_count("#playground .token", 30, 60.0)
    titles = [one.text for one in page.find_all("#playground .answer h3")]
    assert titles == ["Speculation as configured", "Speculation off"]
    # Nothing can be sent before the second answer has ended.
    page.wait_for_count("#playground .play button:not([type]):not([disabled])", 1, 60.0)
    page.type("#playground [name=schema]", "{no json")
    page.type("#playground [name=prompt]", "Once more")
    page.click("Send", "#playground")
    page.wait_for_text("The schema is not JSON", "#playground")


_NOTE_BANNERS = """
window.banners = [];
const note = () => {
  const banner = document.querySelector('.banner');
  if (banner) window.banners.push(banner.innerText);
};
new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
"""
"""Has the page keep the texts of its banners, however short they are shown."""


def test_killed_rank_and_killed_gateway_are_said_and_page_goes_on(
    page: Browser, cluster: RunningLockstep
) -> None:
    """The page names the lost rank and how long recovery took; without a gateway it says so, and
    it comes back by itself."""
    with streams(cluster, 2):
        page.wait_for_count("#timeline .step.decode", 5)
        os.kill(cluster.children()["rank-worker 1"], signal.SIGKILL)
        # A recovery takes seconds: a starved browser may show it only when it is over.
        page.wait_for_text("Last recovery", "#cluster")
        _save(page, "page-recovery.png", "#cluster")
        said = page.wait_for_text("The cluster was ready again after", "#cluster", 60.0)
        assert "ank 1" in said
        page.wait_for_text("Epoch 2 is ready", "#events")
    gateway = cluster.children()["gateway"]
    # On a busy machine the gateway may be back before the next look at the page.
    page.script(_NOTE_BANNERS)
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: "Not connected" in page.script("return window.banners.join()"), 60.0)
    wait_until(lambda: cluster.children().get("gateway", gateway) != gateway, 30.0)
    page.wait_for_text("ready", "header", 60.0)
    wait_until(lambda: page.count(".banner") == 0, 30.0)


def test_trace_that_page_records_is_downloaded(page: Browser, tmp_path: Path) -> None:
    """The button gives a file that Perfetto's viewer reads."""
    page.click("Record a trace", "#timeline")
    page.wait_for_text("The trace is downloaded", "#timeline", 60.0)
    wait_until(lambda: any(tmp_path.glob("lockstep-trace*.json")), 10.0)
