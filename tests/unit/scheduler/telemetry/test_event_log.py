"""The log of events in words."""

import re
from pathlib import Path

from services.scheduler.events import WriteLog
from services.scheduler.telemetry.event_log import _SENTENCES, EventLog, sentence
from shared import limits

SCHEDULER = Path(__file__).resolve().parents[4] / "services" / "scheduler"


def test_epoch_that_ends_and_next_ready_world_are_one_recovery() -> None:
    """Epochs that end before they are ready belong to it; all get the time of readiness."""
    log = EventLog()
    fields = {"epoch": 1, "cause": "Rank 1 is lost (closed)."}
    log.note([WriteLog("warning", "epoch_ended", fields)], 10.0)
    log.note([WriteLog("info", "epoch_begins", {"epoch": 2, "ranks": 2, "backend": "ring"})], 10.5)
    again = {"epoch": 2, "cause": "Rank 0 is lost (closed)."}
    log.note([WriteLog("warning", "epoch_ended", again)], 11.0)
    assert [one.ready_at_s for one in log.ended_epochs] == [None, None]
    log.note([WriteLog("info", "world_ready", {"epoch": 3, "seconds": 2.0})], 13.0)
    assert [(one.epoch, one.ready_at_s) for one in log.ended_epochs] == [(1, 13.0), (2, 13.0)]
    assert [one.text for one in log.events] == [
        "Epoch 1 has ended: Rank 1 is lost (closed).",
        "Epoch 2 begins with 2 ranks over ring.",
        "Epoch 2 has ended: Rank 0 is lost (closed).",
        "Epoch 3 is ready after 2.0 s.",
    ]


def test_log_keeps_last_events_only() -> None:
    """Memory is bounded."""
    log = EventLog()
    for number in range(limits.ACTIVITY_EVENTS_MAX + 10):
        log.note([WriteLog("info", "handed_over", {"requests": number})], float(number))
    assert len(log.events) == limits.ACTIVITY_EVENTS_MAX
    assert log.events[0].at_s == 10.0


def test_every_sentence_belongs_to_event_that_scheduler_logs() -> None:
    """A renamed event takes its sentence along."""
    source = "\n".join(path.read_text() for path in SCHEDULER.rglob("*.py"))
    logged = set(re.findall(r"(?:WriteLog|_log)\(\s*\"\w+\",\s*\"(\w+)\"", source))
    assert logged >= set(_SENTENCES)
    assert sentence("something_new", {"rank": 3}) == "something new: rank 3"
