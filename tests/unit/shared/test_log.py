"""Log lines: readable text, or one JSON object a line."""

import json
import logging
from collections.abc import Iterator

import pytest

from shared import log
from shared.configuration.settings import LogConfig


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def test_text_names_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A text line holds the level, the event and every field."""
    log.set_up("scheduler", LogConfig(level="info"))

    log.Log("scheduler").info("step_finished", step_id=3, busy_ms=1.5)

    line = capsys.readouterr().err
    assert line.endswith("info    step_finished step_id=3 busy_ms=1.5\n")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines get time, level, role, event and the fields, whatever their types."""
    log.set_up("rank_worker", LogConfig(format="json"))

    log.Log("rank_worker").warning("odd", peer=b"\xff", many={"a": [1]}, text="two\nlines")

    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["role"], entry["event"]) == ("warning", "rank_worker", "odd")
    assert entry["many"] == {"a": [1]}
    assert entry["text"] == "two\nlines"


def test_levels_below_the_configured_one_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """The level in the configuration is the least that is written."""
    log.set_up("gateway", LogConfig(level="error"))
    logger = log.Log("gateway")

    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    logger.error("d")

    assert capsys.readouterr().err.split()[1:] == ["error", "d"]


def test_an_exception_brings_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """`exception` shows where it came from."""
    log.set_up("gateway", LogConfig())
    try:
        raise ValueError("boom")
    except ValueError:
        log.Log("gateway").exception("failed", request_id="r1")

    text = capsys.readouterr().err
    assert "failed request_id=r1" in text
    assert "ValueError: boom" in text
