"""The page where two keys look at it, and where one rank is slow."""

import json
import re
from pathlib import Path

import pytest

from services.commands.bench.random_model import make_random_model
from services.supervisor.status.profile_query import ProfileQuery
from shared.configuration.loading import load_config
from shared.configuration.settings import Config
from shared.measurements.step_losses import largest_loss
from tests.clients.page.browser import WAIT_S, Browser
from tests.clients.page.load import streams
from tests.end_to_end.running_lockstep import path_of_late_rank, running_lockstep
from tests.support.captured_process import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

ALICE, BOB = "alice-has-a-long-secret-key", "bob-has-another-secret-key"


def test_page_asks_for_key_and_shows_text_and_cancel_button_to_owner_only(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong key is refused; Bob sees that Alice's request runs, and can do nothing with it."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"alice={ALICE},bob={BOB}")
    with running_lockstep(tmp_path, 1) as running, streams(running, 1, key=ALICE):
        for key, buttons in ((BOB, 0), (ALICE, 1)):
            browser.open(f"http://127.0.0.1:{running.port}/")
            browser.wait_for_text("This server needs an API key.")
            assert browser.violations() == []
            browser.type("#key", "wrong")
            browser.click("Connect")
            browser.wait_for_text("This key is not valid.")
            browser.find("#key").clear()
            browser.type("#key", key)
            browser.click("Connect")
            browser.wait_for_count("#streams tbody tr", 1)
            browser.wait_for_text("connected", "header")
            assert browser.count("#streams tbody button") == buttons
            misses = "Last cache misses" in browser.text("#cache")
            assert misses == (key == ALICE)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "seconds", "parts"),
    [("attention", 0.002, {"attention"}), ("collective", 0.001, {"attention", "the MLP"})],
)
def test_page_names_rank_that_others_wait_for_and_its_part(
    browser: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    seconds: float,
    parts: set[str],
) -> None:
    """2 ms in attention, or 1 ms before each sum, of one rank stand in a sentence on the page.

    Its figures are those of the steps that the scheduler has kept. Ranks may be later than planned,
    but not earlier.
    """
    monkeypatch.setenv("PYTHONPATH", path_of_late_rank(tmp_path, kind, seconds))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    settings = "[scheduler]\nprofile_every_steps = 10\n"
    with running_lockstep(run_dir, 2, settings=settings) as running:
        with streams(running, 1):
            browser.open(f"http://127.0.0.1:{running.port}/")
            browser.wait_for_text("a step for rank 1", "#timeline .loss", 90.0)
        config = load_config(str(running.config_file))
        # No step follows, so that the page and the scheduler soon say the same.
        wait_until(
            lambda: (found := _largest_loss(config)) and found in browser.text("#timeline .loss"),
            WAIT_S,
            poll_s=0.5,
            failure=lambda: f"{_largest_loss(config)} {browser.text('#timeline .loss')}",
        )
        said = browser.text("#timeline .loss")
    found = re.search(
        r"wait ([\d.]+) ms a step for rank 1: (.+?) takes ([\d.]+) ms there, ([\d.]+) ms else", said
    )
    assert found is not None, said
    awaited_ms, there_ms, elsewhere_ms = (float(found[one]) for one in (1, 3, 4))
    assert found[2] in parts
    layers = json.loads((ROOT / "models/demo/config.json").read_text())["num_hidden_layers"]
    planted_ms = layers * seconds * 1e3
    assert there_ms > planted_ms
    assert there_ms > elsewhere_ms
    assert awaited_ms > 0.6 * len(parts) * planted_ms


def _largest_loss(config: Config) -> str:
    """Return the largest loss in the measured steps that the scheduler has kept."""
    with ProfileQuery(config) as query:
        return largest_loss(query.collect(1, WAIT_S, lambda _: None), 2)


def test_page_shows_load_of_experts_by_layer_and_rank(browser: Browser, tmp_path: Path) -> None:
    """The shares of the ranks add up, and every layer's busiest expert is named."""
    folder = tmp_path / "model"
    make_random_model(folder, "tiny-moe")
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    settings = '[world]\nsharding = "expert"\n[scheduler]\nexperts_every_steps = 10\n'
    with (
        running_lockstep(run_dir, 2, "--model", str(folder), settings=settings) as running,
        streams(running, 2, model="model") as ends,
    ):
        browser.open(f"http://127.0.0.1:{running.port}/")
        said = browser.wait_for_text("of the load", "#experts", 60.0)
        shares = [int(word) for word in re.findall(r"Rank \d: (\d+) %", said)]
        assert len(shares) == 2
        assert abs(sum(shares) - 100) <= 1
        assert browser.count("#experts tbody tr") == 4
        assert browser.count("#experts canvas") == 1
        # The ranks' shares come with another report than the counts.
        browser.wait_for_text("experts 8 to 15 of 16", "#cluster", WAIT_S)
        assert browser.violations() == []
        assert not any(ends)
