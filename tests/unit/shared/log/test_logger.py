"""Log lines as text and as JSON."""

import json
import logging
import socket
from collections.abc import Iterator

import pytest

from shared import log
from shared.configuration.settings import LogConfig
from shared.log import logger


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
    """A JSON line has time, level, role, rank, host, event and all fields, of any type."""
    log.set_up("rank-0", LogConfig(format="json"))

    log.Log("rank_worker").warning("odd", peer=b"\xff", many={"a": [1]}, text="two\nlines")

    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["role"], entry["event"]) == ("warning", "rank", "odd")
    assert (entry["rank"], entry["host"]) == (0, socket.gethostname())
    assert entry["many"] == {"a": [1]}
    assert entry["text"] == "two\nlines"


def test_json_line_has_bound_epoch_unless_the_event_names_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once a process knows its epoch, all its lines have it; an event about another keeps that."""
    log.set_up("scheduler", LogConfig(format="json"))
    scheduler_log = log.Log("scheduler")

    scheduler_log.info("before")
    log.bind(epoch=3)
    scheduler_log.info("during", rank=1)
    scheduler_log.info("explained", epoch=2)

    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [entry.get("epoch") for entry in entries] == [None, 3, 2]
    assert entries[1]["role"] == "scheduler"
    assert entries[1]["rank"] == 1


def test_log_omits_events_below_configured_level(capsys: pytest.CaptureFixture[str]) -> None:
    """The configured level is the lowest that is logged."""
    log.set_up("gateway", LogConfig(level="error"))
    gateway_log = log.Log("gateway")

    gateway_log.debug("a")
    gateway_log.info("b")
    gateway_log.warning("c")
    gateway_log.error("d")

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
    monkeypatch.setattr("shared.log.logger.time.monotonic", lambda: now_s)
    log.set_up("gateway", LogConfig(format="json"))

    def fail(kind: type[Exception]) -> None:
        try:
            raise kind
        except kind:
            log.Log("gateway").exception("handler_failed")

    for _ in range(100):
        fail(RecursionError)
    fail(KeyError)
    now_s += logger.TRACEBACK_INTERVAL_S
    fail(RecursionError)

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.get("suppressed") for line in lines] == [None, None, 99]
    assert ["KeyError" in line["traceback"] for line in lines] == [False, True, False]
