"""Division of a pause into its parts, from the log of a stack."""

import json
from pathlib import Path

import pytest

from services.commands.bench.serving.recovery import divide_pause, read_event_times


def _line(event: str, at_s: float, role: str = "scheduler") -> str:
    return json.dumps({"time": at_s, "role": role, "event": event}) + "\n"


def test_parts_of_pause_add_up_to_pause() -> None:
    """Each part ends at its event of the log, and the last at the streams' next token."""
    events_s = {"epoch_ended": 100.1, "epoch_begins": 100.3, "world_ready": 101.0}

    parts = divide_pause(100.0, events_s, 101.5)

    assert parts == pytest.approx(
        {
            "pause_ms": 1_500.0,
            "noticed_ms": 100.0,
            "processes_ms": 200.0,
            "ready_ms": 700.0,
            "first_token_ms": 500.0,
        }
    )


def test_parts_beside_missing_event_are_unknown_and_pause_is_known() -> None:
    """Without the time of one event neither the part before nor the part after it is invented."""
    parts = divide_pause(100.0, {"epoch_ended": 100.1, "world_ready": 101.0}, 101.5)

    assert parts["pause_ms"] == pytest.approx(1_500.0)
    assert parts["processes_ms"] is None
    assert parts["ready_ms"] is None


def test_only_events_of_scheduler_after_start_of_recovery_are_read(tmp_path: Path) -> None:
    """Earlier lines, other roles and lines that are no JSON do not count; the last of a kind does.
    An epoch may end again before the world is ready."""
    log = tmp_path / "lockstep.log"
    earlier = _line("world_ready", 1.0)
    log.write_text(
        f"{earlier}"
        f"{_line('epoch_ended', 2.0)}"
        "[ring] a line of MLX\n"
        f"{_line('world_ready', 3.0, role='gateway')}"
        f"{_line('epoch_ended', 4.0)}"
    )

    assert read_event_times(log, len(earlier)) == {"epoch_ended": 4.0}
