"""Log lines as text and as JSON."""

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


def test_text_log_line_has_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A text line has the level, the event and every field."""
    log.set_up("scheduler", LogConfig(level="info"))

    log.Log("scheduler").info("step_finished", step_id=3, busy_ms=1.5)

    line = capsys.readouterr().err
    assert line.endswith("info    step_finished step_id=3 busy_ms=1.5\n")


def test_json_log_line_is_one_object_with_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON line has time, level, role, event and the fields, also fields of other types."""
    log.set_up("rank_worker", LogConfig(format="json"))

    log.Log("rank_worker").warning("odd", peer=b"\xff", many={"a": [1]}, text="two\nlines")

    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["role"], entry["event"]) == ("warning", "rank_worker", "odd")
    assert entry["many"] == {"a": [1]}
    assert entry["text"] == "two\nlines"


def test_log_omits_events_below_configured_level(capsys: pytest.CaptureFixture[str]) -> None:
    """The configured level is the lowest that is logged."""
    log.set_up("gateway", LogConfig(level="error"))
    logger = log.Log("gateway")

    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    logger.error("d")

    assert capsys.readouterr().err.split()[1:] == ["error", "d"]


def test_logged_exception_includes_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """`exception` logs the traceback."""
    log.set_up("gateway", LogConfig())
    try:
        raise ValueError("boom")
    except ValueError:
        log.Log("gateway").exception("failed", request_id="r1")

    text = capsys.readouterr().err
    assert "failed request_id=r1" in text
    assert "ValueError: boom" in text


def test_repeated_failure_logs_one_traceback_a_minute_and_the_number_of_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that causes 100 failures gets one traceback into the log; other kinds get theirs."""
    now_s = 1_000.0
    monkeypatch.setattr("shared.log.time.monotonic", lambda: now_s)
    log.set_up("gateway", LogConfig(format="json"))

    def fail(kind: type[Exception]) -> None:
        try:
            raise kind
        except kind:
            log.Log("gateway").exception("handler_failed")

    for _ in range(100):
        fail(RecursionError)
    fail(KeyError)
    now_s += log.TRACEBACK_INTERVAL_S
    fail(RecursionError)

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.get("suppressed") for line in lines] == [None, None, 99]
    assert ["KeyError" in line["traceback"] for line in lines] == [False, True, False]
