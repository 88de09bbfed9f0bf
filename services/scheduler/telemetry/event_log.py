"""Log of the last events in words, and the ended_epochs among them. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, cast

from services.scheduler.events import Action, WriteLog
from shared import limits
from shared.messages import EndedEpoch, NotedEvent

ENDED_EPOCHS_KEPT = 16
_TEXT_CHARS_MAX = 1_000
_SENTENCES = {
    "epoch_begins": "Epoch {epoch} begins with {ranks} ranks over {backend}.",
    "world_ready": "Epoch {epoch} is ready after {seconds} s.",
    "epoch_ended": "Epoch {epoch} has ended: {cause}",
    "epoch_explained": "Why epoch {epoch} has ended: {cause}",
    "world_start_abandoned": "No further epoch begins: {detail}",
    "kv_budget_reduced": "A rank ran out of memory, so rows get {bytes_max} bytes instead of "
    "{was_bytes}.",
    "backend_changed": "The backend is {backend} from now on: {cause}",
    "backend_not_changed": "The backend stays {backend}: {cause}",
    "scheduler_stalled": "The scheduler did not run for {seconds} s.",
    "step_late": "Step {step_id} has taken {seconds} s so far, more than half of its deadline.",
    "handed_over": "This scheduler hands over {requests} requests to another one.",
    "message_refused": "A message {message} of {peer} was refused.",
    "world_changed": "{detail}",
    "blocks_of_another_namespace": "Blocks that another world stored are not used.",
}
"""Sentences of the events that are logged, by event; `{name}` is a field of the event."""


class EventLog:
    """The last events that the scheduler has logged, and the last ended_epochs."""

    def __init__(self) -> None:
        self.events: deque[NotedEvent] = deque(maxlen=limits.ACTIVITY_EVENTS_MAX)
        """The last events, oldest first."""
        self.ended_epochs: deque[EndedEpoch] = deque(maxlen=ENDED_EPOCHS_KEPT)
        """The last ends of epochs, oldest first."""

    def note(self, actions: Iterable[Action], now_s: float) -> None:
        """Note the actions that write to the log.

        Args:
            actions: what the scheduler does now.
            now_s: the monotonic time in seconds.
        """
        for action in actions:
            if type(action) is WriteLog:
                self._note_event(action, now_s)

    def _note_event(self, action: WriteLog, now_s: float) -> None:
        level = cast(Literal["info", "warning", "error"], action.level)
        text = sentence(action.event, action.fields)[:_TEXT_CHARS_MAX]
        self.events.append(NotedEvent(at_s=now_s, level=level, text=text))
        if action.event == "epoch_ended":
            epoch, cause = action.fields["epoch"], action.fields["cause"]
            self.ended_epochs.append(
                EndedEpoch(
                    epoch=cast(int, epoch), cause=str(cause)[:_TEXT_CHARS_MAX], ended_at_s=now_s
                )
            )
        elif action.event == "world_ready" and self.ended_epochs:
            # Epochs that ended before they were ready belong to the same recovery.
            for place, one in enumerate(self.ended_epochs):
                if one.ready_at_s is None:
                    self.ended_epochs[place] = EndedEpoch(
                        epoch=one.epoch,
                        cause=one.cause,
                        ended_at_s=one.ended_at_s,
                        ready_at_s=now_s,
                    )


def sentence(event: str, fields: Mapping[str, object]) -> str:
    """Return an event in words; of an event without a sentence, its name and fields.

    Args:
        event: name of the event in the log.
        fields: its fields.
    """
    if event == "drain_ordered":
        return f"New requests are {'refused' if fields['is_on'] else 'accepted again'}, as ordered."
    if event in _SENTENCES:
        return _SENTENCES[event].format_map(fields)
    words = ", ".join(f"{name} {value}" for name, value in fields.items())
    return f"{event.replace('_', ' ')}: {words}" if words else event.replace("_", " ")
